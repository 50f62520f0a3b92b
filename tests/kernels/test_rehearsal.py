"""The GPU tests' own code, on few cases in Triton's interpreter, so that a GPU run finds faults of kernels alone."""

from __future__ import annotations

import os

import pytest
import torch

from tests.kernels import test_gpu

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]
SMALL = {"g": 2, "w": 3, "D": 16}


@pytest.fixture(autouse=True)
def few_cases_on_the_cpu(monkeypatch):
    monkeypatch.setattr(test_gpu, "DEVICE", "cpu")
    monkeypatch.setattr(test_gpu, "CASES", 1)
    monkeypatch.setattr(test_gpu, "KINDS", [SMALL])
    monkeypatch.setattr(test_gpu, "LONGEST", 60)


def test_random_shapes(record_property):
    test_gpu.test_random_shapes_meet_the_contract(0, 1, record_property)


def test_other_quantities():
    test_gpu.test_other_quantities_meet_the_contract("alignment max", 2)


def test_paged_requests():
    test_gpu.test_paged_requests_meet_the_contract("packed heads first", 3)


def test_the_benchmark_of_other_quantities(monkeypatch):
    """Its gate and its paged set-up run for real; only the clock is made up."""
    from decantkv.lab.bench import quantities
    from decantkv.lab.bench.score import Geometry
    from decantkv.lab.bench.timing import Quantiles

    def clock(call, **options):
        call()
        return Quantiles(1.0, 2.0, 3.0)

    monkeypatch.setattr(quantities, "DEVICE", "cpu")
    monkeypatch.setattr(quantities, "HIDDEN", 24)
    monkeypatch.setattr(
        quantities, "CASES", {name: (2, *case[1:]) for name, case in quantities.CASES.items() if "DropKV" in name}
    )
    monkeypatch.setattr(quantities, "gpu_time", clock)
    monkeypatch.setattr(quantities, "wall_time", clock)
    monkeypatch.setattr(quantities, "scratch_bytes", lambda call: 5)
    geometry = Geometry("tiny", num_heads=2, num_kv_heads=1, head_dim=16, window=2)
    rows = list(quantities.measure([70], geometry=geometry))
    said = [(row["step"], row["contender"]) for row in rows]
    assert said == [
        ("DropKV by W_O", "triton"), ("DropKV by W_O", "torch"), ("score", "triton, dense"),
        ("score", "triton, paged"), ("compact", "dense gather"), ("compact", "in pages"),
    ]  # fmt: skip
    assert all(row["gpu_us"]["p50"] == 2.0 for row in rows)
    with pytest.raises(quantities.RedGateError, match="no speed"):
        quantities.check(torch.ones(3), torch.ones(3), torch.tensor([1.0, 1.0, 1.1]))


def test_the_benchmark_of_many_queries(monkeypatch):
    from decantkv.lab.bench import quantities, rehearsal
    from decantkv.lab.bench.score import Geometry
    from decantkv.lab.bench.timing import Quantiles

    monkeypatch.setattr(quantities, "DEVICE", "cpu")
    monkeypatch.setattr(quantities, "HIDDEN", 16)
    for clock in ("gpu_time", "wall_time"):
        monkeypatch.setattr(
            rehearsal, clock, lambda call, **options: Quantiles(1.0, 1.0, 1.0) if call() is not None else None
        )
    monkeypatch.setattr(rehearsal, "scratch_bytes", lambda call: 0)
    monkeypatch.setattr(rehearsal, "matmul_speed", lambda: 1e12)
    rows = list(rehearsal.measure([40], window=20, geometry=Geometry("small", 2, 1, 16)))
    assert [row["contender"] for row in rows][2:] == ["weight", "cost per head", "cost per block", "cost per stream"]
    assert all(row["gate"]["worst_over_bound"] < 1 for row in rows[2:])
    assert rows[2]["share_of_roof"] == pytest.approx(2 * 2 * 20 * 30 * 16 / 1e-6 / 1e12)
