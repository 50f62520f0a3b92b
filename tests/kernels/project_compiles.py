"""Compile the projected norms for GPUs that are not there: no spills, and shared memory that fits."""

from __future__ import annotations

import sys

from decantkv.kernels import project
from tests.kernels.compiles import TARGETS, VERDICT, compiled, spilled

if __name__ == "__main__":
    target, device = TARGETS[sys.argv[1]]
    for dtype, dim in (("bf16", 128), ("fp16", 128), ("fp32", 128), ("bf16", 256), ("bf16", 64)):
        keys, columns, stages = project.blocks(4 if dtype == "fp32" else 2, dim)
        constants = {"G": 4, "DV": dim, "E": 4096, "BDV": dim, "BN": keys, "BE": columns}
        precision = "ieee" if target.backend == "hip" else "tf32x3" if dtype == "fp32" else "tf32"
        made = compiled(
            project.project_kernel, target, dtype, {**constants, "PRECISION": precision}, warps=4, stages=stages
        )
        assert spilled(made, target) == 0, f"{dtype} {constants} spills {spilled(made, target)}"
        assert made.metadata.shared <= device.shared_bytes, f"{dtype} {constants} takes {made.metadata.shared} bytes"
    print(f"{sys.argv[1]}: every projected norm compiles, {VERDICT}", flush=True)
