"""Compile a step's small kernels for GPUs that are not there: no spills."""

from __future__ import annotations

import sys

from decantkv.kernels import step
from tests.kernels.compiles import TARGETS, VERDICT, compiled, spilled

APPEND = {"T": 1, "D": 128, "DV": 128, "BD": 128, "BDV": 128}
ROTATE = {"HALF": 64, "BH": 64}
NORM = {"D": 4096, "BD": 4096}

if __name__ == "__main__":
    target, _ = TARGETS[sys.argv[1]]
    cases = ((step.append_kernel, APPEND, 1), (step.rotate_kernel, ROTATE, 1), (step.norm_kernel, NORM, 8))
    for kernel, constants, warps in cases:
        for dtype in ("bf16", "fp32"):
            made = compiled(kernel, target, dtype, constants, warps=warps, fused=False)
            if sys.argv[1] == "sm90":  # sm80 has no bf16 product but a fused one with zero
                assert "fma.rn" not in made.asm["ptx"], f"{kernel.fn.__name__} {dtype} leaves a rounding out"
            assert spilled(made, target) == 0, f"{kernel.fn.__name__} {dtype} spills"
    print(f"{sys.argv[1]}: every kernel of a step compiles, {VERDICT}", flush=True)
