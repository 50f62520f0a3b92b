"""Layers that attend for themselves: lengths instead of masks, on any device; judged like the others."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import transformers

import decantkv
from decantkv.cache import own_attention
from decantkv.cache.evicting_cache import cache_argument
from decantkv.hf.chunked_attention import attend_chunk
from decantkv.hf.masks import hide_filler
from tests.support import tiny
from tests.support.families import at_least, build
from tests.support.judge import evicted_and_judged, logits_with
from tests.test_bounded import CAP, answers, in_chunks, step

STEPS = [torch.tensor([[7]]), torch.tensor([[11]]), torch.tensor([[3, 5, 9]]), torch.tensor([[2]])]
OWN = {"decode": "own"}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("settings", [{}, {"allocation": "shared"}, {"allocation": "pyramid"}, {"method": "streaming"}])
def test_own_attention_equals_the_judge(attention, settings):
    model = tiny.llama(attention=attention)
    evicted, judged, cache = evicted_and_judged(
        model, {"input_ids": tiny.prompt(150)}, STEPS, budget=0.1, **OWN, **settings
    )
    torch.testing.assert_close(evicted, judged, rtol=0, atol=1e-5)
    assert all(layer.store.attends for layer in cache.layers)


@pytest.mark.parametrize("budget", [0.1, 20, 1.0])
def test_padded_rows_equal_the_models_own_attention(budget):
    model = tiny.llama()
    inputs = tiny.left_padded([tiny.prompt(150, seed=1), tiny.prompt(60, seed=2), tiny.prompt(6, seed=3)])
    steps = [s.expand(3, -1) for s in STEPS]
    ours = logits_with(model, decantkv.EvictingCache(model, budget=budget, **OWN), inputs, steps)
    theirs = logits_with(model, decantkv.EvictingCache(model, budget=budget, decode="model"), inputs, steps)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}, {"prefill_chunk_size": 33}])
def test_every_way_of_generating(options):
    model = tiny.llama()
    batch = tiny.left_padded([torch.cat([tiny.prompt(40)] * 3, 1)[:, :100]])
    options = {"max_new_tokens": 9, **options, **tiny.GREEDY}
    with decantkv.attach(model, budget=0.3, decode="model"):
        theirs = model.generate(**batch, **options)
    with decantkv.attach(model, budget=0.3, **OWN):
        assert torch.equal(model.generate(**batch, **options), theirs)


@pytest.mark.parametrize("number", [1, 5, 60])
def test_chunks_that_the_layer_attends_to_itself(number):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 8, number, 16), torch.randn(3, 2, 70, 16), torch.randn(3, 2, 70, 16)
    for held in ((70, 70, 70), (70, 41, 8)):
        out, _ = attend_chunk(q, k, v, held=held, scale=0.3)
        for row, real in enumerate(held):
            for head in range(8):
                for i in range(max(0, number - real), number):
                    at = slice(70 - real, 70 - number + i + 1)
                    p = (k[row, head // 4, at] @ q[row, head, i] * 0.3).softmax(0)
                    expected = p @ v[row, head // 4, at]
                    torch.testing.assert_close(out[row, head, i], expected, rtol=0, atol=2e-6)
        assert out.isfinite().all()


@pytest.mark.parametrize("bounds", [{}, CAP, {**CAP, "max_kv_tokens": 100}])
@pytest.mark.parametrize("allocation", ["uniform", "ada"])
def test_chunked_prompts(monkeypatch, bounds, allocation):
    model, attended, attend = tiny.llama(), [], own_attention.attend_chunk
    monkeypatch.setattr(own_attention, "attend_chunk", lambda *a, **k: attended.append(decode) or attend(*a, **k))
    inputs = tiny.left_padded([tiny.prompt(110, seed=1), tiny.prompt(62, seed=2), tiny.prompt(14, seed=3)])
    said = {}
    for decode in ("own", "model"):
        cache = decantkv.EvictingCache(model, budget=0.3, allocation=allocation, sinks=1, decode=decode, **bounds)
        _, first = in_chunks(model, cache, inputs, 24)
        assert (decode in attended) == (decode == "own")
        second, _ = step(model, cache, inputs["attention_mask"])
        said[decode] = torch.stack([first, second])
        kept = [layer.kept.indices for layer in cache.layers]
        said[decode + " kept"] = kept
    torch.testing.assert_close(said["own"], said["model"], rtol=0, atol=2e-5)
    assert all(torch.equal(a, b) for a, b in zip(said["own kept"], said["model kept"], strict=True))


def test_answers_that_are_evicted_again():
    model = tiny.llama()
    inputs = tiny.left_padded([tiny.prompt(60, seed=1), tiny.prompt(33, seed=2), tiny.prompt(12, seed=3)])
    ours, stored, cache = answers(model, inputs, 25, budget=20, every=6, **OWN)
    theirs, _, _ = answers(model, inputs, 25, budget=20, every=6, decode="model")
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    assert max(stored) <= 26
    places = [x.data_ptr() for layer in cache.layers for x in layer.tensors()]
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 25, dtype=torch.long)], 1)
    for _ in range(14):
        _, mask = step(model, cache, mask)
    assert [x.data_ptr() for layer in cache.layers for x in layer.tensors()] == places, "rounds write in place"


def test_generate_says_how_many_tokens_will_come():
    model = tiny.llama()
    with decantkv.attach(model, budget=0.3, **OWN):
        out = model.generate(tiny.prompt(100), max_new_tokens=300, return_dict_in_generate=True, **tiny.GREEDY)
    cache = out[cache_argument(model)]
    assert cache.layers[0].store.keys.shape[0] == 2 * (30 + 300)


def test_models_whose_heads_share_a_latent_leave_it_to_the_model():
    model = build("deepseek_v3", "sdpa")
    evicted, judged, cache = evicted_and_judged(model, {"input_ids": tiny.prompt(80)}, STEPS[:2], budget=0.3, **OWN)
    torch.testing.assert_close(evicted, judged, rtol=0, atol=2e-5)
    assert all(getattr(layer, "lanes", None) is None for layer in cache.layers)


def encoder():
    """BERT as transformers builds it by default: tokens see what comes after them too."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**{**tiny.BASE, "is_decoder": False})
    return tiny.sharpen(transformers.BertLMHeadModel(config), "sdpa")


@pytest.mark.skipif(not at_least("5.12"), reason="its attention passes the cache by")
def test_attention_that_is_not_causal_stays_with_the_model():
    model, ids = encoder(), {"input_ids": tiny.prompt(60)}
    steps = [torch.tensor([[7]]), torch.tensor([[3, 5, 9]]), torch.tensor([[2]])]
    untouched = logits_with(model, transformers.DynamicCache(config=model.config), ids, steps)
    whole = logits_with(model, decantkv.EvictingCache(model, budget=1.0, decode="own"), ids, steps)
    torch.testing.assert_close(whole, untouched)
    evicted, judged, _ = evicted_and_judged(model, ids, steps, budget=0.2, decode="own")
    torch.testing.assert_close(evicted, judged, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="attention_mask: expected causal attention among new tokens"):
        logits_with(model, decantkv.EvictingCache(model, budget=0.2, allocation="heads"), ids, steps)


def seen_by(lengths, start, new):
    """[B, 1, new, start + new] bool: causal attention of the newest tokens in rows padded on the left to one length."""
    total = start + new
    key, row = torch.arange(total), torch.arange(start, total)[:, None]
    first = torch.tensor([120 - length for length in lengths])[:, None, None]
    return ((key <= row) & (key >= first))[:, None]


def in_parts(model, cache, ids, masks):
    """Logits of the last token of each part of a prompt, then of turns, every one with its own 4-D mask."""
    said, start, name = [], 0, cache_argument(model)
    ours = isinstance(cache, decantkv.EvictingCache)
    with torch.no_grad(), decantkv.cache.evicting_cache.deferred(cache) if ours else nullcontext():
        for mask in masks:
            new = mask.shape[2]
            if start == 120 and ours:
                decantkv.cache.evicting_cache.decide(cache)
            place = torch.arange(start, start + new)[None].expand(len(ids), -1)
            out = model(ids[:, start : start + new], attention_mask=mask, position_ids=place, **{name: cache})
            said.append(out.logits[:, -1])
            start += new
    return torch.stack(said)


@pytest.mark.parametrize("lengths", [(120,), (120, 100)])
def test_a_callers_4d_mask_over_all_keys_is_read_whole(lengths):
    model, ids = tiny.llama(), tiny.prompt(126, batch=len(lengths))
    masks = [seen_by(lengths, *part) for part in ((0, 40), (40, 40), (80, 40), (120, 3), (123, 1))]
    expected = in_parts(model, transformers.DynamicCache(config=model.config), ids, masks)
    got = in_parts(model, decantkv.EvictingCache(model, budget=1.0, **OWN), ids, masks)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    for part, hide, says in (
        (1, (..., 0, 30), "hides some"),
        (1, (..., 10, 60), "causal attention inside"),
        (3, (..., 1, 40), "hides some"),
        (3, (..., 0, 122), "causal attention among"),
    ):
        other = [mask.clone() for mask in masks]
        other[part][hide] ^= True
        with pytest.raises(ValueError, match=f"attention_mask: .*{says}"):
            in_parts(model, decantkv.EvictingCache(model, budget=1.0, **OWN), ids, other)
    with pytest.raises(ValueError, match="attention_mask: expected a 2-D mask of all tokens, got a 4-D one over 123"):
        in_parts(model, decantkv.EvictingCache(model, budget=0.3, **OWN), ids, masks)


def test_a_chunk_in_which_a_row_is_pads_alone_must_be_causal_too():
    model, ids, lengths = tiny.llama(), tiny.prompt(120, batch=2), (120, 20)
    masks = [seen_by(lengths, 0, 40), seen_by(lengths, 40, 40)[..., 40:], seen_by(lengths, 80, 40)[..., 80:]]
    in_parts(model, decantkv.EvictingCache(model, budget=0.3, **OWN), ids, masks)
    masks[1][0, 0, 5, 20] = True  # a token sees a later one beside a row that has no token yet
    with pytest.raises(ValueError, match="attention_mask: expected causal attention inside a prompt's later chunks"):
        in_parts(model, decantkv.EvictingCache(model, budget=0.3, **OWN), ids, masks)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_filler_is_hidden_from_attention_that_looks_ahead_too(backend):
    valid = torch.tensor([[[True, True]], [[False, True]]])
    query = torch.zeros(2, 1, 3, 4)
    ahead, causal = (
        hide_filler(None, valid, query=query, kv_len=5, backend=backend, causal=causal) for causal in (False, True)
    )
    shown = [mask if mask.dtype == torch.bool else mask == 0 for mask in (ahead, causal)]
    everything = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]], dtype=torch.bool)[:, None, None].expand(2, 1, 3, 5)
    assert torch.equal(shown[0], everything)
    assert torch.equal(shown[1], everything & torch.ones(3, 5, dtype=torch.bool).tril(2))
