"""Steps from a graph. Without a GPU a tape stands in for CUDA's capture."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch

import decantkv
from decantkv.cache.evicting_cache import EvictingCache, cache_argument
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.stores import ragged
from decantkv.decode import graphs
from tests.support import tiny
from tests.support.families import build
from tests.support.tape import INPUTS, NoWaiting, Tape

STEPS = 12


def both(model, inputs, number=STEPS, **settings):
    """Tokens with graphs, tokens by the model's own attention, and the run with graphs."""
    options = {"max_new_tokens": number, "return_dict_in_generate": True, "output_logits": True, **tiny.GREEDY}
    with decantkv.attach(model, budget=0.3, decode="model", **settings):
        plain = model.generate(**inputs, **options)
    with decantkv.attach(model, budget=0.3, decode="own", **settings) as run:
        graphed = model.generate(**inputs, **options)
    return plain, graphed, run


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("allocation", ["uniform", "ada"])
def test_steps_from_a_graph_are_the_models_steps(tape, name, allocation):
    model = tiny.llama()
    plain, graphed, run = both(model, INPUTS[name], allocation=allocation)
    assert torch.equal(plain.sequences, graphed.sequences)
    torch.testing.assert_close(torch.stack(graphed.logits), torch.stack(plain.logits), rtol=0, atol=2e-5)
    assert run.trust.broken is None
    assert run.trust.checked == 2
    assert run.trust.replayed == STEPS - 2, "all but the prompt and the step that takes room"
    assert f"{STEPS - 2} steps replayed as a CUDA graph" in str(run.report())
    assert len(tape) == 1
    cache = graphed[cache_argument(model)]
    assert cache.get_seq_length() == 100 + STEPS - 1


@pytest.mark.parametrize("settings", [{}, {"every": 8}, {"allocation": "ada"}])
def test_a_caches_memory_goes_with_it_and_waits_for_no_collection(tape, settings):
    model = tiny.llama()
    gc.collect()
    gc.disable()
    try:
        with decantkv.attach(model, budget=0.3, decode="own", **settings) as run:
            for _ in range(3):
                model.generate(**INPUTS["one"], max_new_tokens=STEPS, **tiny.GREEDY)
        assert len(tape) >= 3
        assert not [x for x in gc.get_objects() if type(x) in (graphs.StepGraphs, graphs._Step, EvictingLayer)]
    finally:
        gc.enable()
    assert run.trust.replayed


def test_neither_a_run_nor_its_cache_holds_the_model_afterwards(tape):
    model = tiny.llama()
    options = {"max_new_tokens": STEPS, "return_dict_in_generate": True, **tiny.GREEDY}
    with decantkv.attach(model, budget=0.3, decode="own") as run:
        cache = model.generate(**INPUTS["one"], **options)[cache_argument(model)]
        assert run.trust.standins, "norms"
    alive, weight = weakref.ref(model), weakref.ref(model.model.norm.weight)
    del model
    tape.clear()
    gc.collect()
    assert alive() is None
    assert cache.get_seq_length() > 100
    del cache  # whose tape holds what it read
    gc.collect()
    assert weight() is None
    assert run.report().graphed


def test_a_full_cache_grows_and_is_recorded_again(tape, monkeypatch):
    monkeypatch.setattr(ragged, "ROOM", 5)
    monkeypatch.setattr(EvictingCache, "expect_length", lambda self, length: None)
    plain, graphed, run = both(tiny.llama(), INPUTS["one"], number=20)
    assert torch.equal(plain.sequences, graphed.sequences)
    assert len(tape) == 4
    assert run.trust.broken is None


def test_a_second_generation_is_not_checked_again(tape):
    model = tiny.llama()
    with decantkv.attach(model, budget=0.3, decode="own") as run:
        first = model.generate(INPUTS["one"]["input_ids"], max_new_tokens=STEPS, **tiny.GREEDY)
        forwards = []
        hook = model.model.register_forward_pre_hook(lambda *_: forwards.append(1))
        again = model.generate(INPUTS["one"]["input_ids"], max_new_tokens=STEPS, **tiny.GREEDY)
        hook.remove()
    assert torch.equal(first, again)
    assert len(forwards) == 3, "the prompt, the step that takes room, and the recording"
    assert run.trust.checked == 2


def test_a_graph_that_is_wrong_is_found_out_and_left(tape, monkeypatch):
    """A tape that forgets to move the lengths is right once."""

    def forgetful(self):
        for func, args, kwargs, out in self.calls:
            if "add_" in str(func):
                continue
            new = func(*args, **kwargs)
            if isinstance(out, torch.Tensor) and out.data_ptr() != new.data_ptr():
                out.copy_(new)

    monkeypatch.setattr(Tape, "replay", forgetful)
    with pytest.warns(UserWarning, match="differs from the model's own forward"):
        plain, graphed, run = both(tiny.llama(), INPUTS["one"])
    assert torch.equal(plain.sequences, graphed.sequences)
    assert run.trust.broken
    assert run.trust.replayed == 0
    assert "without a CUDA graph" in str(run.report())


def test_a_step_that_cannot_be_recorded_goes_on_without(tape):
    model = tiny.llama()
    hook = model.model.layers[1].register_forward_hook(lambda m, a, out: float(out.sum()) and None)
    with pytest.warns(UserWarning, match="called a synchronizing CUDA operation"):
        plain, graphed, run = both(model, INPUTS["one"])
    hook.remove()
    assert torch.equal(plain.sequences, graphed.sequences)
    assert (run.trust.replayed, tape) == (0, [])


def test_a_capture_that_fails_after_all_goes_on_without(tape, monkeypatch):
    @contextmanager
    def failing(device):
        yield None
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(graphs, "capturing", failing)
    with pytest.warns(UserWarning, match="out of memory"):
        plain, graphed, run = both(tiny.llama(), INPUTS["padded"])
    assert torch.equal(plain.sequences, graphed.sequences)
    assert run.trust.replayed == 0


def test_no_step_of_a_graph_lets_the_host_wait(tape):
    """What CUDA's capture forbids: the rehearsal is guarded, and a guard of its own watches each recording."""
    model, calls = tiny.llama(), []
    with decantkv.attach(model, budget=0.3, decode="own", every=6, decode_budget=26) as run:
        bare = graphs.StepGraphs._bare

        def watched(self, *args):
            with NoWaiting():
                out = bare(self, *args)
            calls.append(1)
            return out

        graphs.StepGraphs._bare = watched
        try:
            model.generate(**INPUTS["padded"], max_new_tokens=30, **tiny.GREEDY)
        finally:
            graphs.StepGraphs._bare = bare
    assert len(calls) == 2, "a rehearsal and a recording"
    assert run.trust.replayed == 28


def test_forks_turns_and_other_outputs_leave_the_graph(tape):
    model, ids, name = tiny.llama(), INPUTS["one"]["input_ids"], cache_argument(tiny.llama())
    with decantkv.attach(model, budget=0.3, decode="own") as run:
        out = model.generate(ids, max_new_tokens=6, return_dict_in_generate=True, **tiny.GREEDY)
        fork = copy.deepcopy(out[name])
        turn = torch.cat([out.sequences, tiny.prompt(5, seed=3)], 1)
        second = [model.generate(turn, max_new_tokens=6, **{name: c}, **tiny.GREEDY) for c in (fork, out[name])]
        assert torch.equal(*second)
        replayed = run.trust.replayed
        wide = model.generate(
            ids, max_new_tokens=6, output_hidden_states=True, return_dict_in_generate=True, **tiny.GREEDY
        )
        assert run.trust.replayed == replayed
    assert torch.equal(wide.sequences, out.sequences)
    left = run.report().eager_steps
    assert left == {"the cache is a copy": 5, "attentions or hidden states are wanted": 5}
    assert "5 steps without a CUDA graph: the cache is a copy" in str(run.report())


@pytest.mark.parametrize("name", INPUTS)
def test_answers_are_evicted_between_steps(tape, name):
    plain, graphed, run = both(tiny.llama(), INPUTS[name], number=40, every=6, decode_budget=26)
    assert torch.equal(plain.sequences, graphed.sequences)
    torch.testing.assert_close(torch.stack(graphed.logits), torch.stack(plain.logits), rtol=0, atol=3e-5)
    assert run.report().rounds == 3 * 6
    assert (run.trust.broken, run.trust.replayed, len(tape)) == (None, 38, 1)


def test_beams_move_rows_about_and_are_not_recorded_each_step(tape):
    model, ids = tiny.llama(), INPUTS["one"]["input_ids"]
    options = {"max_new_tokens": STEPS, "num_beams": 3, **tiny.GREEDY}
    with decantkv.attach(model, budget=0.3, decode="model"):
        plain = model.generate(ids, **options)
    with decantkv.attach(model, budget=0.3, decode="own") as run:
        assert torch.equal(model.generate(ids, **options), plain)
    assert len(tape) <= 1
    assert run.report().eager_steps["rows move about, as beams do"] >= STEPS - 4


def test_a_cache_of_ones_own_is_stepped_by_graphs_too(tape):
    model, ids, name = tiny.llama(), INPUTS["one"]["input_ids"], cache_argument(tiny.llama())
    with decantkv.attach(model, budget=0.3, decode="own") as run:
        theirs = model.generate(ids, max_new_tokens=STEPS, **tiny.GREEDY)
        before = run.trust.replayed
        out = model.generate(ids, max_new_tokens=STEPS, **{name: run.new_cache()}, **tiny.GREEDY)
        assert run.trust.replayed == before + STEPS - 2
    assert torch.equal(out, theirs)


def test_layers_that_do_not_attend_for_themselves_are_named(tape):
    model = build("gemma3", "sdpa")
    with decantkv.attach(model, budget=0.3, decode="own") as run:
        model.generate(tiny.prompt(100), max_new_tokens=STEPS, **tiny.GREEDY)
    assert run.report().eager_steps == {"some layers do not attend for themselves": STEPS - 1}


def test_models_whose_steps_are_not_recorded_are_named(tape):
    model, ids = tiny.llama(), INPUTS["one"]["input_ids"]
    model.forward = model.forward  # as accelerate's hooks do
    with decantkv.attach(model, budget=0.3, decode="own") as run:
        model.generate(ids, max_new_tokens=STEPS, **tiny.GREEDY)
    assert run.report().graphed == 0
    assert "without a CUDA graph: another library has wrapped the model's forward" in str(run.report())


def test_without_a_gpu_nothing_is_recorded():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, _, run = both(tiny.llama(), INPUTS["one"])
    assert (run.trust.checked, run.trust.replayed) == (0, 0)
