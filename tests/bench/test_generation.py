"""The generation tables' machinery on a tiny model; the numbers themselves need a GPU."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from transformers import DynamicCache

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from decantkv.cache.stores.dense import ROOM
from decantkv.cli import main
from decantkv.lab.bench import generation
from decantkv.lab.bench.cap_cost import answer_loss
from decantkv.lab.bench.cases import collect, run
from decantkv.lab.provenance import device_name
from decantkv.methods import METHODS
from tests.support import tiny

TINY = ["--geometries", "tiny"]
WHERE = {"device": "here", "geometry": "small"}


def made(cases):
    """The rows of cases, measured now."""
    return [row for row, _ in run(cases, WHERE)]


def command(capsys, path, *arguments):
    """What a command printed, and the rows in its file."""
    with pytest.raises(SystemExit) as stop:
        main(["generation", *arguments, *TINY, "--out", str(path)])
    assert stop.value.code == 0
    return capsys.readouterr().out.splitlines(), [json.loads(line) for line in path.read_text().splitlines()]


def test_the_decode_command(capsys, tmp_path):
    said, rows = command(capsys, tmp_path / "rows.jsonl", "decode", "--batches", "1,2", "--kept", "40", "--new", "12")
    assert [json.loads(line) for line in said] == rows
    assert [(row["contender"], row["batch"]) for row in rows] == [
        (name, batch) for name in generation.CONTENDERS for batch in (1, 2)
    ]
    for row in rows:
        assert 0 < row["ms_a_token"]["p20"] <= row["ms_a_token"]["p50"] <= row["ms_a_token"]["p80"]
        assert (row["geometry"], row["device"]) == ("tiny", device_name(torch.device("cpu")))
        assert row["versions"]["torch"]
        assert row.get("graphed", 0) == 0, "no GPU here"
        assert not row.get("compiled"), "transformers compiles on GPUs alone"


def test_the_throughput_command(capsys, tmp_path):
    _, rows = command(
        capsys, tmp_path / "rows.jsonl", "throughput", "--lengths", "80,120", "--batches", "1,3", "--budget", "0.2",
        "--impls", "torch,reference", "--new", "11",
    )  # fmt: skip
    expected = [
        (length, name, impl, batch)
        for length in (80, 120)
        for name, impl in (("dynamic", None), ("static compiled", None), ("ours", "torch"), ("ours", "reference"))
        for batch in (1, 3)
    ]
    assert [(row["kv_len"], row["contender"], row["impl"], row["batch"]) for row in rows] == expected
    for row in rows:
        assert row["tokens_a_second"] > row["tokens_a_second_with_prompts"] > 0
        assert row["prompt_s"] > 0
    for length in (80, 120):
        whole = {row["prompt_s"] for row in rows if row["kv_len"] == length and row["impl"] is None}
        assert len(whole) == 1, "one reading serves both full caches and every batch"


def test_the_long_command(capsys, tmp_path):
    given = ("--length", "60", "--kept", "30", "--new", "200", "--every", "8,0", "--marks", "10,100,200")
    _, rows = command(capsys, tmp_path / "rows.jsonl", "long", *given)
    evicted, growing = rows
    assert [row["every"] for row in rows] == [8, None]
    for row in rows:
        assert list(row["cache_bytes"]) == list(row["ms_a_token"]) == ["10", "100", "200"]
        assert all(ms > 0 for ms in row["ms_a_token"].values())
    tiny_model = generation.build("tiny", "cpu")
    token = generation.token_bytes(tiny_model) * tiny_model.config.num_hidden_layers
    assert set(evicted["cache_bytes"].values()) == {evicted["cache_bytes"]["10"]}, "as much at the end as at first"
    assert 30 * token <= evicted["cache_bytes"]["200"] < (30 + 8 + ROOM + 1) * token
    assert growing["cache_bytes"]["200"] >= (30 + 199) * token


@pytest.mark.parametrize("marks", ["1", "300", "10,201"])
def test_marks_outside_an_answer_are_refused(capsys, marks):
    with pytest.raises(SystemExit):
        main(["generation", "long", *TINY, "--new", "200", "--length", "60", "--kept", "30", "--marks", marks])
    assert "marks: expected numbers of tokens from 2 to 200" in capsys.readouterr().err


def test_the_latency_command_for_every_method(capsys, tmp_path):
    _, rows = command(
        capsys,
        tmp_path / "rows.jsonl",
        "latency",
        "--length",
        "80",
        "--batches",
        "1,2",
        "--budget",
        "0.4",
        "--new",
        "3",
    )
    methods = ["none", "none, static compiled", *METHODS]
    assert [(row["method"], row["batch"]) for row in rows] == [(m, b) for m in methods for b in (1, 2)]
    assert all(0 < row["first_token_s"] <= row["whole_s"] for row in rows)


def test_the_latency_command_without_compiling(capsys, tmp_path):
    _, rows = command(
        capsys, tmp_path / "rows.jsonl", "latency", "--length", "60", "--batches", "1", "--methods", "knorm",
        "--budget", "0.4", "--new", "3", "--no-static",
    )  # fmt: skip
    assert [row["method"] for row in rows] == ["none", "knorm"]


def test_the_prefill_command(capsys, tmp_path):
    _, rows = command(
        capsys,
        tmp_path / "rows.jsonl",
        "prefill",
        "--lengths",
        "150",
        "--chunk",
        "24",
        "--cap",
        "40",
        "--budget",
        "0.2",
    )
    assert [row["bounds"] for row in rows] == [
        None, {}, {"prefill_chunk": 24}, {"prefill_chunk": 24, "max_kv_tokens": 40}
    ]  # fmt: skip
    assert [row.get("rounds") for row in rows] == [None, 0, 0, 12], "two layers, from the second of seven chunks on"


def test_a_command_goes_on_where_it_was_cut_short(capsys, tmp_path, monkeypatch):
    path, arguments = tmp_path / "rows.jsonl", ["latency", "--length", "60", "--batches", "1,2", "--methods",
                                                "dropkv", "--budget", "0.4", "--new", "3"]  # fmt: skip
    _, rows = command(capsys, path, *arguments)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:30])
    _, again = command(capsys, path, *arguments)
    assert again[:4] == rows[:4]
    assert [row["batch"] for row in again] == [row["batch"] for row in rows]
    monkeypatch.setattr(generation, "build", pytest.fail)  # nothing is left to measure, so no model is needed
    said, third = command(capsys, path, *arguments)
    assert third == again
    assert len(said) == 6
    assert all(line.startswith("there already: latency") for line in said)


@pytest.mark.parametrize("error", [
    torch.cuda.OutOfMemoryError("CUDA out of memory"), RuntimeError("backend='inductor' raised: CUDA out of memory."),
], ids=["plain", "wrapped"])  # fmt: skip
def test_the_batch_at_which_memory_ends_is_a_row(tmp_path, monkeypatch, error):
    clocked = generation.clocked

    def small(model, ids, new, **options):
        if ids.shape[0] > 2:
            raise error
        return clocked(model, ids, new, **options)

    monkeypatch.setattr(generation, "clocked", small)
    model, out = tiny.llama(), tmp_path / "rows.jsonl"
    options = {"length": 60, "batches": [1, 2, 4, 8], "methods": ["dropkv", "knorm"], "budget": 0.4, "new": 3}
    rows = [row for row, _ in run(generation.latency(lambda: model, **options), WHERE, out)]
    methods = ["none", "none, static compiled", "dropkv", "knorm"]
    assert [(row["method"], row["batch"]) for row in rows] == [(m, b) for m in methods for b in (1, 2, 4)]
    assert [row.get("left_out") for row in rows] == [None, None, "memory"] * 4
    again = list(run(generation.latency(lambda: model, **options), WHERE, out))
    assert [row for row, _ in again] == rows
    assert not any(new for _, new in again), "nor is the batch beyond the row tried"
    other = list(run(generation.latency(lambda: model, **options), {**WHERE, "device": "elsewhere"}, out))
    assert all(new for _, new in other)


def test_other_errors_are_no_rows(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(generation, "clocked", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        made(generation.decode(tiny.llama, batches=[1], kept=20, names=["dynamic"]))


def test_every_row_of_a_throughput_case_holds_the_evicted_prompt(monkeypatch):
    clocked, seen = generation.clocked, []

    def watched(model, ids, new, **options):
        (cache,) = options.values()
        seen.append((type(cache).__name__, tuple(cache.layers[0].keys.shape[:3]), ids.shape[0]))
        return clocked(model, ids, new, **options)

    monkeypatch.setattr(generation, "clocked", watched)
    model = tiny.llama()
    made(generation.throughput(lambda: model, lengths=[60], budget=0.2, batches=[4], new=11))
    assert seen[:2] == [("DynamicCache", (4, 2, 60), 4), ("StaticCache", (4, 2, 72), 4)]
    assert seen[2] == ("EvictingCache", (4 * 2 * 12, 8), 4), "flat lanes"


def test_the_rows_of_a_throughput_case_are_prompts_in_turn(monkeypatch):
    clocked, seen = generation.clocked, []

    def watched(model, ids, new, **options):
        (cache,) = options.values()
        if isinstance(cache, decantkv.EvictingCache):
            seen.append((ids.clone(), cache.layers[0].keys.clone()))
        return clocked(model, ids, new, **options)

    monkeypatch.setattr(generation, "clocked", watched)
    model = tiny.llama()
    made(generation.throughput(lambda: model, lengths=[60], budget=0.2, batches=[3], new=11, names=["ours"]))
    ((ids, keys),) = seen
    keys = keys.view(3, -1)
    assert torch.equal(ids[0], ids[2])
    assert torch.equal(keys[0], keys[2])
    assert not torch.equal(ids[0], ids[1])
    assert not torch.equal(keys[0], keys[1])


def test_a_length_is_read_once_and_not_beside_a_batch(monkeypatch):
    read, clocked, seen, prompts = generation._read, generation.clocked, [], []

    def noted(model, ids, cache):
        made = read(model, ids, cache)
        seen.append((type(cache).__name__, tuple(ids.shape)))
        if isinstance(cache, DynamicCache) and not isinstance(cache, decantkv.EvictingCache):
            prompts.extend(weakref.ref(x) for layer in cache.layers for x in (layer.keys, layer.values))
        return made

    def alone(model, ids, new, **options):
        (cache,) = options.values()
        if not isinstance(cache, decantkv.EvictingCache):
            assert prompts
            assert not any(prompt() is not None for prompt in prompts)
        return clocked(model, ids, new, **options)

    monkeypatch.setattr(generation, "_read", noted)
    monkeypatch.setattr(generation, "clocked", alone)
    model = tiny.llama()
    rows = made(generation.throughput(
        lambda: model, lengths=[40, 60], budget=0.4, batches=[1, 2, 4], impls=["torch", "reference"], new=11,
    ))  # fmt: skip
    assert len(rows) == 2 * 4 * 3
    assert seen == [
        (name, (1, length)) for length in (40, 60) for name in ["DynamicCache", *4 * ["EvictingCache"]]
    ]  # fmt: skip


def test_a_throughput_batch_beyond_memory_ends_its_series_and_reads_nothing_again(monkeypatch):
    read, drawn, reads = generation._read, generation._drawn, []

    def small(model, like, batch):
        if batch > 2:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return drawn(model, like, batch)

    monkeypatch.setattr(generation, "_read", lambda *given: reads.append(given[1].shape) or read(*given))
    monkeypatch.setattr(generation, "_drawn", small)
    model = tiny.llama()
    rows = made(generation.throughput(
        lambda: model, lengths=[40, 60], budget=0.4, batches=[1, 2, 4, 8], new=11, names=["dynamic", "ours"], distinct=1
    ))  # fmt: skip
    found = [(row["contender"], row["batch"], row.get("left_out")) for row in rows]
    series = [
        ("dynamic", 1, None),
        ("dynamic", 2, None),
        ("dynamic", 4, "memory"),
        *(("ours", b, None) for b in (1, 2, 4, 8)),
    ]
    assert found == 2 * series
    assert reads == [(1, 40), (1, 40), (1, 60), (1, 60)]


def test_a_filled_cache_has_what_a_read_one_has_but_its_content():
    model, ids = tiny.llama().to(torch.bfloat16), tiny.prompt(60)
    _, cache = generation._read(model, ids, DynamicCache(config=model.config))
    expected = [x.shape for layer in cache.layers for x in (layer.keys, layer.values)]
    size = sum(x.nbytes for x in (cache.layers[0].keys, cache.layers[0].values))
    assert generation.token_bytes(model) * 60 == size
    shape = generation._emptied(cache)
    filled = generation._filled(model, shape, 3)
    held = [x for layer in filled.layers for x in (layer.keys, layer.values)]
    assert [(x.shape[0], x.shape[1:]) for x in held] == [(3, x[1:]) for x in expected]
    assert {(x.dtype, x.device.type) for x in held} == {(torch.bfloat16, "cpu")}
    assert filled.get_seq_length() == shape.get_seq_length() == 60
    for x in held:
        assert abs(float(x.float().mean())) < 0.1
        assert 0.9 < float(x.float().std()) < 1.1
        assert not torch.equal(x[0], x[1])
        assert x.untyped_storage().nbytes() == x.nbytes


def test_a_static_cache_that_was_filled_says_what_a_dynamic_one_says():
    model, ids = tiny.llama(), tiny.prompt(60)
    _, cache = generation._read(model, ids, DynamicCache(config=model.config))
    shape = generation._emptied(cache)
    rows = torch.cat([ids, ids[:, :1]], 1)
    answers = []
    for batch, make in (
        (1, lambda: generation._filled(model, shape, 1)),
        (3, lambda: generation._static(model, shape, 3, 70)),
    ):
        torch.manual_seed(5)
        answers.append(
            model.generate(
                rows.expand(batch, -1), max_new_tokens=10, **{cache_argument(model): make()}, **tiny.GREEDY
            )
        )  # fmt: skip
    assert torch.equal(answers[0].expand(3, -1), answers[1])


@pytest.mark.gpu
def test_filling_takes_no_memory_beside_the_cache():
    model, device = generation.build("tiny"), torch.device("cuda")
    _, cache = generation._read(model, generation.prompts(model, 1, 4096), DynamicCache(config=model.config))
    shape = generation._emptied(cache)
    row = 4096 * generation.token_bytes(model)  # of one layer
    for make, beside in ((lambda: generation._filled(model, shape, 8), 0), (
        lambda: generation._static(model, shape, 8, 4607), row  # one row is drawn for all
    )):  # fmt: skip
        collect(device)
        held = generation.allocated(device)
        filled = make()
        stored = sum(x.nbytes for layer in filled.layers for x in (layer.keys, layer.values))
        assert stored >= 16 * row, "eight rows of two layers"
        assert generation.peak(device) - held <= stored + beside + 2**17  # and a few indices
        del filled


def test_a_latency_batch_that_will_not_fit_is_left_out_before_its_prompt_is_read(monkeypatch):
    empty, clocked, begun, taken = torch.empty, generation.clocked, [], []
    model = tiny.llama()
    one = 60 * generation.token_bytes(model)  # one prompt's keys and values in one layer
    assert 60 * model.config.hidden_size * model.dtype.itemsize == 2 * one

    def small(*size, dtype=None, **options):
        x = empty(*size, dtype=dtype, **options)
        if dtype == torch.uint8:
            taken.append(weakref.ref(x))
            # of three layers the two that do not run, and the embedded prompt: 2 + 2 a row, and 0.8 + 2 where 40 % stay
            if sum(held.nbytes for held in (ref() for ref in taken) if held is not None) > 12 * one:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return x

    def noted(model, ids, new, **options):
        begun.append(ids.shape[0])
        return clocked(model, ids, new, **options)

    monkeypatch.setattr(torch, "empty", small)
    monkeypatch.setattr(generation, "clocked", noted)
    options = {"length": 60, "batches": [1, 2, 4, 8], "methods": ["dropkv"], "budget": 0.4, "new": 3}
    rows = made(generation.latency(lambda: model, **options))
    full = [(1, None), (2, None), (4, "memory")]
    assert [(row["method"], row["batch"], row.get("left_out")) for row in rows] == [
        *(("none", *case) for case in full),
        *(("none, static compiled", *case) for case in full),
        *(("dropkv", b, None) for b in (1, 2, 4)),
        ("dropkv", 8, "memory"),
    ]
    assert begun == [1, 2, 1, 1, 2, 2, 1, 2, 4], "the static cache's first generation compiles"
    assert len(model.get_decoder().layers) == 3


@pytest.mark.parametrize("chunk", [20, 200])
def test_the_cost_of_a_cap_is_the_answers_loss(chunk):
    model, ids, answer = tiny.llama(), tiny.prompt(90), tiny.prompt(4, seed=9)
    with torch.no_grad():
        said = model(torch.cat([ids, answer], 1)).logits[0, 89:-1]
    expected = float(torch.nn.functional.cross_entropy(said, answer[0]))
    loss, right = answer_loss(model, decantkv.EvictingCache(model, budget=1.0), ids, answer, chunk)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert not right
    best = said.argmax(-1)[:1]
    assert answer_loss(model, decantkv.EvictingCache(model, budget=1.0), ids, best[None], chunk)[1]
    capped = decantkv.EvictingCache(model, budget=0.2, prefill_chunk=20, max_kv_tokens=30)
    assert answer_loss(model, capped, ids, answer, 20)[0] != pytest.approx(expected, abs=1e-3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_the_commands_want_a_gpu(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["generation", "decode"])
    assert stop.value.code == 2
    assert "device: expected a CUDA device" in capsys.readouterr().err
