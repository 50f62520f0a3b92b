"""attach: one line, and afterwards the model is as it was."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import threading

import pytest
import torch
from transformers import DynamicCache, StaticCache, modeling_utils
from transformers.models.llama import modeling_llama

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from decantkv.hf import attention_hook
from tests.support import tiny


def footprint(model):
    """Everything attach may touch."""
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    functions = dict(modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping)
    return hooks, functions, modeling_llama.eager_attention_forward, dict(vars(model)).keys(), model.config.to_dict()


@pytest.fixture
def model():
    gc.collect()  # caches of earlier tests hold the wrapped functions
    return tiny.llama()


def generate(model, length=150, seed=0, **options):
    return model.generate(tiny.prompt(length, seed), max_new_tokens=5, **tiny.GREEDY, **options)


def test_leaving_restores_the_model_exactly(model):
    before, plain = footprint(model), generate(model)
    with decantkv.attach(model, budget=0.1):
        assert footprint(model) != before
        assert not torch.equal(generate(model), plain)
    assert footprint(model) == before
    with pytest.raises(ZeroDivisionError), decantkv.attach(model, budget=0.1):
        raise ZeroDivisionError
    assert footprint(model) == before
    run = decantkv.attach(model, budget=0.1)
    with pytest.raises(ValueError, match="protect"), decantkv.attach(model, budget=0.5, protect=[(0, 999)]):
        generate(model)
    run.detach()
    run.detach()
    assert footprint(model) == before
    assert torch.equal(generate(model), plain)


def test_a_cache_that_is_gone_leaves_nothing_behind(model):
    before = footprint(model)
    cache = decantkv.EvictingCache(model, budget=0.1)
    generate(model, **{cache_argument(model): cache})
    assert footprint(model) != before
    del cache
    gc.collect()
    assert footprint(model) == before
    assert not attention_hook._patches


def test_an_attached_model_is_neither_copied_nor_pickled(model):
    for take in (copy.deepcopy, pickle.dumps):
        with decantkv.attach(model, budget=0.5), pytest.raises(RuntimeError, match="outside of attach"):
            take(model)
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()


def test_nested_runs_the_inner_one_wins(model):
    with decantkv.attach(model, budget=0.5) as outer:
        with decantkv.attach(model, budget=0.1) as inner:
            generate(model)
        generate(model)
    assert inner.report().layers[0]["kept"] == [[15, 15]]
    assert outer.report().layers[0]["kept"] == [[75, 75]]


def test_runs_may_end_in_any_order(model):
    before = footprint(model)
    first, second = decantkv.attach(model, budget=0.5), decantkv.attach(model, budget=0.1)
    first.detach()
    generate(model)
    assert second.report().layers[0]["kept"] == [[15, 15]]
    assert "never acted" in str(first.report())
    with pytest.raises(RuntimeError, match="the run is detached"):
        first.new_cache()
    second.detach()
    assert footprint(model) == before


def test_threads_with_their_own_settings_and_threads_without(model):
    kept, ready = {}, threading.Barrier(2)

    def own(budget):
        with decantkv.attach(model, budget=budget) as run:
            ready.wait()
            for seed in range(3):
                generate(model, seed=seed)
            ready.wait()
        kept[budget] = {row[0] for layer in run.report().layers for row in layer["kept"]}

    threads = [threading.Thread(target=own, args=(b,)) for b in (20, 40)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert kept == {20: {20}, 40: {40}}
    with decantkv.attach(model, budget=30) as run:  # as with a streamer: generate runs in a thread of its own
        thread = threading.Thread(target=generate, args=(model,))
        thread.start()
        thread.join()
    assert run.report().layers[0]["kept"] == [[30, 30]]


def test_bare_forwards_and_a_callers_empty_cache(model):
    name, ids = cache_argument(model), tiny.prompt(150)
    with torch.no_grad(), decantkv.attach(model, budget=0.1) as run:
        for module in (model, model.model):
            assert module(ids, use_cache=True)[name].layers[0].stored == 15
        own = DynamicCache(config=model.config)
        model(ids, **{name: own})
        assert own.layers[0].stored == 15
        model(ids, use_cache=False)
    assert len(run.report().layers) == 9


def test_pipeline(model):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    vocabulary = {f"w{i}": i for i in range(tiny.VOCABULARY)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="w1"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pipe = pipeline("text-generation", model=model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=core))
    text = " ".join(f"w{i}" for i in tiny.prompt(120)[0].tolist())
    with decantkv.attach(model, budget=0.25) as run:
        pipe(text, max_new_tokens=3, do_sample=False)
    assert run.report().layers[0]["kept"] == [[30, 30]]


def test_the_report_tells_what_happened(model):
    with decantkv.attach(model, budget=0.1) as run:
        generate(model)
    report = run.report()
    assert report.evictions == 3
    assert (report.bytes_before, report.bytes_after) == (3 * 2 * 2 * 150 * 8 * 4, 3 * 2 * 2 * 15 * 8 * 4)
    assert report.seconds["prefill"] > report.seconds["scoring"] > 0
    assert "kept 15 of 150 tokens per head in 3 layers" in str(report)
    assert "batch 1" in str(report)
    assert json.loads(report.to_json())["layers"][2]["kept"] == [[15, 15]]
    with decantkv.attach(model, budget=0.1) as run:
        pass
    assert "never acted" in str(run.report())
    with decantkv.attach(model, budget=0.1) as run:
        generate(model, length=20)
    assert "more was kept than asked for" in str(run.report())


def test_a_static_cache_beside_attach_is_refused(model):
    with decantkv.attach(model, budget=0.1) as run:
        with pytest.raises(ValueError, match="cache_implementation: expected none beside attach"):
            generate(model, cache_implementation="static")
        static = StaticCache(config=model.config, max_cache_len=200)
        generate(model, **{cache_argument(model): static})
    assert "never acted" in str(run.report())


BAD = [
    ({"budget": 0}, ValueError, "budget"),
    ({"budget": -1}, ValueError, "budget"),
    ({"budget": 1.5}, ValueError, "budget"),
    ({"budget": "x"}, ValueError, "budget"),
    ({"budget": float("nan")}, ValueError, "budget"),
    ({"budget": 0.1, "window": 0}, ValueError, "window"),
    ({"budget": 0.1, "window": "8"}, TypeError, "window"),
    ({"budget": 0.1, "method": "h2oo"}, ValueError, "method"),
    ({"budget": 0.1, "colour": 1}, TypeError, "colour"),
    ({"budget": 0.1, "sinks": -1}, ValueError, "sinks"),
    ({"budget": 0.1, "protect": [(9, 2)]}, ValueError, "protect"),
    ({"budget": 0.1, "allocation": "x"}, ValueError, "allocation"),
    ({"budget": 7}, ValueError, "budget: expected at least 8"),
    ({"budget": 0.1, "impl": "x"}, ValueError, "impl"),
]


@pytest.mark.parametrize(("options", "error", "says"), BAD, ids=str)
def test_bad_settings_are_refused_before_anything_is_changed(model, options, error, says):
    before = footprint(model)
    for entry in (decantkv.attach, decantkv.EvictingCache):
        with pytest.raises(error, match=says):
            entry(model, **options)
    assert footprint(model) == before
