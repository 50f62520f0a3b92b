"""A decoding step's kernels: their arithmetic in Triton's interpreter and on a GPU, their compilation for several."""

from __future__ import annotations

import importlib
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


KERNELS = pytest.mark.parametrize("kernels", ["decode", "step", "matvec", "project", "mass", "columns"])


@KERNELS
@pytest.mark.interpreter
def test_they_agree_with_their_definition_in_the_interpreter(kernels):
    pytest.importorskip("triton")
    ran = python(f"tests.kernels.{kernels}_cases", TRITON_INTERPRET="1")
    assert "all cases agree" in ran.stdout, ran.stderr[-2000:]


@KERNELS
@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_they_compile_without_spills(target, kernels):
    pytest.importorskip("triton")
    ran = python(f"tests.kernels.{kernels}_compiles", target, TRITON_INTERPRET="0")
    if "not judged" in ran.stdout:
        pytest.skip(ran.stdout.splitlines()[-1])
    assert "compiles, no spills" in ran.stdout, ran.stderr[-2000:]


@KERNELS
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_they_agree_with_their_definition_on_a_gpu(kernels):
    cases = importlib.import_module(f"tests.kernels.{kernels}_cases")
    cases.run("cuda", (torch.float32, torch.float16, torch.bfloat16))
