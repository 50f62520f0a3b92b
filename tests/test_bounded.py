"""A prompt in chunks under a cap, and answers that are evicted while they are written."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

import decantkv
from decantkv.cache.evicting_cache import cache_argument, deferred
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.stores.dense import DenseStore
from decantkv.cache.watching import ObservingCache
from tests.support import tiny
from tests.support.families import at_least, build
from tests.support.judge import hiding, kept_masks, logits_with

CAP = {"prefill_chunk": 24, "max_kv_tokens": 40}


def in_chunks(model, cache, inputs, chunk):
    """Feed a prompt by hand; what each layer stored after each chunk, and the last logits."""
    ids = inputs["input_ids"]
    real = inputs.get("attention_mask", torch.ones_like(ids))
    position, stored, out = (real.cumsum(-1) - 1).clamp_min(0), [], None
    with torch.no_grad(), deferred(cache):
        for low in range(0, ids.shape[1], chunk):
            high = min(low + chunk, ids.shape[1])
            out = model(
                ids[:, low:high],
                attention_mask=real[:, :high],
                position_ids=position[:, low:high],
                **{cache_argument(model): cache},
            )
            stored.append([layer.stored for layer in cache.layers])
    return stored, out.logits[:, -1]


def step(model, cache, mask, token=7):
    mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    with torch.no_grad():
        out = model(
            torch.full((mask.shape[0], 1), token),
            attention_mask=mask,
            position_ids=mask.sum(-1, keepdim=True) - 1,
            **{cache_argument(model): cache},
        )
    return out.logits[:, -1], mask


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("length", [150, 147, 121, 24, 30])
def test_the_stored_tokens_never_pass_the_cap(attention, length):
    model = tiny.llama(attention=attention)
    cache = decantkv.EvictingCache(model, budget=0.2, **CAP)
    stored, _ = in_chunks(model, cache, {"input_ids": tiny.prompt(length)}, 24)
    assert max(max(layers) for layers in stored) <= 40
    assert [layer.stored for layer in cache.layers] == [max(8, length // 5)] * 3
    assert cache.get_seq_length() == length
    kept = cache.layers[1].kept.indices
    assert kept.max() == length - 1
    assert (kept.diff(dim=-1) > 0).all(), "original positions, ascending"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_outlived_the_rounds_is_at_its_own_positions(attention):
    """The last chunk and all later tokens attend as in a full cache that hides the dropped tokens."""
    model, ids = tiny.llama(attention=attention, num_hidden_layers=1), tiny.prompt(100)
    cache = decantkv.EvictingCache(model, budget=20, **CAP)
    in_chunks(model, cache, {"input_ids": ids}, 24)
    mask, ours = torch.ones(1, 100, dtype=torch.long), []
    for token in (7, 11, 3):
        logits, mask = step(model, cache, mask, token)
        ours.append(logits)
    # with one layer, keys and values do not depend on what earlier tokens attended to
    with hiding(model, kept_masks(cache, 100)):
        full = DynamicCache(config=model.config)
        judged = logits_with(model, full, {"input_ids": ids}, [torch.tensor([[t]]) for t in (7, 11, 3)])
    torch.testing.assert_close(torch.stack(ours, 1), judged[:, 1:], rtol=0, atol=1e-5)


def straight_line(model, ids, chunk, cap, budget):
    """[H, K] positions: one layer's rounds written out, scores by DropKV's formula over what is left."""
    from decantkv.selection.selector import pool_scores

    seen = {}

    def watch(win):
        seen["win"] = win

    cache = ObservingCache(model, watch, rows=ids.shape[1])
    logits_with(model, cache, {"input_ids": ids}, [])
    win = seen["win"]
    q, k, v = (x[0].double() for x in (win.q, win.k, win.v))
    heads, group, w = k.shape[0], q.shape[0] // k.shape[0], 8
    left = [list(range(0)) for _ in range(heads)]
    ends = [*range(chunk, ids.shape[1], chunk), ids.shape[1]]
    last = 0
    for end in ends:
        left = [one + list(range(last, end)) for one in left]
        last = end
        for limit in [cap] if end < ids.shape[1] else [cap, budget]:
            if len(left[0]) <= limit:
                continue
            for h in range(heads):
                at = torch.tensor(left[h])
                score = torch.zeros(len(at), dtype=torch.float64)
                for g in range(group):
                    for row in range(end - w, end):
                        s = (k[h, at] @ q[h * group + g, row]) * win.scale
                        p = s.masked_fill(at > row, -torch.inf).softmax(0)
                        a = p @ v[h, at]
                        score += (p / (1 - p) * (a - v[h, at]).norm(dim=-1)) ** 2
                pooled = pool_scores(score[None, None], pool="max", kernel_size=11)[0, 0]
                pooled[-w:] = torch.inf
                best = pooled.argsort(descending=True, stable=True)[:limit].sort().values
                left[h] = at[best].tolist()
    return torch.tensor(left)


def test_rounds_keep_what_a_straight_line_computation_keeps():
    model, ids = tiny.llama(num_hidden_layers=1), tiny.prompt(110)
    cache = decantkv.EvictingCache(model, budget=22, **CAP)
    in_chunks(model, cache, {"input_ids": ids}, 24)
    assert torch.equal(cache.layers[0].kept.indices[0], straight_line(model, ids, 24, 40, 22))


@pytest.mark.parametrize("chunk", [16, 24, 100])
@pytest.mark.parametrize("settings", [{}, {"allocation": "ada"}, {"method": "snapkv", "window": 8}])
def test_a_cap_that_never_binds_changes_nothing(chunk, settings):
    model, ids = tiny.llama(), tiny.prompt(100)
    plain = decantkv.EvictingCache(model, budget=0.3, **settings)
    one_shot = logits_with(model, plain, {"input_ids": ids}, [])
    capped = decantkv.EvictingCache(model, budget=0.3, prefill_chunk=chunk, max_kv_tokens=100, **settings)
    _, logits = in_chunks(model, capped, {"input_ids": ids}, chunk)
    torch.testing.assert_close(logits, one_shot[:, -1], rtol=0, atol=1e-5)
    for a, b in zip(plain.layers, capped.layers, strict=True):
        assert torch.equal(a.kept.indices, b.kept.indices)
    assert capped.report().rounds == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("allocation", ["uniform", "ada", "shared", "layer"])
def test_padded_rows_under_a_cap_equal_each_row_alone(attention, allocation):
    """The shorter rows start inside a chunk, so alone their chunks are cut at other places: they are cut alike here."""
    model = tiny.llama(attention=attention)
    rows = [
        tiny.prompt(110, seed=1),
        tiny.prompt(62, seed=2),
        tiny.prompt(14, seed=3),
    ]  # the last: pads in whole chunks
    inputs = tiny.left_padded(rows)
    options = {"budget": 0.3, "allocation": allocation, "sinks": 2, **CAP}
    together = decantkv.EvictingCache(model, **options)
    in_chunks(model, together, inputs, 24)
    batch_mask, said = inputs["attention_mask"], []
    for token in (7, 11):
        logits, batch_mask = step(model, together, batch_mask, token)
        said.append(logits)
    for i, row in enumerate(rows):
        alone = decantkv.EvictingCache(model, **options)
        pads = 110 - row.shape[1]
        first = (24 - pads % 24) % 24
        sizes = [n for n in (first, *[24] * 5) if n]
        low = 0
        with torch.no_grad(), deferred(alone):
            for size in sizes:
                part = row[:, low : low + size]
                if part.shape[1]:
                    model(part, **{cache_argument(model): alone})
                low += size
        mask = torch.ones_like(row)
        for logits in said:
            expected, mask = step(model, alone, mask, 7 if mask.shape[1] == row.shape[1] else 11)
            torch.testing.assert_close(logits[i], expected[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("allocation", ["uniform", "ada", "shared"])
def test_protected_tokens_and_sinks_outlive_every_round(allocation):
    model = tiny.llama()
    inputs = tiny.left_padded([tiny.prompt(130, seed=1), tiny.prompt(101, seed=2)])
    cache = decantkv.EvictingCache(model, budget=25, sinks=2, protect=[(10, 15)], allocation=allocation, **CAP)
    in_chunks(model, cache, inputs, 24)
    for row, pads in enumerate((0, 29)):
        for layer in cache.layers:
            kept = layer.kept.mask(130)[row]
            assert kept[:, pads : pads + 2].all()
            assert kept[:, pads + 10 : pads + 15].all()
            assert kept[:, -8:].all()
            assert kept.sum() == 2 * 25


@pytest.mark.parametrize("allocation", ["ada-kvpress", "ada", "heads", "pyramid", "shared", "uniform"])
def test_protected_tokens_come_before_a_methods_first_stage_under_every_allocation(allocation):
    model, ids = tiny.llama(), tiny.prompt(40)
    settings = {"budget": 0.2, "window": 3, "protect": [(30, 36)], "allocation": allocation}
    cache = decantkv.EvictingCache(model, "defensivekv", **settings, prefill_chunk=8, max_kv_tokens=24)
    in_chunks(model, cache, {"input_ids": ids}, 8)
    for layer in cache.layers:
        assert layer.kept.mask(40)[..., [*range(30, 36), 37, 38, 39]].all()


def test_a_pyramid_never_gives_a_layer_less_than_what_is_protected():
    model, inputs = tiny.llama(), tiny.left_padded([tiny.prompt(130, seed=1), tiny.prompt(101, seed=2)])
    settings = {"budget": 16, "sinks": 2, "protect": [(10, 15)], "allocation": "pyramid"}
    cache = decantkv.EvictingCache(model, **settings, **CAP)
    in_chunks(model, cache, inputs, 24)
    kept = torch.stack([layer.kept.mask(130).expand(-1, 2, -1) for layer in cache.layers])
    for row, pads in enumerate((0, 29)):
        assert kept[:, row, :, pads + 10 : pads + 15].all()
        assert kept[:, row].sum() == 3 * 2 * 16


def test_under_plain_generate():
    model, ids = tiny.llama(), tiny.prompt(150)
    with decantkv.attach(model, budget=0.2) as run:
        whole = model.generate(ids, max_new_tokens=6, **tiny.GREEDY)
    with decantkv.attach(model, budget=0.2, prefill_chunk=32) as chunked:
        assert torch.equal(model.generate(ids, max_new_tokens=6, **tiny.GREEDY), whole)
    assert [r["kept"] for r in chunked.report().layers] == [r["kept"] for r in run.report().layers]
    if not at_least("5.0"):
        pytest.skip("transformers 4 makes the last token a chunk of its own: other chunks, another eviction")
    cache = decantkv.EvictingCache(model, budget=0.2, **CAP)
    _, first = in_chunks(model, cache, {"input_ids": ids}, 24)
    fed = []
    hook = model.model.register_forward_pre_hook(lambda m, a, k: fed.append(k["input_ids"].shape[1]), with_kwargs=True)
    with decantkv.attach(model, budget=0.2, **CAP) as capped:
        out = model.generate(ids, max_new_tokens=4, **tiny.GREEDY)
    hook.remove()
    assert out[0, 150] == first.argmax()
    mask = torch.ones(1, 150, dtype=torch.long)
    for token, following in zip(out[0, 150:-1], out[0, 151:], strict=True):
        logits, mask = step(model, cache, mask, int(token))
        assert logits.argmax() == following
    assert sum(fed) == 150 + 3
    assert max(fed) <= 24
    report = capped.report()
    assert report.rounds == 3 * 6, "from the second of seven chunks on"
    assert [layer["seen"] for layer in report.layers] == [[150]] * 3
    assert [layer["kept"] for layer in report.layers] == [[[30, 30]]] * 3
    assert "18 evictions of a layer" in str(report)


def test_a_budget_above_the_cap_keeps_what_the_cap_left():
    model = tiny.llama()
    cache = decantkv.EvictingCache(model, budget=0.9, **CAP)
    in_chunks(model, cache, {"input_ids": tiny.prompt(150)}, 24)
    assert [layer.stored for layer in cache.layers] == [40] * 3
    assert cache.layers[0].kept.indices[0, 0, -1] == 149
    logits, _ = step(model, cache, torch.ones(1, 150, dtype=torch.long))
    assert logits.isfinite().all()
    assert "max_kv_tokens left fewer tokens than the budget asked for" in cache.report().warnings


# while an answer is written


def answers(model, inputs, number, **options):
    cache = decantkv.EvictingCache(model, **options)
    logits_with(model, cache, inputs, [])
    mask, said, stored = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])), [], []
    for i in range(number):
        logits, mask = step(model, cache, mask, 3 + 7 * i % 190)
        said.append(logits)
        stored.append(cache.layers[0].stored)
    return torch.stack(said), stored, cache


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_answer_stays_within_budget_and_one_interval(attention):
    model = tiny.llama(attention=attention)
    _, stored, cache = answers(model, {"input_ids": tiny.prompt(60)}, 50, budget=30, every=8)
    assert max(stored) <= 30 + 8
    assert min(stored) == 30
    assert [layer.stored for layer in cache.layers] == [32] * 3
    assert cache.report().rounds == 3 * 6
    assert cache.get_seq_length() == 110


def test_evicting_nothing_is_not_evicting():
    model, inputs = tiny.llama(), {"input_ids": tiny.prompt(60)}
    plain, _, _ = answers(model, inputs, 20, budget=0.5)
    roomy, _, cache = answers(model, inputs, 20, budget=0.5, every=4, decode_budget=200)
    assert torch.equal(plain, roomy)
    assert cache.report().rounds == 0


def test_what_an_answers_round_keeps_is_what_scoring_its_last_queries_keeps():
    """After the round the cache is the one that keeps the same tokens of prompt and answer in one piece."""
    model, ids = tiny.llama(num_hidden_layers=1), tiny.prompt(60)
    _, _, cache = answers(model, {"input_ids": ids}, 24, budget=30, every=8)
    text = torch.cat([ids, torch.tensor([[3 + 7 * i % 190 for i in range(24)]])], 1)
    kept = cache.layers[0].kept
    assert kept.indices.shape[2] == 30
    assert (kept.indices[..., -8:] == torch.arange(76, 84)).all(), "the window of the last round"
    with hiding(model, {0: kept.mask(84)}):
        full = DynamicCache(config=model.config)
        judged = logits_with(model, full, {"input_ids": text}, [torch.tensor([[9]])])[:, -1]
    logits, _ = step(model, cache, torch.ones(1, 84, dtype=torch.long), 9)
    torch.testing.assert_close(logits, judged, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{}, {"method": "streaming"}, {"allocation": "shared"}, {"protect": [(3, 9)]}, {"allocation": "pyramid"}]
)
def test_padded_answers_equal_each_row_alone(options):
    model = tiny.llama()
    rows = [tiny.prompt(60, seed=1), tiny.prompt(33, seed=2), tiny.prompt(12, seed=3)]
    options = {"budget": 20, "every": 6, **options}
    together, _, _ = answers(model, tiny.left_padded(rows), 20, **options)
    for i, row in enumerate(rows):
        alone, _, _ = answers(model, {"input_ids": row}, 20, **options)
        torch.testing.assert_close(together[:, i], alone[:, 0], rtol=0, atol=2e-5)


def test_a_protected_prompt_stays():
    model = tiny.llama()
    options = {"budget": 20, "every": 6, "decode_budget": 16, "protect_prompt": True}
    _, stored, cache = answers(model, {"input_ids": tiny.prompt(60)}, 40, **options)
    first = decantkv.EvictingCache(model, budget=20)
    logits_with(model, first, {"input_ids": tiny.prompt(60)}, [])
    for before, after in zip(first.layers, cache.layers, strict=True):
        assert torch.equal(after.kept.indices[..., :20], before.kept.indices)
    assert max(stored) == 20 + 16 + 5
    assert stored[-1] == 36 + 4


@pytest.mark.parametrize("decode", ["model", "own"])
@pytest.mark.parametrize("budget", [20, 0.5])
def test_rounds_keep_in_each_layer_of_a_pyramid_what_its_prompt_kept(budget, decode):
    model = tiny.llama()
    options = {"budget": budget, "window": 3, "every": 5, "allocation": "pyramid", "decode": decode}
    _, _, cache = answers(model, {"input_ids": tiny.prompt(40)}, 10, **options)
    assert [layer.stored for layer in cache.layers] == [36, 20, 4]
    assert cache.report().rounds == 3 * 2


@pytest.mark.parametrize("decode", ["model", "own"])
def test_a_prompt_within_its_pyramid_grows_to_the_layers_shares(decode):
    model = tiny.llama()
    options = {"budget": 20, "window": 3, "every": 5, "allocation": "pyramid", "decode": decode}
    _, _, cache = answers(model, {"input_ids": tiny.prompt(12)}, 40, **options)
    assert [layer.stored for layer in cache.layers] == [36, 20, 4]


@pytest.mark.parametrize("decode", ["model", "own"])
def test_a_protected_prompt_stays_in_every_layer_of_a_pyramid(decode):
    model = tiny.llama()
    options = {"budget": 20, "window": 3, "allocation": "pyramid", "decode": decode}
    first = decantkv.EvictingCache(model, **options)
    logits_with(model, first, {"input_ids": tiny.prompt(60)}, [])
    options |= {"every": 5, "decode_budget": 4, "protect_prompt": True}
    _, _, cache = answers(model, {"input_ids": tiny.prompt(60)}, 10, **options)
    for before, after in zip(first.layers, cache.layers, strict=True):
        kept = before.kept.indices.shape[2]
        assert torch.equal(after.kept.indices[..., :kept], before.kept.indices)
        assert after.stored == kept + 4


@pytest.mark.parametrize("decode", ["model", "own"])
@pytest.mark.parametrize("more", [{"protect": [(3, 5)]}, {"protect_prompt": True}])
@pytest.mark.parametrize("length", [2, 5])
def test_rounds_after_a_short_prompt_keep_what_is_protected(length, more, decode):
    """A prompt that is kept whole may have fewer tokens than window, sinks and protected spans together."""
    if "protect" in more and length < 5:
        more = {}
    model, options = tiny.llama(), {"budget": 0.5, "window": 4, "sinks": 2, "every": 3, "decode": decode, **more}
    _, _, cache = answers(model, {"input_ids": tiny.prompt(length)}, 12, **options)
    for layer in cache.layers:
        kept = layer.kept.mask(layer.answer.renewed)
        assert kept[..., :2].all()
        assert kept[..., -4:].all()
        assert kept[..., 3:5].all() or "protect" not in more
        assert kept[..., : min(length, 6)].all() or "protect_prompt" not in more


def test_forks_crops_beams_and_files_in_the_middle_of_an_answer(tmp_path):
    model, inputs = tiny.llama(), {"input_ids": tiny.prompt(60)}
    options = {"budget": 30, "every": 8}
    whole, _, _ = answers(model, inputs, 30, **options)
    _, _, cache = answers(model, inputs, 13, **options)
    cache.save(tmp_path / "c")
    batch = copy.deepcopy(cache)
    batch.batch_repeat_interleave(3)
    batch.reorder_cache(torch.tensor([2, 0, 1]))
    cropped = copy.deepcopy(cache)
    mask = torch.ones(1, 73, dtype=torch.long)
    for i in (50, 51):
        _, mask = step(model, cropped, mask, i)
    cropped.crop(-2)
    loaded = decantkv.EvictingCache.load(tmp_path / "c", model)
    joined = decantkv.EvictingCache.cat([copy.deepcopy(cache), copy.deepcopy(cache)])
    for other in (batch, cropped, loaded, joined):
        rows = other.layers[0].keys.shape[0]
        mask = torch.ones(rows, 73, dtype=torch.long)
        for i in range(13, 30):
            logits, mask = step(model, other, mask, 3 + 7 * i % 190)
            torch.testing.assert_close(logits, whole[i].expand(rows, -1), rtol=0, atol=1e-5)


def test_under_generate_a_long_answer():
    model, ids = tiny.llama(), tiny.prompt(60)
    with decantkv.attach(model, budget=30, every=8) as run:
        out = model.generate(ids, max_new_tokens=40, **tiny.GREEDY)
    assert out.shape == (1, 100)
    assert run.report().rounds == 3 * 4
    with decantkv.attach(model, budget=30):
        assert not torch.equal(model.generate(ids, max_new_tokens=40, **tiny.GREEDY), out)


REFUSED = [
    ({"max_kv_tokens": 40}, "prefill_chunk: expected the length of a chunk"),
    ({"prefill_chunk": 0}, "prefill_chunk"),
    ({"prefill_chunk": 8, "max_kv_tokens": 7}, "max_kv_tokens: expected at least 8"),
    ({"prefill_chunk": 8, "max_kv_tokens": 20, "method": "h2o"}, "max_kv_tokens: expected a method"),
    ({"every": 8, "method": "streaming:paper"}, "every: expected a method"),
    ({"every": 8, "allocation": "ada"}, "every: expected an allocation"),
    ({"decode_budget": 8}, "every: expected a number"),
    ({"every": 8, "decode_budget": 4}, "decode_budget: expected at least 8"),
    (
        {"every": 8, "decode_budget": 9, "protect": [(1, 3)]},
        "decode_budget: expected at least 10 tokens, which window,",
    ),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_at_the_call(options, message):
    model = tiny.llama()
    with pytest.raises(ValueError, match=message):
        decantkv.attach(model, budget=0.5, **options)
    with pytest.raises(ValueError, match=message):
        decantkv.EvictingCache(model, budget=0.5, **options)
    assert not any(isinstance(v, EvictingLayer) for v in vars(model).values())


def test_chunks_are_put_together_in_a_buffer_that_doubles(monkeypatch):
    """Not copied once more for every chunk: many chunks cost less than two copies of the prompt."""
    copied, move = [], DenseStore._moved
    monkeypatch.setattr(DenseStore, "_moved", lambda self, x, slots: copied.append(self.length) or move(self, x, slots))
    model, ids = tiny.llama(), tiny.prompt(960)
    cache = decantkv.EvictingCache(model, budget=0.2)
    in_chunks(model, cache, {"input_ids": ids}, 24)
    assert sum(copied) < 2 * 960 * 2 * len(cache.layers)  # keys and values; chunk by chunk it would be 19 prompts
    assert not any(layer.reading for layer in cache.layers)
    assert cache.nbytes() == 3 * 2 * 2 * 192 * 8 * 4  # layers, K and V, heads, kept, head_dim, bytes


@pytest.mark.skipif(not at_least("5.17"), reason="stored the heads that were made from a latent")
def test_answers_are_not_evicted_where_attention_makes_its_heads_from_what_is_cached():
    """A round scores what is stored, and would score latents as if they were keys."""
    model = build("deepseek_v3", "sdpa")
    cache = decantkv.EvictingCache(model, budget=20, every=4)
    with pytest.raises(ValueError, match="every: expected a model that attends to the heads it caches"):
        logits_with(model, cache, {"input_ids": tiny.prompt(60)}, [])
    assert cache.get_seq_length() == 0, "refused before anything was stored"
