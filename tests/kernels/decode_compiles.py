"""Compile the decode kernel for GPUs that are not there: no spills, and shared memory that fits."""

from __future__ import annotations

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from decantkv.kernels.blocks import Device, padded_dim
from decantkv.kernels.decode import JOIN, decode_blocks, decode_kernel
from tests.kernels.compiles import VERDICT, spilled

TARGETS = {
    "sm80": (GPUTarget("cuda", 80, 32), Device("cuda", 108, 166912)),
    "sm90": (GPUTarget("cuda", 90, 32), Device("cuda", 132, 232448)),
    "sm100": (GPUTarget("cuda", 100, 32), Device("cuda", 148, 232448)),
    "sm120": (GPUTarget("cuda", 120, 32), Device("cuda", 170, 101376)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Device("hip", 304, 65536)),
}
POINTERS = {"p_start": "*i64", "p_lens": "*i64", "p_lane": "*i32", "p_place": "*i32", "p_counter": "*i32",
            "p_part": "*fp32", "p_state": "*fp32"}  # fmt: skip


def compiled(target, device, dim, dtype, rows, *, new=1, itemsize=2, chunk=512):
    cut = decode_blocks(rows, dim, dim, itemsize, chunk, device)
    constants = {
        "p_sink": None, "G": rows // new, "T": new, "JOIN": JOIN, "TILES": 1, "D": dim, "DV": dim,
        "BD": padded_dim(dim), "BDV": padded_dim(dim), "BM": rows, "BN": cut.keys, "CAPPED": False, "SINK": False,
        "PRECISION": "tf32x3" if dtype == "fp32" and device.backend == "cuda" else "ieee",
    }  # fmt: skip
    names = decode_kernel.arg_names
    signature = {
        name: "constexpr" if name in constants
        else POINTERS.get(name, f"*{dtype}") if name.startswith("p_")
        else "fp32" if name in ("factor", "cap2") else "i32"
        for name in names
    }  # fmt: skip
    aligned = [n for n in names if n.startswith("p_") and n not in constants] + ["s_qb", "s_qh", "chunk"]
    source = ASTSource(
        fn=decode_kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=target, options={"num_warps": cut.warps, "num_stages": cut.stages})


def main(names):
    for name in names:
        target, device = TARGETS[name]
        for dim, dtype, rows, new, itemsize in (
            (128, "bf16", 16, 1, 2), (64, "bf16", 16, 1, 2), (128, "bf16", 64, 16, 2), (256, "fp16", 16, 1, 2),
            (80, "fp32", 16, 1, 4),
        ):  # fmt: skip
            for chunk in (512, 2048):
                kernel = compiled(target, device, dim, dtype, rows, new=new, itemsize=itemsize, chunk=chunk)
                assert kernel.metadata.shared <= device.shared_bytes, (name, dim, dtype, rows, kernel.metadata.shared)
                assert spilled(kernel, target) == 0, (name, dim, dtype, rows)
        print(f"{name}: decode kernel compiles, {VERDICT}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or list(TARGETS))
