"""Compile the costs of keys for many queries for GPUs that are not there: no spills, and shared memory that fits."""

from __future__ import annotations

import sys

from decantkv.kernels import columns, outputs
from decantkv.kernels.blocks import padded_dim
from tests.kernels.compiles import TARGETS, VERDICT, WORDS, compiled, spilled

if __name__ == "__main__":
    target, device = TARGETS[sys.argv[1]]
    shapes = [("bf16", 128), ("fp16", 128), ("fp32", 128), ("bf16", 256), ("bf16", 64)]
    for dtype, dim in shapes if sys.argv[2:] else shapes[:1]:
        size, bd = 4 if dtype == "fp32" else 2, padded_dim(dim)
        precision = "ieee" if target.backend == "hip" else "tf32x3" if dtype == "fp32" else "tf32"
        common = {
            "G": 4, "D": dim, "DV": dim, "BD": bd, "BDV": bd, "CAPPED": False, "p_start": None, "PRECISION": precision,
        }  # fmt: skip
        cut, rows = columns.tiles(size, bd, device), outputs.output_blocks(size, bd, device)
        held = {"HELD": cut.held, "PASSING": cut.passing, "HEADS": 4, "MAX": False, "DOMINANT": columns.DOMINANT}
        types = {
            **WORDS, "p_top": "*i32",
            **dict.fromkeys(("p_factor", "p_centre", "p_vnorm", "p_vshift", "p_ptop", "p_out"), "*fp32"),
            "p_turned": "*fp32" if dtype == "fp32" else "*fp16",
        }  # fmt: skip
        kinds = {
            "cost": (
                columns.columns_kernel, {**held, "MASKED": False, "p_vnorm": None, "p_vshift": None}, cut.warps,
                cut.stages,
            ),
            "cost at the end": (columns.columns_kernel, {**held, "MASKED": True}, cut.warps, cut.stages),
            "outputs": (
                outputs.outputs_kernel,
                {"BM": rows.rows, "BN": rows.keys, "PARTS": 2, "p_sink": None, "p_top": None, "p_order": None,
                 "p_count": None}, rows.warps, rows.stages,
            ),
            "outputs without a key": (
                outputs.outputs_kernel, {"BM": rows.rows, "BN": rows.keys, "PARTS": 1, "p_sink": None}, rows.warps,
                rows.stages,
            ),
        }  # fmt: skip
        for what, (kernel, own, warps, stages) in kinds.items():
            made = compiled(kernel, target, dtype, {**common, **own}, warps=warps, stages=stages, types=types)
            used = f"{dtype} {dim} {what}: {spilled(made, target)} bytes spilled, {made.metadata.shared} shared"
            print(used, flush=True)
            assert spilled(made, target) == 0, used
            assert made.metadata.shared <= device.shared_bytes, used
    print(f"{sys.argv[1]}: every cost for many queries compiles, {VERDICT}", flush=True)
