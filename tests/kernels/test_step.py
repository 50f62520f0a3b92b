"""A decoding step's small kernels where there is no GPU, and on one."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_decode import python


@pytest.mark.interpreter
def test_the_kernels_agree_with_torch_in_the_interpreter():
    pytest.importorskip("triton")
    ran = python("tests.kernels.step_cases", TRITON_INTERPRET="1")
    assert "all cases agree" in ran.stdout, ran.stderr[-2000:]


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_the_kernels_compile_without_spills(target):
    pytest.importorskip("triton")
    ran = python("tests.kernels.step_compiles", target, TRITON_INTERPRET="0")
    assert "compile, no spills" in ran.stdout, ran.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_kernels_agree_with_torch_on_a_gpu():
    from tests.kernels.step_cases import run

    run("cuda", (torch.float32, torch.float16, torch.bfloat16))
