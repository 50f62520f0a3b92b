"""The benchmark's gate: it can tell right from wrong, and a wrong kernel's speed is never printed."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from decantkv.base import json_lines
from decantkv.lab.bench import cli, gate, score
from decantkv.scoring import reference
from tests.kernels.windows import widened, window


def test_the_gate_tells_right_from_wrong():
    win = window(3, B=2, N=90, D=16, sink=12, lengths=torch.tensor([90, 40]))
    right = reference.perturbation(widened(win)).float()
    assert gate.worst_error(right, win) <= 1
    assert gate.worst_error(right * 1.02, win) > 1
    lost = right.clone()
    lost[:, :, 30] = 0  # a sink that is thought to cost nothing
    assert gate.worst_error(lost, win) > 1
    assert gate.worst_error(torch.full_like(right, float("nan")), win) == float("inf")


def test_floors_are_of_memory_or_of_arithmetic():
    pytest.importorskip("decantkv.kernels.launch")
    from decantkv.lab.bench.floors import SHAPES

    floors = {(shape.name, shape.kv_len): shape.floor_us for shape in SHAPES}
    assert floors["Llama-3.1-8B", 131072] == pytest.approx(244, abs=0.1)  # 2 passes of 537 MB at 4.4 TB/s
    assert floors["Llama-3.1-8B, w 64", 32768] == pytest.approx(98.2, abs=0.1)  # 68.7 GFLOP at 700 TFLOP/s


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_red_gate_prints_no_speed(monkeypatch, tmp_path, options):
    def measure(*args, **kw):
        raise gate.RedGateError("no speed is reported: worst_over_contract = 7.0")
        yield

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(score, "measure", measure)
    out = tmp_path / "rows.jsonl"
    result = CliRunner().invoke(cli.app, ["score", "--out", str(out), *options])
    assert result.exit_code == 1
    assert "µs" not in result.stdout
    assert not out.exists()


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(cli.app, ["score"])
    assert isinstance(result.exception, ValueError)
    assert "expected a CUDA device" in str(result.exception)


def test_lengths_are_checked():
    assert cli.parsed("4096,64") == [4096, 64]
    with pytest.raises(ValueError, match="lengths: expected"):
        cli.parsed("4k")


def test_a_picture_is_drawn_from_rows_alone(tmp_path):
    pytest.importorskip("matplotlib")
    base = {
        "geometry": {"name": "x", "num_kv_heads": 8, "head_dim": 128, "window": 8},
        "device": "a GPU",
        "step": "score",
    }
    made = [
        {**base, "kv_len": n, "contender": "triton", "gpu_us": {"p50": n / 1e3}, "roof_bytes_per_s": 4e12}
        for n in (4096, 8192)
    ]
    json_lines.write(tmp_path / "rows.jsonl", made)
    assert json_lines.read(tmp_path / "rows.jsonl") == json.loads(json.dumps(made))
    result = CliRunner().invoke(cli.app, ["plot", str(tmp_path / "rows.jsonl"), str(tmp_path / "plot.png")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plot.png").stat().st_size > 1000
