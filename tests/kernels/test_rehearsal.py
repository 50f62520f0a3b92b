"""The GPU tests' own code, on few cases in Triton's interpreter, so that a GPU run finds faults of kernels alone."""

from __future__ import annotations

import os

import pytest

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
