"""Several processes on one folder: the rows of one process, its errors, and nothing done twice."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from decantkv.lab.eval import workers
from decantkv.lab.eval.cli import app
from decantkv.lab.eval.results import Store, cell_of, read_folder

GIVEN = ("--suite", "niah", "--length", "600", "--samples", "1", "--method", "dropkv,random,quantised-4bit", "--budget",
         "0.2", "--regime", "aware,agnostic")  # fmt: skip


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def answers(folder):
    rows = read_folder(folder)[1]
    return sorted(json.dumps({k: v for k, v in row.items() if k != "session"}, sort_keys=True) for row in rows)


def test_several_processes_make_the_rows_of_one(model_folder, tmp_path):
    given = ("--model", model_folder, *GIVEN)
    for folder, options in (("one", ()), ("three", ("--workers", 3))):
        done = invoke(*given, "--out", tmp_path / folder, *options)
        assert done.exit_code == 0, done.output + repr(done.exception)
    assert answers(tmp_path / "three") == answers(tmp_path / "one")
    run, rows = read_folder(tmp_path / "three")
    assert len(run["sessions"]) == 1, "workers of one run are one session"
    assert {row["session"] for row in rows} == {0}
    before = (tmp_path / "three" / "rows.jsonl").read_bytes()
    assert invoke(*given, "--out", tmp_path / "three", "--workers", 2).exit_code == 0
    assert (tmp_path / "three" / "rows.jsonl").read_bytes() == before, "what is there is not made again"


def test_two_runs_that_begin_together_measure_everything_once(model_folder, tmp_path):
    command = [sys.executable, "-m", "decantkv", "eval", "--model", str(model_folder), *GIVEN, "--out", str(tmp_path)]
    running = [subprocess.Popen([*command, "--seed", "42"], stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert invoke(*command[4:]).exit_code == 0
    rows = read_folder(tmp_path)[1]
    cells = [cell_of(row) for row in rows if row["row"] == "answer"]
    assert len(cells) == len(set(cells)) == len({cell.prompt for cell in cells}) * (1 + 2 * 3)


def test_time_that_has_run_out_leaves_the_rest_to_a_later_run(model_folder, tmp_path):
    given = ("--model", model_folder, *GIVEN, "--out", tmp_path / "out", "--workers", 2)
    stopped = invoke(*given, "--minutes", 0.0001)
    assert "expected answers of the full cache" in str(stopped.exception)
    assert "goes on from here" in stopped.stderr
    assert not answers(tmp_path / "out")
    assert invoke(*given).exit_code == 0
    assert answers(tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--length", "100000"), "length: expected at most"),
        (("--model", "/nowhere/at/all"), "model: expected a model id"),
    ],
)
def test_bad_input_is_said_as_by_one_process(model_folder, tmp_path, changed, said):
    given = {**dict(zip(GIVEN[::2], GIVEN[1::2], strict=True)), "--model": model_folder, **{changed[0]: changed[1]}}
    failed = invoke(*[x for pair in given.items() for x in pair], "--out", tmp_path / "out", "--workers", 2)
    assert isinstance(failed.exception, ValueError)
    assert said in str(failed.exception)


@pytest.mark.parametrize("workers", [0, 2])
def test_more_memory_than_there_is_is_refused(model_folder, tmp_path, workers):
    given = ("--model", model_folder, *GIVEN, "--out", tmp_path / "out", "--workers", workers)
    failed = invoke(*given, "--memory-gb", 10**6)
    assert isinstance(failed.exception, ValueError)
    assert "memory: expected at most the" in str(failed.exception)
    assert "got 1000000" in str(failed.exception)
    assert not (tmp_path / "out").exists(), "nothing was begun"


def _die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_ends_the_run(monkeypatch, model_folder, tmp_path):
    monkeypatch.setattr(workers, "_work", _die)
    failed = invoke("--model", model_folder, *GIVEN, "--out", tmp_path / "out", "--workers", 2)
    assert isinstance(failed.exception, RuntimeError)
    assert "exit code -9" in str(failed.exception)
    assert not multiprocessing.active_children()


def test_gpus_are_taken_in_turn_and_threads_shared(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert workers._places(5) == ["0", "1", "0", "1", "0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,3")
    assert workers._places(3) == ["6", "3", "6"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert workers._places(2) == ["", ""]
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    assert workers._environment("3", 5) == {"CUDA_VISIBLE_DEVICES": "3", "OMP_NUM_THREADS": "6"}


WRITER = """
import sys
from pathlib import Path
from decantkv.lab.eval.results import Store
store = Store(Path(sys.argv[1]), {"x": 1}, {"command": "shared"})
for i in range(30):
    store.begin({"command": f"{sys.argv[2]}/{i}"})
    store.append([{"row": "prompt", "prompt": f"{sys.argv[2]}/{i}/{j}", "text": "x" * 100_000} for j in range(3)])
"""


def test_processes_write_to_one_folder_in_turn(tmp_path):
    running = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "out"), str(n)], env=dict(os.environ))
        for n in range(3)
    ]
    late = 0
    while any(process.poll() is None for process in running):  # opening drops a torn line: none may be under way
        store = Store(tmp_path / "out", {"x": 1}, {"command": "shared"})
        store.append([{"row": "prompt", "prompt": f"late/{late}"}])
        store.close()
        late += 1
    assert [process.wait() for process in running] == [0, 0, 0]
    run, rows = read_folder(tmp_path / "out")
    assert len({row["prompt"] for row in rows}) == len(rows) == 3 * 30 * 3 + late
    commands = [session["command"] for session in run["sessions"]]
    assert sorted(commands) == sorted(["shared", *(f"{n}/{i}" for n in range(3) for i in range(30))])
    wrong = [
        row for row in rows if row["prompt"][:4] != "late" and not row["prompt"].startswith(commands[row["session"]])
    ]
    assert not wrong, "a row's session is the one it was begun in"
