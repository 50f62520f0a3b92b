"""vLLM's bench without an engine: what it asks for, and how steps become numbers."""

from __future__ import annotations

import fcntl
import importlib.util
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from decantkv.lab.bench.vllm import Load, expected_seconds
from decantkv.lab.bench.vllm_engine import Step, holding, summary, watching

LOAD = Load("llama-3.1-8b", length=32768, tokens=192, requests=8, together=4, pool=49152)


def test_decoding_is_told_apart_from_reading_prompts():
    steps = [Step(2.0, 100, 0, 1), Step(3.0, 100, 1, 2), Step(0.5, 0, 2, 2), Step(0.25, 0, 2, 2)]
    found = summary(steps, seconds=6.0, tokens=6)
    assert found["tokens_a_second"] == 1.0
    assert found["decoding"] == {"steps": 2, "seconds": 0.75, "tokens": 4, "tokens_a_second": 4 / 0.75}
    assert found["reading"] == {"steps": 2, "seconds": 5.0, "prompt_tokens": 200}
    assert found["running"] == 2


def test_steps_are_noted_when_their_results_come():
    asked = []

    class Scheduler:
        running = ("a", "b")

        def update_from_output(self, scheduled, output):
            asked.append(output)
            time.sleep(0.01)
            return output

    scheduler = Scheduler()
    with watching(scheduler) as steps:
        for sizes in ({"a": 7, "b": 1}, {}, {"a": 1, "b": 1}):
            assert scheduler.update_from_output(SimpleNamespace(num_scheduled_tokens=sizes), "out") == "out"
    assert [(step.read, step.answered, step.running) for step in steps] == [(7, 1, 2), (0, 2, 2)]
    assert all(step.seconds >= 0.01 for step in steps)
    scheduler.update_from_output(None, "after")
    assert asked == ["out", "out", "out", "after"]
    assert len(steps) == 2


def test_nobody_is_timed_while_another_starts(tmp_path):
    path = str(tmp_path / "lock")
    other = (
        "import fcntl, sys; from decantkv.lab.bench.vllm_engine import holding\n"
        "with holding(sys.argv[1], fcntl.LOCK_SH): print('in', flush=True); sys.stdin.readline()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", other, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "in\n"
    with holding(path, fcntl.LOCK_SH):
        pass
    with open(path) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    process.communicate("\n", timeout=10)
    with holding(path, fcntl.LOCK_EX):
        pass


def test_engines_side_by_side_take_only_the_pool_they_name(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    asked = LOAD.engine(0.05)
    assert asked["kv_cache_memory_bytes"] == 49152 * 2 * 2 * 32 * 8 * 128  # keys and values of two bytes
    assert asked["num_gpu_blocks_override"] == 3072
    assert asked["max_model_len"] <= LOAD.pool
    assert asked["additional_config"] == {"decantkv": {"budget": 0.05, "strict": True}}
    assert LOAD.engine(None)["additional_config"] == {}


def test_what_it_costs_is_told_beforehand():
    stock, kept = (expected_seconds(LOAD, budget, 4) for budget in (None, 0.05))
    assert stock["timed"] == pytest.approx(14 * 1.35 + 9 * 1.92)  # one request fits at a time
    assert kept["timed"] == pytest.approx(14 * 1.35 + 2 * 1.92)  # all eight
    assert expected_seconds(Load("tiny", 100, 10, 2, 2, 4096), None, 4) is None


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_without_vllm_it_says_so():
    from typer.testing import CliRunner

    from decantkv.lab.bench.cli import app

    result = CliRunner().invoke(app, ["vllm", "--shape", "tiny"])
    assert str(result.exception) == "vllm: expected it installed (pip install 'decantkv[vllm]'), got none"
