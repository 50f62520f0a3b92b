"""A signal at any moment leaves the model, transformers' registry and every hook as they were."""

from __future__ import annotations

import gc
import sys

import pytest
import torch

from decantkv import interface
from decantkv.cache import EvictingCache, cache_argument
from tests import tiny
from tests.families import build
from tests.interrupts import interrupted

PADDED = tiny.left_padded([tiny.prompt(40, seed=1), tiny.prompt(25, seed=2)])
CACHES = {
    "own": ("llama", {"decode": "own"}, {"input_ids": tiny.prompt(40)}),
    "heads": ("llama", {"allocation": "ada"}, {"input_ids": tiny.prompt(40)}),
    "padded": ("llama", {"decode": "model"}, PADDED),
    "latent": ("deepseek_v3", {}, {"input_ids": tiny.prompt(40)}),
    "latent, padded": ("deepseek_v3", {}, PADDED),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside a finalizer
@pytest.mark.parametrize("name", CACHES)
def test_no_later_forward_is_answered_by_a_cache_whose_forward_was_interrupted(name):
    """Without attach nothing of ours runs between the interrupt and the next forward; the cache and the frames live."""
    family, settings, inputs = CACHES[name]
    model = build(family, "sdpa")
    argument, batch = cache_argument(model), inputs["input_ids"].shape[0]
    more = torch.full((batch, 1), 5)
    mask = {"attention_mask": torch.cat([PADDED["attention_mask"], torch.ones_like(more)], 1)} if batch > 1 else {}
    with torch.no_grad():
        plain = [model(**x, use_cache=False).logits for x in (inputs, {"input_ids": more})]
        waited = 0

        def turn():
            turn.cache = cache = EvictingCache(model, budget=0.5, window=4, **settings)
            model(**inputs, **{argument: cache})
            model(more, **mask, **{argument: cache})

        for error in interrupted(turn, 70, ("/transformers/models/",)):
            sys.last_traceback = None if error is None else error.__traceback__  # as a notebook keeps it
            waited += interface.pending() is not None
            again = [model(**x, use_cache=False).logits for x in (inputs, {"input_ids": more})]
            assert all(torch.equal(x, y) for x, y in zip(again, plain, strict=True))
        sys.last_traceback = None
    assert waited, "no interrupt came between update and attention"


def test_what_update_raises_leaves_no_layer_waiting():
    model, ids, one = tiny.llama(), tiny.prompt(30), torch.tensor([[5]])
    argument = cache_argument(model)
    with torch.no_grad():
        cache = EvictingCache(model, budget=0.5, window=4, store="static")
        model(ids, **{argument: cache})
        for _ in range(cache.layers[0].store.capacity - 15):
            model(one, **{argument: cache})
        with pytest.raises(ValueError, match="store: expected at most"):
            model(one, **{argument: cache})
        assert interface.pending() is None
        lengths = {layer.get_seq_length() for layer in cache.layers}
        assert lengths == {cache.layers[0].stored + 15}, "the token that did not fit is counted nowhere"


def test_a_step_that_was_interrupted_before_its_attention_is_taken_back_whole():
    """crop goes back to a length: a token that was handed over and never stored is not taken from the prompt."""
    model, ids, one = tiny.llama(), tiny.prompt(30), torch.tensor([[5]])
    argument = cache_argument(model)
    with torch.no_grad():
        cache = EvictingCache(model, budget=0.5, window=4, decode="own")
        model(ids, **{argument: cache})
        once = model(one, **{argument: cache}).logits
        cache.crop(30)
        cache.layers[0].update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8))
        with pytest.raises(interface.UnsupportedModelError, match="make a new cache or reset"):
            model(one, **{argument: cache})
        cache.crop(30)
        assert torch.equal(model(one, **{argument: cache}).logits, once)


def test_a_waiting_layer_keeps_nothing_alive():
    model = tiny.llama()
    cache = EvictingCache(model, budget=0.5, window=4)
    cache.layers[0].update(torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 8))
    assert interface.pending() is cache.layers[0]
    del cache
    gc.collect()
    assert interface.pending() is None
    assert not interface._patches


@pytest.mark.parametrize("settings", [{"decode": "own"}, {"decode": "model"}, {"allocation": "ada"}], ids=str)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_crop_takes_an_interrupted_step_back_from_layers_of_unequal_lengths(settings):
    model, ids, one = tiny.llama(), tiny.prompt(30), torch.tensor([[5]])
    argument, unequal = cache_argument(model), 0
    with torch.no_grad():
        cache = EvictingCache(model, budget=0.5, window=4, **settings)
        model(ids, **{argument: cache})
        once = model(one, **{argument: cache}).logits
        cache.crop(30)

        def step():
            model(one, **{argument: cache})
            cache.crop(30)

        for error in interrupted(step, 12, ("/transformers/models/",)):
            if error is not None:
                unequal += len({layer.get_seq_length() for layer in cache.layers}) > 1
                cache.crop(30)
            torch.testing.assert_close(model(one, **{argument: cache}).logits, once, rtol=0, atol=1e-6)
            cache.crop(30)
    assert unequal
