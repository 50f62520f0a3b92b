"""A forward that fails leaves the cache as it was: refusals, and errors of torch in any layer."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from transformers import DynamicCache

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from tests.support import tiny
from tests.support.families import build
from tests.support.interrupts import counting
from tests.support.judge import logits_with
from tests.test_turns import PROMPTS, TURNS, Chat, step

WAYS = [{"decode": "model"}, {"decode": "own"}, {"allocation": "ada"}, {"allocation": "layer"}, {"store": "static"}]


class Failing(torch.nn.Module):
    """A layer's MLP that runs out of memory while `on`."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.on = inner, False

    def forward(self, *args):
        if self.on:
            raise torch.OutOfMemoryError("out of memory")
        return self.inner(*args)


def lengths(cache):
    return {layer.get_seq_length() for layer in cache.layers}


@pytest.mark.parametrize("attached", [False, True])
def test_a_prompt_that_a_later_layer_refuses_leaves_an_empty_cache(attached):
    model, name = tiny.llama(num_hidden_layers=4), cache_argument(tiny.llama())
    how = {"method": "knorm", "budget": 2, "allocation": "pyramid"}
    cache = DynamicCache(config=model.config) if attached else decantkv.EvictingCache(model, **how)
    run = decantkv.attach(model, **how) if attached else None
    with torch.no_grad(), pytest.raises(ValueError, match="enough for every layer"):
        model(tiny.prompt(30), **{name: cache})
    assert lengths(cache) == {0}
    if run is not None:
        run.detach()
        return
    fresh = logits_with(model, decantkv.EvictingCache(model, budget=20), {"input_ids": tiny.prompt(3)}, [])
    assert torch.equal(logits_with(model, cache, {"input_ids": tiny.prompt(3)}, []), fresh)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_memory_that_runs_out_leaves_the_cache_as_it_was(way, layer):
    model = tiny.llama()
    failing = model.model.layers[layer].mlp = Failing(model.model.layers[layer].mlp)
    chat = Chat(model, decantkv.EvictingCache(model, budget=0.3, **way))
    calm = Chat(model, decantkv.EvictingCache(model, budget=0.3, **way))
    for rows in (PROMPTS, TURNS, step(2, 5)):
        before, mask = lengths(chat.cache), chat.mask
        failing.on = True
        with pytest.raises(torch.OutOfMemoryError):
            chat.say(rows)
        failing.on, chat.mask = False, mask
        assert lengths(chat.cache) == before
        assert torch.equal(chat.say(rows), calm.say(rows))


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_a_hybrid_goes_back_to_windows_that_have_moved_on(grad):
    model = build("gemma3", "sdpa")
    failing = model.model.layers[2].mlp = Failing(model.model.layers[2].mlp)
    name = cache_argument(model)
    cache, calm = (decantkv.EvictingCache(model, budget=0.3, window=4) for _ in range(2))
    with grad():
        for filled in (cache, calm):
            model(tiny.prompt(60), **{name: filled})  # past the sliding window
        for number in (1, 3):
            failing.on = True
            with pytest.raises(torch.OutOfMemoryError):
                model(tiny.prompt(number), **{name: cache})
            failing.on = False
            assert lengths(cache) == lengths(calm)
            again, once = (model(tiny.prompt(number), **{name: x}).logits for x in (cache, calm))
            assert torch.equal(again, once)


def test_a_cache_that_has_evicted_since_is_refused_until_it_is_reset():
    model = tiny.llama()
    failing = model.model.layers[1].mlp = Failing(model.model.layers[1].mlp)
    cache = decantkv.EvictingCache(model, budget=20, window=4, every=1)
    logits_with(model, cache, {"input_ids": tiny.prompt(60)}, [])
    name = {cache_argument(model): cache}
    failing.on = True
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        model(tiny.prompt(1), **name)
    failing.on = False
    for act in (lambda: model(tiny.prompt(1), **name), lambda: cache.crop(-1), lambda: cache.reorder_cache([0])):
        with (
            torch.no_grad(),
            pytest.raises(ValueError, match=r"cache: expected layers that hold the same .* reset\(\)"),
        ):
            act()
    cache.reset()
    fresh = decantkv.EvictingCache(model, budget=20, window=4, every=1)
    again, once = (logits_with(model, x, {"input_ids": PROMPTS[0]}, []) for x in (cache, fresh))
    assert torch.equal(again, once)


@pytest.mark.parametrize("decode", ["own", "model"])
@pytest.mark.parametrize("more", [{}, {"protect": [(5, 12)]}, {"protect_prompt": True, "decode_budget": 8}])
def test_padded_turns_where_answers_are_evicted_are_refused_before_anything_changes(decode, more):
    model = tiny.llama()
    chat = Chat(model, decantkv.EvictingCache(model, budget=20, every=3, decode=decode, **more))
    chat.say(PROMPTS)
    calm, mask = chat.fork(), chat.mask
    for turn in (TURNS, [tiny.prompt(1), torch.zeros(1, 1, dtype=torch.long)]):
        with pytest.raises(ValueError, match="attention_mask: expected turns of equal length in all rows with every="):
            chat.say(turn)
        chat.mask = mask
        assert lengths(chat.cache) == {40}
    for seed in range(5):
        assert torch.equal(chat.say(step(2, seed)), calm.say(step(2, seed)))


def test_a_forward_that_was_interrupted_is_taken_back_before_the_next():
    model = tiny.llama()
    chat = Chat(model, decantkv.EvictingCache(model, budget=0.3))
    chat.say(PROMPTS)
    calm, mask, inner = chat.fork(), chat.mask, model.model.layers[1].mlp.forward

    def interrupt(*args):
        raise KeyboardInterrupt

    model.model.layers[1].mlp.forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        chat.say(TURNS)
    model.model.layers[1].mlp.forward, chat.mask = inner, mask
    with pytest.raises(ValueError, match="cache: expected one whose last forward ended"):
        chat.say(TURNS)
    chat.mask = mask
    assert torch.equal(chat.say(TURNS), calm.say(TURNS))


def test_the_hooks_go_with_the_last_cache():
    model = tiny.llama()
    caches = [decantkv.EvictingCache(model, budget=0.5)]
    caches.append(copy.deepcopy(caches[0]))
    assert model.model._forward_pre_hooks
    del caches
    gc.collect()
    assert not model.model._forward_pre_hooks
    assert not model.model._forward_hooks


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt inside a finalizer
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("settings", [{"decode": "own"}, {"decode": "model"}], ids=str)
def test_an_interrupt_anywhere_in_a_turn_leaves_the_cache_as_it_was(family, settings):
    """The head included: the next call is answered as if there had been none, or is refused."""
    model, ids, more = build(family, "sdpa"), tiny.prompt(40), tiny.prompt(3)
    name, stopped_in_the_midst = cache_argument(model), 0
    with torch.no_grad():
        cache = decantkv.EvictingCache(model, budget=0.5, window=4, **settings)
        model(ids, **{name: cache})
        calm = model(more, **{name: copy.deepcopy(cache)}).logits
        for stop in range(5, 9000, 613):
            kept = copy.deepcopy(cache)
            try:
                with counting(stop):
                    model(more, **{name: kept})
                break
            except KeyboardInterrupt:
                pass
            if lengths(kept) != lengths(cache):
                stopped_in_the_midst += 1
                with pytest.raises(ValueError, match=r"call again|call reset\(\)") as refused:
                    model(more, **{name: kept})
                if "reset" in str(refused.value):  # in the midst of writing
                    continue
            again = model(more, **{name: kept}).logits
            assert torch.equal(again, calm)
    assert stopped_in_the_midst
