"""A signal at any moment leaves the model, transformers' registry and every hook as they were."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch
import transformers
from transformers import cache_utils, modeling_utils
from transformers.models.llama import modeling_llama

import decantkv
from decantkv import attachment
from decantkv.cache.evicting_cache import EvictingCache, cache_argument
from decantkv.hf import attention_hook
from tests.support import tiny
from tests.support.families import build
from tests.support.interrupts import interrupted

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

        for _ in interrupted(turn, 70, ("/transformers/models/",), keep=True):
            waited += attention_hook.pending() is not None
            again = [model(**x, use_cache=False).logits for x in (inputs, {"input_ids": more})]
            assert all(torch.equal(x, y) for x, y in zip(again, plain, strict=True))
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
        assert attention_hook.pending() is None
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
        with pytest.raises(attention_hook.UnsupportedModelError, match="make a new cache or reset"):
            model(one, **{argument: cache})
        cache.crop(30)
        assert torch.equal(model(one, **{argument: cache}).logits, once)


def test_a_waiting_layer_keeps_nothing_alive():
    model = tiny.llama()
    cache = EvictingCache(model, budget=0.5, window=4)
    cache.layers[0].update(torch.zeros(1, 2, 9, 8), torch.zeros(1, 2, 9, 8))
    assert attention_hook.pending() is cache.layers[0]
    del cache
    gc.collect()
    assert attention_hook.pending() is None
    assert not attention_hook._patches


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

        for stopped in interrupted(step, 12, ("/transformers/models/",)):
            if stopped:
                unequal += len({layer.get_seq_length() for layer in cache.layers}) > 1
                cache.crop(30)
            torch.testing.assert_close(model(one, **{argument: cache}).logits, once, rtol=0, atol=1e-6)
            cache.crop(30)
    assert unequal


def footprint(model):
    """Everything attach may touch, by identity."""
    gc.collect()  # caches of earlier tests hold the wrapped functions
    modules = [dict(vars(part)[name]) for part in model.modules() for name in sorted(vars(part)) if "hooks" in name]
    functions = dict(modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping)
    return modules, functions, modeling_llama.eager_attention_forward, set(vars(model))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("settings", "number"), [(None, 25), ({}, 8), ({"decode": "own", "every": 3}, 8)], ids=str)
def test_an_interrupt_anywhere_leaves_the_model_as_it_was(settings, number):
    """In attach and detach, and with settings in the forwards and generate between them."""
    gc.collect()
    model, ids = tiny.llama(), tiny.prompt(40)
    options = {"max_new_tokens": 6, **tiny.GREEDY}
    before, plain = footprint(model), model.generate(ids, **options)

    def once():
        with decantkv.attach(model, budget=0.3, window=4, **(settings or {})):
            if settings is not None:
                model.generate(ids, **options)

    places = ("/decantkv/",) if settings is None else ("/decantkv/", "/transformers/models/", "/cache_utils.py")
    interrupts = 0
    for stopped in interrupted(once, number, places):
        interrupts += stopped
        gc.collect()
        assert footprint(model) == before
        assert model not in attachment._attached
        assert not attention_hook._patches
        assert attention_hook.pending() is None
    assert interrupts > 5
    assert torch.equal(model.generate(ids, **options), plain)
    once()
    assert footprint(model) == before


@pytest.mark.parametrize("settings", [{}, {"rehearsal": "replay"}])
def test_no_prompt_waits_for_chunks_of_a_reading_that_was_interrupted(settings):
    model, prompt = tiny.llama(), tiny.prompt(40)
    cache = EvictingCache(model, budget=0.3, window=4, **settings)
    with torch.no_grad():
        model(prompt, **{cache_argument(model): cache})
        before = [layer.stored for layer in cache.layers]
        expected = model(tiny.prompt(1, seed=9), **{cache_argument(model): cache}).logits

    @torch.no_grad()
    def read():
        cache.reset()
        with decantkv.deferred(cache):
            for low in (0, 20):
                model(
                    prompt[:, low : low + 20],
                    position_ids=torch.arange(low, low + 20)[None],
                    **{cache_argument(model): cache},
                )

    places, count = ("/cache/chunked_reading.py", "/cache/forwards.py", "/cache/layer.py"), 0
    for stopped in interrupted(read, 500, places):
        count += stopped
        cache.reset()
        with torch.no_grad():
            model(prompt, **{cache_argument(model): cache})
            assert [layer.stored for layer in cache.layers] == before
            logits = model(tiny.prompt(1, seed=9), **{cache_argument(model): cache}).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)
    assert count > 100


def test_an_interrupted_prompt_is_collected_with_its_last_reference():
    """Also where layers compete for one budget: no circle of references is left for the collector."""
    model, ids, interrupts = tiny.llama(), tiny.prompt(40), 0
    gc.collect()
    gc.disable()
    try:
        for stopped in interrupted(
            lambda: _read_once(model, ids), 12, ("/layer_contest.py", "/eviction.py", "/decantkv/selection/")
        ):
            interrupts += stopped
            assert not model.model._forward_pre_hooks
    finally:
        gc.enable()
    assert interrupts > 8


def _read_once(model, ids):
    with torch.no_grad():
        model(ids, **{cache_argument(model): EvictingCache(model, budget=0.3, window=4, allocation="layer")})


def wrapped(model, calls):
    inner = model.forward

    def theirs(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs)

    model.forward = theirs


def test_what_others_put_around_the_forward_stays_theirs():
    model, ids, calls = tiny.llama(), tiny.prompt(40), []
    options = {"max_new_tokens": 3, **tiny.GREEDY}
    plain, class_forward = model.generate(ids, **options), model.forward
    run = decantkv.attach(model, budget=0.3, window=4)
    ours = model.forward
    wrapped(model, calls)
    evicted = model.generate(ids, **options)
    run.detach()
    before = len(calls)
    assert torch.equal(model.generate(ids, **options), plain)
    assert len(calls) > before, "another library's wrapper is kept"
    model.forward = ours  # as accelerate's removal does: what it found
    assert torch.equal(model.generate(ids, **options), plain)
    with decantkv.attach(model, budget=0.3, window=4) as run:
        assert torch.equal(model.generate(ids, **options), evicted)
        assert run.report().evictions == 3
    assert model.forward == class_forward
    assert "forward" not in vars(model)


def test_what_others_removed_is_not_missed():
    model, ids = tiny.llama(), tiny.prompt(40)
    before = footprint(model)
    run = decantkv.attach(model, budget=0.3, window=4)
    del model.forward
    model.model._forward_hooks.clear()
    run.detach()
    run.detach()
    assert footprint(model)[1:] == before[1:]
    model.generate(ids, max_new_tokens=2, **tiny.GREEDY)


def test_a_run_is_ended_from_another_thread_and_twice():
    model = tiny.llama()
    before = footprint(model)
    run = decantkv.attach(model, budget=0.3, window=4)
    threads = [threading.Thread(target=run.detach, daemon=True) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    assert not any(thread.is_alive() for thread in threads), "a lock was never given back"
    assert footprint(model) == before


@pytest.mark.parametrize("settings", [{}, {"decode": "own", "every": 2}], ids=str)
@pytest.mark.parametrize("keeps", ["nothing", "the run", "the cache"])
def test_a_model_that_is_attached_and_dropped_is_collected(keeps, settings):
    model, argument = tiny.llama(), cache_argument(tiny.llama())
    run = decantkv.attach(model, budget=0.3, window=4, **settings)
    out = model.generate(tiny.prompt(50), max_new_tokens=5, return_dict_in_generate=True, **tiny.GREEDY)
    kept = {"nothing": None, "the run": run, "the cache": out[argument]}[keeps]
    watched = [weakref.ref(model), *(weakref.ref(parameter) for parameter in model.parameters())]
    del model, run, out
    gc.collect()
    assert not [ref for ref in watched if ref() is not None]
    assert keeps == "nothing" or kept.report().evictions


@pytest.mark.parametrize("decode", ["auto", "own", "model"])
@pytest.mark.parametrize("store", ["plain", "fp8", "static"])
def test_between_steps_nothing_of_a_call_is_alive_beyond_the_cache(store, decode):
    """With `every=` a layer's last call is needed again: its terms, and neither its keys nor their dequantised copy."""
    if store != "plain" and decode == "own":
        pytest.skip("refused")
    if store == "fp8" and not hasattr(cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this transformers has no fp8 layer")
    model, beyond = tiny.llama(), []

    def alike():
        """Tensors shaped like keys, those that compilers only pretend to have left out."""
        gc.collect()
        return [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dim() == 4 and x.shape[1] == 2]

    others = {id(x): x for x in alike()}  # held here, so that no later tensor takes their place

    class Watch(transformers.LogitsProcessor):
        def __call__(self, ids, scores):
            held = {x.untyped_storage().data_ptr() for layer in self.cache.layers for x in layer.tensors()}
            keys = [x for x in alike() if id(x) not in others]
            beyond.extend(x.shape for x in keys if x.untyped_storage().data_ptr() not in held)
            return scores

    with decantkv.attach(model, budget=20, window=4, every=3, store=store, decode=decode) as run:
        watch = Watch()
        watch.cache = run.new_cache()
        model.generate(
            tiny.prompt(60), max_new_tokens=9, logits_processor=[watch], **{cache_argument(model): watch.cache},
            **tiny.GREEDY,
        )  # fmt: skip
        assert run.report().rounds
        steps = watch.cache.steps
        assert steps is None or steps._calls
        watch.cache.reset()
        assert steps is None or not steps._calls
    assert not beyond


def test_a_run_whose_caller_dropped_it_goes_on_unless_its_context_began():
    model, ids = tiny.llama(), tiny.prompt(40)
    before, options = footprint(model), {"max_new_tokens": 2, **tiny.GREEDY}
    decantkv.attach(model, budget=0.3, window=4)
    gc.collect()
    assert model.generate(ids, return_dict_in_generate=True, **options)[cache_argument(model)].layers[0].stored == 13
    [run] = [ref() for ref in attachment._attached[model].runs]
    run.__enter__()
    del run
    gc.collect()
    assert footprint(model) == before


def test_generations_in_threads_keep_the_run_they_began_with():
    """While another thread attaches and detaches: each answer is one of the two legal ones."""
    model = tiny.llama(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, intermediate_size=32)
    ids, options = tiny.prompt(40), {"max_new_tokens": 4, **tiny.GREEDY}
    legal = [model.generate(ids, **options)]
    with decantkv.attach(model, budget=0.3, window=4):
        legal.append(model.generate(ids, **options))
    wrong, done = [], threading.Event()

    def work():
        try:
            while not done.is_set():
                made = model.generate(ids, **options)
                wrong.extend([] if any(torch.equal(made, x) for x in legal) else [made])
        except Exception as error:
            wrong.append(error)

    threads, interval = [threading.Thread(target=work) for _ in range(3)], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        [thread.start() for thread in threads]
        for _ in range(250):
            with decantkv.attach(model, budget=0.3, window=4):
                threading.Event().wait(0.002)
    finally:
        done.set()
        [thread.join() for thread in threads]
        sys.setswitchinterval(interval)
    assert not wrong
