"""Evict, then quantise or lay out statically: kept tokens inside transformers' own layers."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import cache_utils

import decantkv
from decantkv.cache import layer
from decantkv.cache.evicting_cache import cache_argument
from tests.support import tiny
from tests.support.judge import evicted_and_judged, logits_with

STEPS = [torch.tensor([[7]]), torch.tensor([[11]]), torch.tensor([[3, 5, 9]]), torch.tensor([[2]])]
fp8 = pytest.mark.skipif(not hasattr(cache_utils, "Fp8QuantizedLayer"), reason="this transformers has no fp8 layer")
KINDS = [pytest.param("fp8", marks=fp8), "static"]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_static_layer_equals_the_judge(attention):
    model = tiny.llama(attention=attention)
    evicted, judged, cache = evicted_and_judged(
        model, {"input_ids": tiny.prompt(150)}, STEPS, budget=0.1, store="static"
    )
    torch.testing.assert_close(evicted, judged, rtol=0, atol=1e-5)
    assert isinstance(cache.layers[0].store._layer, cache_utils.StaticLayer)


@fp8
def test_fp8_is_eviction_and_then_quantisation():
    """The same tokens as without; keys and values are what transformers' layer makes of the kept ones."""
    model, inputs = tiny.llama(), tiny.left_padded([tiny.prompt(150, seed=1), tiny.prompt(60, seed=2)])
    plain, quantised = (decantkv.EvictingCache(model, budget=0.2, store=kind) for kind in ("plain", "fp8"))
    for cache in (plain, quantised):
        logits_with(model, cache, inputs, [])
    assert quantised.nbytes() * 4 == plain.nbytes(), "a byte for four"
    for a, b in zip(plain.layers, quantised.layers, strict=True):
        expected = cache_utils.Fp8QuantizedLayer()
        expected.update(a.keys, a.values)
        assert torch.equal(b.keys, expected._dequantize(expected._quantized_keys))
        error = (b.values - a.values).abs()
        assert 0 < float(error.max()) <= 2**-4 * float(a.values.abs().max())
    out, close = (logits_with(model, decantkv.EvictingCache(model, budget=0.2, store=k), inputs, [
        s.expand(2, -1) for s in STEPS]) for k in ("fp8", "plain"))  # fmt: skip
    assert out.isfinite().all()
    assert torch.nn.functional.cosine_similarity(out, close, dim=-1).min() > 0.95


@fp8
def test_larger_elements_than_the_prompts_are_clipped_not_nan():
    from decantkv.cache.stores.fp8 import Fp8Store

    store = Fp8Store(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4))
    keys, values = store.update(torch.full((1, 1, 1, 4), 50.0), torch.full((1, 1, 1, 4), -50.0))
    assert torch.equal(keys, torch.ones(1, 1, 4, 4))
    assert torch.equal(values[:, :, 3], -torch.ones(1, 1, 4))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_crops_copies_and_generation(kind):
    model = tiny.llama()
    inputs = tiny.left_padded([tiny.prompt(80, seed=1), tiny.prompt(30, seed=2)])
    cache, name = decantkv.EvictingCache(model, budget=0.3, store=kind), cache_argument(model)
    logits_with(model, cache, inputs, [])

    def step(c, rows):
        mask = torch.cat([inputs["attention_mask"][rows], torch.ones(len(rows), c.get_seq_length() - 79).long()], 1)
        with torch.no_grad():
            ids = torch.full((len(rows), 1), 5)
            return model(ids, attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1, **{name: c}).logits

    base = step(copy.deepcopy(cache), [0, 1])
    other = copy.deepcopy(cache)
    other.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(step(other, [1, 0]), base.flip(0), rtol=0, atol=1e-5)
    other = copy.deepcopy(cache)
    other.batch_repeat_interleave(2)
    torch.testing.assert_close(step(other, [0, 0, 1, 1]), base.repeat_interleave(2, 0), rtol=0, atol=1e-5)
    torch.testing.assert_close(step(cache, [0, 1]), base, rtol=0, atol=1e-6)
    cache.crop(-1)
    torch.testing.assert_close(step(cache, [0, 1]), base, rtol=0, atol=1e-6)
    with decantkv.attach(model, budget=0.3, store=kind):
        out = model.generate(**inputs, max_new_tokens=200, **tiny.GREEDY)
    assert out.shape == (2, 280)


def test_a_full_static_layer_says_so():
    model, name = tiny.llama(), cache_argument(tiny.llama())
    cache = decantkv.EvictingCache(model, budget=0.2, store="static")
    logits_with(model, cache, {"input_ids": tiny.prompt(60)}, [])
    with torch.no_grad(), pytest.raises(ValueError, match="at most 140 kept and new tokens"):
        model(tiny.prompt(129), **{name: cache})


def test_a_static_layer_has_room_for_all_that_was_announced(monkeypatch):
    monkeypatch.setattr(layer, "RESERVE", 150)
    model = tiny.llama()
    answers = []
    for store in ("static", "plain"):
        with decantkv.attach(model, budget=0.2, store=store):
            answers.append(model.generate(tiny.prompt(60), max_new_tokens=300, min_new_tokens=300))
    assert answers[0].shape == (1, 360)
    assert torch.equal(*answers)


@pytest.mark.parametrize("options", [{"decode": "own"}, {"allocation": "ada"}])
def test_what_does_not_go_together_is_refused(options):
    with pytest.raises(ValueError, match="store: expected 'plain' beside"):
        decantkv.EvictingCache(tiny.llama(), budget=0.5, store="static", **options)
