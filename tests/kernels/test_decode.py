"""The decode kernel where there is no GPU: its arithmetic in Triton's interpreter, its compilation for real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def python(*args, **environment):
    """A process of its own: Triton reads its environment when it is imported."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-m", *args], env=env, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.interpreter
def test_the_kernel_agrees_with_float64_in_the_interpreter():
    pytest.importorskip("triton")
    ran = python("tests.kernels.decode_cases", TRITON_INTERPRET="1")
    assert "all cases agree" in ran.stdout, ran.stderr[-2000:]


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_the_kernel_compiles_without_spills(target):
    pytest.importorskip("triton")
    ran = python("tests.kernels.decode_compiles", target, TRITON_INTERPRET="0")
    assert "compiles, no spills" in ran.stdout, ran.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernel_agrees_with_float64_on_a_gpu():
    from tests.kernels.decode_cases import run

    run("cuda", (torch.float32, torch.float16, torch.bfloat16))
