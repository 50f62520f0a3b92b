"""What `run.report()` says: bytes by the allocator, how often eviction acted, and when nothing is gained."""

from __future__ import annotations

import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import decantkv
from decantkv.base import stopwatch
from decantkv.cache import memory
from decantkv.cache import recorder as recorders
from decantkv.cache import report as reports
from decantkv.cache.evicting_cache import cache_argument
from tests.support import tiny

SETTINGS = {
    "uniform": {},
    "heads differ": {"method": "adadropkv"},
    "over layers": {"allocation": "layer"},
    "in chunks": {"prefill_chunk": 64},
    "capped": {"prefill_chunk": 64, "max_kv_tokens": 100},
    "own attention": {"decode": "own"},
}
PROMPT = {"input_ids": tiny.prompt(300)}
FULL = 3 * 2 * 2 * 300 * 8 * 4  # layers, K and V, heads, tokens, head_dim, bytes


def prompt_read(model, inputs=PROMPT, **settings):
    """The report and the cache right after a prompt."""
    options = {"max_new_tokens": 1, "return_dict_in_generate": True, **tiny.GREEDY}
    with decantkv.attach(model, budget=0.2, **settings) as run:
        out = model.generate(**inputs, **options)
    return run.report(), out[cache_argument(model)]


@pytest.mark.parametrize("name", SETTINGS)
def test_without_an_allocator_bytes_are_those_of_live_storages(name):
    report, cache = prompt_read(tiny.llama(), **SETTINGS[name])
    assert (report.memory.before, report.memory.after, report.memory.by) == (FULL, cache.nbytes(), "storages")
    assert report.memory.after < FULL * 0.25
    memory = {"before": FULL, "after": cache.nbytes(), "by": "storages", "room": 0}
    assert json.loads(report.to_json())["memory"] == memory


def live_bytes(*_):
    """An allocator's count: distinct storages of all tensors alive."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    return reports.storage_bytes(found)


@pytest.fixture
def counted(monkeypatch):
    """An allocator that counts on the CPU."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", live_bytes)
    monkeypatch.setattr(memory, "_counting_devices", lambda module: {torch.device("cpu")})


@pytest.mark.parametrize("name", ["uniform", "heads differ", "capped"])
def test_the_allocators_growth_over_a_prompt_is_what_was_kept(counted, name):
    report, cache = prompt_read(tiny.llama(), **SETTINGS[name])
    assert (report.memory.before, report.memory.by) == (FULL, "allocator")
    # ids, masks and positions of first or last chunk are there before or after: a few numbers a token
    assert abs(report.memory.after - cache.nbytes()) <= 300 * 8 * 2
    assert "by the allocator" in str(report)


def test_what_something_else_holds_on_to_shows_in_the_allocators_growth(counted):
    model, leak = tiny.llama(), []
    hook = model.model.layers[1].self_attn.register_forward_hook(lambda m, a, out: leak.append(torch.zeros(10**6)))
    report, cache = prompt_read(model)
    hook.remove()
    assert report.memory.after >= cache.nbytes() + 4 * 10**6


def test_layers_that_do_not_evict_are_left_out(counted):
    from tests.support.families import build

    model = build("gemma3", "sdpa")
    report, cache = prompt_read(model, {"input_ids": tiny.prompt(120)})
    assert report.left_alone > 0
    evicting = sum(
        layer.tensors()[0].nbytes * 2
        for layer in cache.layers
        if isinstance(layer, decantkv.cache.evicting_cache.EvictingLayer)
    )
    assert evicting <= report.memory.after <= evicting + 120 * 8 * 8


def test_it_tells_how_often_eviction_acted():
    model = tiny.llama()
    with decantkv.attach(model, budget=60) as run:
        for length in (300, 50, 200):
            model.generate(tiny.prompt(length), max_new_tokens=2, **tiny.GREEDY)
    report = run.report()
    assert (report.evictions, len(report.layers)) == (6, 9)
    assert "dropped something in 6 of 9 prompts of a layer" in str(report)
    assert json.loads(report.to_json())["prompts_of_layers"] == 9
    assert report.memory.after == 3 * 2 * 2 * 60 * 8 * 4, "of the last prompt"


@pytest.mark.parametrize("store", ["plain", "static"])
def test_evictions_count_tokens_whatever_room_a_store_takes(store):
    model = tiny.llama()
    with decantkv.attach(model, budget=0.5, store=store) as run:
        out = model.generate(**PROMPT, max_new_tokens=250, return_dict_in_generate=True, **tiny.GREEDY)
    report, cache = run.report(), out[cache_argument(model)]
    assert (report.evictions, report.prompts_evicted) == (3, 3)
    assert not any("nothing was dropped" in warning for warning in report.warnings)
    assert "dropped something" not in str(report)
    assert report.memory == cache.report().memory, "attach and the cache mean the same bytes"
    assert report.memory.after == FULL // 2
    assert report.memory.after + report.memory.room == cache.nbytes()
    assert "room for the answer" in str(report)


def test_rounds_are_evictions_too():
    model = tiny.llama()
    with decantkv.attach(model, budget=400, every=8, decode_budget=100) as run:
        model.generate(tiny.prompt(90), max_new_tokens=40, **tiny.GREEDY)
    report = run.report()
    assert report.rounds > 0
    assert (report.evictions, report.prompts_evicted) == (report.rounds, 0)
    assert json.loads(report.to_json())["evictions"] == report.rounds
    assert not any("nothing was dropped" in warning for warning in report.warnings)


def test_the_settings_in_force_are_told():
    model = tiny.llama()
    run = decantkv.attach(model, budget=0.2, allocation="ada", sinks=5, protect=[(10, 14), (20, 30)], max_kv_tokens=100,
                          prefill_chunk=50)  # fmt: skip
    run.detach()
    for report in (run.report(), decantkv.EvictingCache(model, budget=0.2, allocation="ada", sinks=5).report()):
        assert "sinks=5" in str(report)
        assert "allocation ada(alpha=0.2)" in str(report)
        assert json.loads(report.to_json())["settings"]["sinks"] == 5
        assert json.loads(report.to_json())["settings"]["allocation"] == "ada(alpha=0.2)"
    assert "protect 10:14 20:30" in str(run.report())
    assert "max_kv_tokens 100" in str(run.report())
    told = json.loads(run.report().to_json())["settings"]
    assert (told["protect"], told["max_kv_tokens"]) == ([[10, 14], [20, 30]], 100)


def test_nothing_dropped_says_so_and_nothing_of_speed():
    with decantkv.attach(model := tiny.llama(), budget=400) as run:
        model.generate(**PROMPT, max_new_tokens=1, **tiny.GREEDY)
    report = run.report()
    assert report.warnings == ["nothing was dropped: every prompt fitted its budget"]
    assert "dropped something" not in str(report)


def test_a_loaded_cache_does_not_say_that_eviction_never_acted(tmp_path):
    model = tiny.llama()
    _, cache = prompt_read(model)
    cache.save(tmp_path / "kept")
    report = decantkv.EvictingCache.load(tmp_path / "kept", model).report()
    assert report.warnings == []
    assert "loaded from a file" in str(report)
    assert json.loads(report.to_json())["loaded"] is True


@pytest.mark.parametrize(
    ("budget", "note"),
    [(0.004, "less than 1 %"), (8, "no score had a say"), (0.001, "more was kept than asked for"), (0.05, None)],
)
def test_small_budgets_are_noted(budget, note):
    with decantkv.attach(model := tiny.llama(), budget=budget) as run:
        model.generate(**PROMPT, max_new_tokens=1, **tiny.GREEDY)
    notes = [w for w in run.report().warnings if "batch 1" not in w]
    assert any(note in w for w in notes) if note else not notes


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0324, "32.4 ms"), (0.9999, "1 s"), (1.5, "1.5 s"), (14.0, "14 s"), (1400.0, "1,400 s")]
)
def test_seconds_for_a_reader(seconds, text):
    assert reports.format_seconds(seconds) == text


def test_rounds_count_as_scoring_selection_and_compaction():
    model = tiny.llama()
    with decantkv.attach(model, budget=400, every=4) as run:
        model.generate(**PROMPT, max_new_tokens=2, **tiny.GREEDY)
        before = run.report().seconds
        assert (before["scoring"], before["selection"]) == (0, 0), "the prompt fitted its budget"
    with decantkv.attach(model, budget=40, every=4) as run:
        model.generate(**PROMPT, max_new_tokens=30, **tiny.GREEDY)
    report, spans = run.report(), run.recorder.stopwatch._spans
    assert report.rounds > 0
    for stage in ("scoring", "selection", "compaction"):
        assert len(spans[stage]) == 3 + report.rounds, "once a layer for the prompt, once a round"
        assert report.seconds[stage] > 0


def test_it_warns_where_the_cache_is_small_beside_the_weights():
    model = tiny.llama()
    short, _ = prompt_read(model, {"input_ids": tiny.prompt(50)})
    long, _ = prompt_read(model)
    assert short.weights == sum(p.nbytes for p in model.parameters())
    assert short.bytes_before < short.weights / 20 < long.bytes_before
    assert any("expect hardly any gain from eviction" in warning for warning in short.warnings)
    assert not any("hardly any gain" in warning for warning in long.warnings)


def test_a_cache_of_its_own_tells_its_bytes_too():
    model = tiny.llama()
    cache = decantkv.EvictingCache(model, budget=0.2)
    assert cache.report().memory is None
    with torch.no_grad():
        model(PROMPT["input_ids"], **{cache_argument(model): cache})
    assert (cache.report().memory.before, cache.report().memory.after) == (FULL, cache.nbytes())


def test_a_failed_prompt_leaves_no_weight_behind():
    model = tiny.llama()

    def fail(*_):
        raise RuntimeError("no more")

    with decantkv.attach(model, budget=0.2) as run:
        hook = model.model.layers[2].register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="no more"):
            model.generate(**PROMPT, max_new_tokens=1, **tiny.GREEDY)
        hook.remove()
        assert run.report().memory is None
        model.generate(**PROMPT, max_new_tokens=1, **tiny.GREEDY)
    assert run.report().memory.before == FULL


class Event:
    """A CUDA event that the device reaches when told."""

    def __init__(self, at, reached=True):
        self.at, self.reached = at, reached

    def query(self):
        return self.reached

    def synchronize(self):
        self.reached = True

    def elapsed_time(self, other):
        assert other.reached
        return (other.at - self.at) * 1e3


def test_long_runs_add_their_spans_up_without_waiting():
    watch = stopwatch.Stopwatch()
    spans = watch._spans["scoring"] = []
    late = Event(4000.0, reached=False)
    spans += [(Event(float(i)), Event(i + 0.5)) for i in range(stopwatch.SPANS)] + [(Event(3000.0), late)]
    stopwatch._add_up(spans)
    assert len(spans) == 2
    assert not late.reached
    assert watch.seconds("scoring") == pytest.approx(stopwatch.SPANS * 0.5 + 1000)
    for _ in range(3 * stopwatch.SPANS):
        watch.start("selection", torch.device("cpu"))()
    assert len(watch._spans["selection"]) <= stopwatch.SPANS + 1
    assert watch.seconds("selection") > 0


@pytest.mark.gpu
def test_on_a_gpu_the_allocator_is_asked():
    model = tiny.llama(head_dim=64, num_hidden_layers=8).to("cuda", torch.bfloat16)
    inputs = {"input_ids": tiny.prompt(2000).repeat(1, 8).cuda()}
    prompt_read(model, inputs)  # workspaces are taken for good
    report, cache = prompt_read(model, inputs)
    assert report.memory.by == "allocator"
    assert abs(report.memory.after - cache.nbytes()) <= 8 * 2**20, "a block a layer"
    assert report.memory.after < report.memory.before * 0.3


@pytest.mark.gpu
def test_counts_of_prompts_long_past_are_on_the_host(monkeypatch):
    monkeypatch.setattr(recorders, "SETTLED_AFTER", 6)
    model = tiny.llama(head_dim=64).to("cuda", torch.bfloat16)
    with decantkv.attach(model, budget=0.3, allocation="ada") as run, torch.no_grad():
        for _ in range(7):
            model(tiny.prompt(300).cuda())
            torch.cuda.synchronize()
    found = [record.counts.is_cuda for record in run.recorder.records.newest]
    assert 0 < sum(found) < 12, found
    assert found == sorted(found)
    assert all(sum(map(sum, layer["kept"])) == 90 * 2 for layer in run.report().layers)


def test_a_long_run_keeps_its_newest_records_and_counts_all(monkeypatch):
    def report():
        model = tiny.llama()
        with decantkv.attach(model, budget=0.3) as run, torch.no_grad():
            for length in (100, 2, 60, 2, 80):  # two tokens fit, nothing of them is dropped
                model(tiny.prompt(length))
        return run.report()

    whole = report()
    monkeypatch.setattr(recorders, "RECORDS", 4)
    short = report()
    assert len(whole.layers) == 15
    assert list(short.layers) == list(whole.layers)[-4:]
    for name in (
        "evictions",
        "prompts_evicted",
        "prompts_of_layers",
        "bytes_before",
        "bytes_after",
        "memory",
        "warnings",
    ):
        assert getattr(short, name) == getattr(whole, name), name
    assert str(short).splitlines()[:3] == str(whole).splitlines()[:3]


def test_threads_lose_no_counts():
    recorder, before = recorders.Recorder("dropkv", "0.1"), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for _ in range(4):
                pool.submit(lambda: [recorder.count("rounds") for _ in range(5000)])
    finally:
        sys.setswitchinterval(before)
    assert recorder.report().rounds == 20_000
