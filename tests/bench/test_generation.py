"""The generation tables' machinery on a tiny model; the numbers themselves need a GPU."""

from __future__ import annotations

import pytest
import torch

import decantkv
from decantkv.bench import generation
from decantkv.bench.cap_cost import answer_loss
from decantkv.cli import main
from tests import tiny


def test_decode_rows_for_every_contender_that_runs_here():
    rows = list(generation.decode(tiny.llama(), batch=2, kept=40, names=("dynamic", "ours", "ours eager"), new=12))
    assert [row["contender"] for row in rows] == ["dynamic", "ours", "ours eager"]
    for row in rows:
        assert 0 < row["ms_a_token"]["p20"] <= row["ms_a_token"]["p50"] <= row["ms_a_token"]["p80"]
    assert rows[1]["graphed"] == 0, "no GPU here"


def test_prefill_rows_say_how_often_chunks_were_evicted():
    capped = {"prefill_chunk": 24, "max_kv_tokens": 40}
    rows = list(generation.bounded(tiny.llama(), length=150, settings=[None, {}, capped], budget=0.2))
    assert [row.get("rounds") for row in rows] == [None, 0, 18]


def test_throughput_rows_until_memory_ends(monkeypatch):
    clocked, seen = generation.clocked, []

    def small(model, ids, new, **options):
        cache = next(iter(options.values()))
        seen.append((type(cache).__name__, cache.layers[0].keys.shape[-2] if ids.shape[0] == 1 else 0))
        if ids.shape[0] > 4:
            raise torch.cuda.OutOfMemoryError("no more")
        return clocked(model, ids, new, **options)

    monkeypatch.setattr(generation, "clocked", small)
    rows = list(generation.throughput(tiny.llama(), length=60, budget=0.2, batches=[1, 4, 8, 16], new=11))
    assert [(row["contender"], row["batch"]) for row in rows] == [
        (k, b) for k in ("dynamic", "ours") for b in (1, 4, 8)
    ]
    assert [row.get("left_out") for row in rows] == [None, None, "memory"] * 2
    assert seen[0] == ("DynamicCache", 60)
    assert seen[3] == ("EvictingCache", 2 * 12)


def test_latency_rows():
    rows = list(
        generation.latency(tiny.llama(), length=60, batches=[1, 2], methods=["dropkv", "knorm"], budget=0.2, new=4)
    )
    assert [(row["method"], row["batch"]) for row in rows] == [
        (m, b) for m in ("none", "dropkv", "knorm") for b in (1, 2)
    ]
    assert all(0 < row["first_token_s"] <= row["whole_s"] for row in rows)


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
