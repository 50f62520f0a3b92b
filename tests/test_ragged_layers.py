"""Heads of unequal length inside models: judged by a full cache with the dropped tokens hidden, and by memory."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from transformers import DynamicCache

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.layer_contest import LayerContest
from decantkv.cache.stores.ragged import ROOM
from decantkv.selection.allocation import Ada
from decantkv.selection.selector import order
from tests.support import tiny
from tests.support.judge import evicted_and_judged, hiding, kept_masks, logits_with

STEPS = [torch.tensor([[7]]), torch.tensor([[11]]), torch.tensor([[3, 5, 9]]), torch.tensor([[2]])]
RAGGED = ["ada", "ada-kvpress", "heads", "layer", "global"]


def spread(cache):
    return [layer.kept.counts.tolist() for layer in cache.layers]


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("allocation", RAGGED)
def test_equal_to_a_full_cache_whose_dropped_tokens_are_hidden(family, attention, allocation):
    model = getattr(tiny, family)(attention=attention)
    evicted, judged, cache = evicted_and_judged(
        model, {"input_ids": tiny.prompt(150)}, STEPS, budget=0.2, allocation=allocation
    )
    torch.testing.assert_close(evicted, judged, rtol=0, atol=1e-5)
    counts = spread(cache)
    assert sum(sum(layer[0]) for layer in counts) == 3 * 2 * 30
    assert len({n for layer in counts for n in layer[0]}) > 1, "heads keep different numbers"
    if allocation not in ("layer", "global"):
        assert all(sum(layer[0]) == 2 * 30 for layer in counts)
    assert cache.get_seq_length() == 156


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_pyramid_layers_of_unequal_length_equal_the_judge(attention):
    model = tiny.llama(attention=attention)
    evicted, judged, cache = evicted_and_judged(
        model, {"input_ids": tiny.prompt(150)}, STEPS, budget=0.2, allocation="pyramid"
    )
    torch.testing.assert_close(evicted, judged, rtol=0, atol=1e-5)
    stored = [layer.kept.indices.shape[2] for layer in cache.layers]
    assert stored[0] > stored[1] > stored[2]
    assert sum(stored) == 90


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("allocation", [*RAGGED, "pyramid"])
def test_a_left_padded_batch_equals_its_rows_alone(attention, allocation):
    model = tiny.llama(attention=attention)
    rows = [tiny.prompt(150, seed=1), tiny.prompt(90, seed=2), tiny.prompt(61, seed=3)]
    options = {"budget": 0.3, "sinks": 1, "allocation": allocation}
    together = logits_with(
        model, decantkv.EvictingCache(model, **options), tiny.left_padded(rows), [s.expand(3, -1) for s in STEPS]
    )
    for row, logits in zip(rows, together, strict=True):
        alone = logits_with(model, decantkv.EvictingCache(model, **options), {"input_ids": row}, STEPS)
        torch.testing.assert_close(logits[None], alone, rtol=0, atol=2e-5)


def test_a_second_turn_with_pads_of_its_own():
    model = tiny.llama()
    prompts, turns = [tiny.prompt(90, 1), tiny.prompt(90, 2)], [tiny.prompt(6, 3), tiny.prompt(3, 4)]

    @torch.no_grad()
    def ask(rows, turn):
        cache = decantkv.EvictingCache(model, "adadropkv", budget=0.3)
        first, second = tiny.left_padded(rows), tiny.left_padded(turn)
        position = (first["attention_mask"].cumsum(1) - 1).clamp_min(0)
        model(**first, position_ids=position, **{cache_argument(model): cache})
        mask = torch.cat([first["attention_mask"], second["attention_mask"]], 1)
        position = (mask.cumsum(1) - 1)[:, -second["input_ids"].shape[1] :]
        return model(
            second["input_ids"], attention_mask=mask, position_ids=position, **{cache_argument(model): cache}
        ).logits[:, -1]

    together = ask(prompts, turns)
    for i in range(2):
        torch.testing.assert_close(together[i : i + 1], ask(prompts[i : i + 1], turns[i : i + 1]), rtol=0, atol=2e-5)


@torch.no_grad()
def test_reorder_repeat_select_copy_and_crop_equal_doing_it_by_hand():
    model, name = tiny.llama(), cache_argument(tiny.llama())
    inputs = tiny.left_padded([tiny.prompt(90, 1), tiny.prompt(60, 2)])
    cache = decantkv.EvictingCache(model, "adadropkv", budget=0.3)
    model(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp_min(0), **{name: cache})
    kept = kept_masks(cache, 90)
    rows = torch.tensor([1, 0, 1])
    cache.batch_repeat_interleave(2)  # rows 0 0 1 1
    cache.batch_select_indices(torch.tensor([3, 0, 2]))
    cache.reorder_cache(torch.tensor([0, 1, 2]))
    again = {k: v[rows] for k, v in inputs.items()}
    kept = {layer: mask[rows] for layer, mask in kept.items()}
    mask = torch.cat([again["attention_mask"], torch.ones(3, 2, dtype=torch.long)], 1)

    def two_more(cache):
        out = []
        for i, token in enumerate((5, 8)):
            seen = mask[:, : 91 + i]
            position = (seen.cumsum(1) - 1)[:, -1:]
            out.append(
                model(torch.full((3, 1), token), attention_mask=seen, position_ids=position, **{name: cache}).logits
            )
        return torch.cat(out, 1)

    snapshot = copy.deepcopy(cache)
    got = two_more(cache)
    with hiding(model, kept):
        full = DynamicCache(config=model.config)
        model(**again, position_ids=(again["attention_mask"].cumsum(1) - 1).clamp_min(0), **{name: full})
        want = two_more(full)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    cache.crop(-2)
    assert cache.get_seq_length() == 90
    torch.testing.assert_close(two_more(cache), got, rtol=0, atol=1e-6)
    torch.testing.assert_close(two_more(snapshot), got, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="at most the 2 tokens after the evicted prompt"):
        cache.crop(-3)


def test_beams_and_prompt_lookup_generate():
    model, ids = tiny.llama(), tiny.prompt(120)
    never = {"eos_token_id": tiny.VOCABULARY + 1}  # before 5.17 prompt lookup wants one
    with decantkv.attach(model, "adadropkv", budget=0.3):
        greedy = model.generate(ids, max_new_tokens=8, **tiny.GREEDY)
        drafted = model.generate(ids, max_new_tokens=8, prompt_lookup_num_tokens=3, **never, **tiny.GREEDY)
        beams = model.generate(ids, max_new_tokens=8, num_beams=3, **tiny.GREEDY)
    assert torch.equal(greedy, drafted[:, :128])
    assert beams.shape == greedy.shape


def live_bytes():
    """Bytes of the distinct storages of all tensors alive that are no parameter and no view of one."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]  # no parameters, nothing a compiler left behind
    return {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.numel()}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("allocation", ["ada", "ada-kvpress", "layer"])
def test_memory_is_really_freed(allocation):
    """5 % of a batch of four with unequal prompts: what the cache says it holds is what is alive."""
    model, name = tiny.llama(), cache_argument(tiny.llama())
    inputs = tiny.left_padded([tiny.prompt(n, n) for n in (900, 700, 400, 180)])
    before = set(live_bytes())
    cache = decantkv.EvictingCache(model, "adadropkv", budget=0.05, allocation=allocation)
    with torch.no_grad():
        logits = model(**inputs, logits_to_keep=1, **{name: cache}).logits
    token = logits[:, -1:].argmax(-1)
    del logits
    held = [x.untyped_storage().data_ptr() for layer in cache.layers for x in layer.tensors()]
    other = {x.untyped_storage().data_ptr() for layer in cache.layers for x in (layer.kept.indices, layer.kept.counts)}
    alive = live_bytes()
    fresh = {
        p: n for p, n in alive.items() if p not in before and p not in other and p != token.untyped_storage().data_ptr()
    }
    assert sum(fresh.values()) == cache.nbytes(), "something else of the prompt is still alive"
    assert set(fresh) == set(held)
    wanted = sum(max(n * 5 // 100, 8) for n in (900, 700, 400, 180))
    width = 2 * 8 * 4  # keys and values of 8 float32
    kv = sum(x.untyped_storage().nbytes() for layer in cache.layers for x in layer.store.buffers())
    assert kv == 3 * 2 * wanted * width
    assert cache.nbytes() - kv == 3 * 2 * 8 * 8  # starts and lengths: two int64 for each of 8 lanes, 3 layers
    seen = torch.cat([inputs["attention_mask"], torch.ones(4, 1, dtype=torch.long)], 1)
    with torch.no_grad():
        model(token, attention_mask=seen, **{name: cache})
    kv = sum(x.untyped_storage().nbytes() for layer in cache.layers for x in layer.store.buffers())
    assert kv == 3 * 2 * (wanted + 4 * ROOM) * width


@torch.no_grad()
def test_the_contest_over_layers_never_holds_more_than_the_total_and_one_layer(monkeypatch):
    model, name, seen = tiny.llama(num_hidden_layers=5), cache_argument(tiny.llama()), []
    keep = EvictingLayer._decide

    def watched(self, *args):
        keep(self, *args)
        seen.append(cache.nbytes())

    monkeypatch.setattr(EvictingLayer, "_decide", watched)
    cache = decantkv.EvictingCache(model, "dropkv", budget=0.1, allocation="layer")
    model(tiny.prompt(400), **{name: cache})
    final = cache.nbytes()
    full = 2 * 400 * 64
    assert all(held <= final + full for held in seen)
    assert sum(sum(layer[0]) for layer in spread(cache)) == 5 * 2 * 40
    report = cache.report()
    assert [layer["kept"] for layer in report.layers] == spread(cache)


def test_streaming_renumbers_ragged_keys_too():
    model, name = tiny.llama(num_hidden_layers=1), cache_argument(tiny.llama())
    ids, token = tiny.prompt(80), tiny.prompt(1, 3)
    logits = []
    for allocation in ("uniform", Ada(1.0)):  # α = 1: uniform numbers in ragged storage
        cache = decantkv.EvictingCache(model, "streaming:paper", budget=21, allocation=allocation)
        with torch.no_grad():
            model(ids, **{name: cache})
            logits.append(model(token, **{name: cache}).logits)
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)


def test_heads_that_must_share_a_set_refuse_ragged_budgets():
    with pytest.raises(ValueError, match="whose heads share one set"):
        decantkv.attach(tiny.llama(), "tova", budget=0.1, allocation="ada")


def test_layers_whose_tokens_differ_in_size_cannot_trade_them():
    model, contest = tiny.llama(), LayerContest()
    layers = decantkv.EvictingCache(model, budget=4, window=1, allocation="layer").layers
    chosen = order(torch.rand(1, 2, 9), n_keep=4, window=1, allocation="layer")
    contest.enter(layers[0], chosen, 16)
    with pytest.raises(ValueError, match=r"layers of equal head_dim under 'layer'.* got 32 after 16; use 'ada'"):
        contest.enter(layers[1], chosen, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("allocation", ["ada", "layer"])
def test_on_a_gpu_the_allocators_figure_is_the_caches_own(allocation):
    """Within one block of the allocator, 512 bytes, for each tensor held; and the kernel says what the CPU says."""
    inputs = tiny.left_padded([tiny.prompt(n, n) for n in (900, 700, 400, 180)])
    answers = []
    for device in ("cpu", "cuda"):
        model = tiny.llama().to(device)
        name, batch = cache_argument(model), {k: v.to(device) for k, v in inputs.items()}
        position = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
        with torch.no_grad():
            model(**batch, position_ids=position, logits_to_keep=1)  # allocates what libraries keep for themselves
            gc.collect()
            before = torch.cuda.memory_allocated()
            cache = decantkv.EvictingCache(model, "adadropkv", budget=0.05, allocation=allocation)
            model(**batch, position_ids=position, logits_to_keep=1, **{name: cache})
            gc.collect()
            if device == "cuda":
                for layer in cache.layers:
                    layer.hold(layer.store, layer.answer, None)  # indices, for reports; not keys and values
                held, blocks = cache.nbytes(), sum(len(layer.tensors()) + 1 for layer in cache.layers)  # + its record
                assert 0 <= torch.cuda.memory_allocated() - before - held <= 512 * blocks
            seen = torch.cat([batch["attention_mask"], torch.ones(4, 1, dtype=torch.long, device=device)], 1)
            step = {"attention_mask": seen, "position_ids": (seen.cumsum(1) - 1)[:, -1:]}
            answers.append(model(torch.full((4, 1), 7, device=device), **step, **{name: cache}).logits.cpu())
    torch.testing.assert_close(*answers, rtol=1e-3, atol=1e-3)
