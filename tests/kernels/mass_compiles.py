"""Compile the sums of a prompt's attention for GPUs that are not there: no spills, and shared memory that fits."""

from __future__ import annotations

import sys

from decantkv.kernels import mass
from decantkv.kernels.blocks import padded_dim
from tests.kernels.compiles import TARGETS, VERDICT, compiled, spilled

if __name__ == "__main__":
    target, device = TARGETS[sys.argv[1]]
    for dtype, dim in (("bf16", 128), ("fp16", 128), ("fp32", 128), ("bf16", 256), ("bf16", 64)):
        size = 4 if dtype == "fp32" else 2
        precision = "ieee" if target.backend == "hip" else "tf32x3" if dtype == "fp32" else "tf32"
        constants = {
            "G": 4, "D": dim, "BD": padded_dim(dim), "CAPPED": False, "p_start": None, "PRECISION": precision,
        }  # fmt: skip
        for kernel, cut, absent in (
            (mass.denominators_kernel, mass.tiles(size, dim, device), {"p_sink": None}),
            (mass.columns_kernel, mass.column_tiles(size, dim, device), {}),
        ):
            own = {**constants, **absent, "HELD": cut.held, "PASSING": cut.passing}
            made = compiled(kernel, target, dtype, own, warps=cut.warps, stages=cut.stages)
            assert spilled(made, target) == 0, f"{dtype} {dim} {kernel} spills {spilled(made, target)}"
            assert made.metadata.shared <= device.shared_bytes, f"{dtype} {dim} takes {made.metadata.shared} bytes"
    print(f"{sys.argv[1]}: every sum of a prompt's attention compiles, {VERDICT}", flush=True)
