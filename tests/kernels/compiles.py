"""Compile the kernels for GPUs that are not there: no spills, and shared memory that fits.

A program of its own: Triton cannot compile where its interpreter is on.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from decantkv.kernels import attend, move, pull, score, select, weigh
from decantkv.kernels.blocks import (
    Device,
    attend_blocks,
    padded_dim,
    padded_rows,
    power_of_two,
    row_tile,
    score_blocks,
)
from decantkv.kernels.launch import CHUNK_BLOCK, JOIN_BLOCK, Task
from decantkv.kernels.weigh import norm_cut

TARGETS = {
    "sm80": (GPUTarget("cuda", 80, 32), Device("cuda", 108, 166912)),
    "sm90": (GPUTarget("cuda", 90, 32), Device("cuda", 132, 232448, warpgroups=True)),
    "sm100": (GPUTarget("cuda", 100, 32), Device("cuda", 148, 232448)),
    "sm120": (GPUTarget("cuda", 120, 32), Device("cuda", 170, 101376)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), Device("hip", 304, 65536)),
}
WORDS = {
    **dict.fromkeys(("p_part", "p_rows", "p_lse", "p_mass", "p_score", "p_token", "p_cost", "p_sink"), "*fp32"),
    **dict.fromkeys(("p_metric", "p_norm", "p_unit"), "*fp32"),
    **dict.fromkeys(("p_start", "p_starts", "p_lens", "p_index", "p_need", "p_first"), "*i64"),
    **dict.fromkeys(("p_order", "p_bins", "p_count", "p_table", "p_lengths"), "*i32"),
    "p_forced": "*i1",
}
# here ptxas puts a few bytes of state on the stack, often below a number of registers it chose itself (64, 128)
STATE = {"attend, no values": 8, "pull": 8, "chunk alignment": 16, "attend, paged": 8}
# float32 dots are three tf32 dots of split operands; no cut of these that was tried (rows, keys, warps, stages) is free
WIDE = {"alignment": 32, "chunk alignment": 96}
ALLOWED_STACK = {
    # Hopper's one-pass kernel on the default shape trades this much stack (bytes a thread) for 10 % of its time
    ("sm90", "one pass", "bf16", 128): 96,
    ("sm90", "one pass", "bf16", 96): 96,
    # with left pads, and without
    ("sm100", "score", "bf16", 96): 24,
    ("sm100", "attend", "bf16", 64): 8,
}
DEFAULT = {"rows": 32, "g": 4, "dim": 128, "dtype": "bf16"}
TASKS = {
    "score": Task(),
    "one pass": Task(),
    "mass": Task("attention_mass"),
    "pooled mass": Task("attention_mass", "max", "avg", 5),
    "alignment": Task("alignment"),
    "chunk alignment": Task("chunk_alignment", "sum", "max", 7),
    "output": Task(projected=True),
}
FULL = (
    {}, {"rows": 64, "g": 1}, {"rows": 128}, {"dim": 256}, {"dtype": "fp16"}, {"dtype": "fp32"},
    {"dim": 96, "pads": True}, {"dim": 64}, {"rows": 16, "g": 1},
)  # fmt: skip


def compiled(kernel, target, dtype, constants, *, warps, stages=1, fused=True, types=WORDS):
    names = kernel.arg_names
    signature = {
        name: "constexpr" if name in constants
        else types.get(name, f"*{dtype}") if name.startswith("p_")
        else "fp32" if name in ("scale", "cap2", "eps") else "i32"
        for name in names
    }  # fmt: skip
    aligned = [n for n in names if n not in constants and (n.startswith("p_") or (len(n) == 3 and n[0] == "s"))]
    source = ASTSource(
        fn=kernel, signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )  # fmt: skip
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fused}
    return triton.compile(source, target=target, options=options)


JUDGED = triton.__version__.startswith(("3.6.", "3.9."))  # blocks were chosen for these: the measurements', the newest
VERDICT = "no spills" if JUDGED else f"spills not judged with Triton {triton.__version__}"


def spilled(kernel, target):
    """Bytes of stack a thread: where ptxas puts registers it ran out of. On AMD the assembler counts them.

    0 where spills are not judged: they cost time, and nobody measured there. `VERDICT` says so.
    """
    if not JUDGED:
        return 0
    if target.backend == "hip":
        notes = [line for line in kernel.asm["amdgcn"].splitlines() if ".vgpr_spill_count:" in line]
        return int(notes[0].split(":")[1])
    return used(kernel, "STACK")


def used(kernel, resource):
    """What ptxas gave a kernel for NVIDIA of a resource, such as REG a thread."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(usage.split(f"{resource}:")[1].split()[0])


def scoring(name, *, rows=32, g=4, dim=128, dtype="bf16", pads=False, page=0, only=None):
    """(what, kernel) of the scoring kernels on one shape, or of `only` those named."""
    return (
        (what, make()) for what, make in kernels(name, rows, g, dim, dtype, pads, page) if only is None or what in only
    )


def kernels(name, rows, g, dim, dtype, pads, page):
    """(what, how to compile it)."""
    target, device = TARGETS[name]
    itemsize, bf16 = (4 if dtype == "fp32" else 2), dtype == "bf16"
    tile = row_tile(dim, dim, itemsize, device)
    held = padded_rows(rows, tile)
    shared = {"G": g, "W": rows // g, "D": dim, "DV": dim, "ROWS": held, "BD": padded_dim(dim), "BDV": padded_dim(dim),
              "PADDED": pads, "CAPPED": False, "PARTS": 2 if bf16 else 1, "PAGE": page,
              "PRECISION": "ieee" if device.backend == "hip" else "tf32x3" if dtype == "fp32" else "tf32"}  # fmt: skip
    if not pads:
        shared["p_start"] = None
    if not page:
        shared |= {"p_table": None, "p_lengths": None}
    cut = attend_blocks(rows, dim, dim, itemsize, device, bf16=bf16)
    options = {"warps": cut.warps, "stages": cut.stages}
    attending = {**shared, "BM": cut.rows, "BN": cut.keys, "ROWS_FIRST": cut.rows_first}
    for values in (True, False):
        yield (
            "attend" if values else "attend, no values",
            partial(compiled, attend.attend_kernel, target, dtype, {**attending, "VALUES": values}, **options),
        )
    cut = attend_blocks(rows, dim, dim, itemsize, device, bf16=bf16, keys_first=True)
    options = {"warps": cut.warps, "stages": cut.stages}
    pulling = {
        **shared,
        "BM": cut.rows,
        "BN": cut.keys,
        "RW": padded_dim(dim),
        "POOL": score.MAX_POOL,
        "KERNEL": 7,
        "FIRST": 4,
    }
    yield "pull", partial(compiled, pull.pull_kernel, target, dtype, pulling, **options)
    norms = norm_cut(itemsize, dim, 4096, 32, device)
    options = {"warps": norms.blocks.warps, "stages": norms.blocks.stages}
    norms = {
        "G": g,
        "DV": dim,
        "BN": norms.blocks.keys,
        **norms.constants,
        "PRECISION": shared["PRECISION"],
        "PAGE": page,
    }
    if not page:
        norms |= {"p_table": None, "p_lengths": None}
    yield "norms", partial(compiled, weigh.norm_kernel, target, dtype, norms, **options)
    for what, task in TASKS.items():
        one_pass = what == "one pass"
        if one_pass and (held > tile or page):
            continue
        more = task.holds_more(dim, itemsize)
        cut = score_blocks(
            rows, dim, dim, itemsize, device, bf16=bf16, one_pass=one_pass, more=more, projected=task.projected
        )
        constants = {
            **shared, "BM": cut.rows, "BN": cut.keys, "RW": 0 if task.kind == score.MASS else padded_dim(dim),
            "QUANTITY": task.kind, "MAX": task.reduce == "max", "POOL": task.pool, "KERNEL": task.kernel_size,
            "ONE_PASS": one_pass, "A_PARTS": 1 if one_pass or dtype == "fp32" else 2,
            "APART": cut.apart and held > cut.rows,
        }  # fmt: skip
        if what != "output":
            constants |= {"p_norm": None, "p_unit": None}
        options = {"warps": cut.warps, "stages": cut.stages}
        yield what, partial(compiled, score.score_kernel, target, dtype, constants, **options)


def others(name):
    """(what, kernel) of the rest."""
    target, _ = TARGETS[name]
    rows = {"G": 4, "W": 8, "DV": 128, "ROWS": 32, "BDV": 128, "BS": 64, "CHUNK": 64, "SINK": False, "p_sink": None}
    dense = {"PAGE": 0, "p_table": None}
    merging = {**rows, **dense, "VALUES": True, "RW": 128, "METRIC": False, "p_metric": None}
    yield "merge", compiled(attend.merge_kernel, target, "bf16", merging, warps=4)
    joining = {"TILES": 4, "G": 4, "MAX": False, "BN": JOIN_BLOCK}
    yield "join tiles", compiled(score.join_tiles_kernel, target, "bf16", joining, warps=4)
    merging = {**rows, **dense, "VALUES": True, "RW": 128, "METRIC": True}
    yield "merge behind W_O", compiled(attend.merge_kernel, target, "bf16", merging, warps=4)
    merging = {**rows, "VALUES": True, "RW": 128, "METRIC": False, "p_metric": None, "PAGE": 16}
    squaring = {"DV": 128, "BDV": 128, "WIDTH": weigh.METRIC_WIDTH, "BE": weigh.METRIC_BLOCK, "PRECISION": "tf32"}
    yield "metric", compiled(weigh.metric_kernel, target, "bf16", squaring, warps=8, stages=2)
    yield "merge, paged", compiled(attend.merge_kernel, target, "bf16", merging, warps=4)
    summing = {"W": 8, "CHUNK": 4, "PADDED": True, "BN": CHUNK_BLOCK, "PAGE": 0, "p_lengths": None}
    yield "chunk sum", compiled(pull.chunk_sum_kernel, target, "bf16", summing, warps=4)
    yield "dominant cost", compiled(score.dominant_cost_kernel, target, "bf16", rows, warps=8)
    add = {"G": 4, "ROWS": 32, "BM": 32, "MAX": False}
    yield "add dominant", compiled(score.add_dominant_kernel, target, "bf16", add, warps=1)
    pooling = {"POOL": 1, "KERNEL": 11, "FORCED": False, "p_forced": None, "PADDED": True}
    yield (
        "select row",
        compiled(select.select_row_kernel, target, "fp32", {**pooling, "PER_ROW": True, "BN": 4096}, warps=16),
    )
    chunk = {"BN": 4096}
    yield "order", compiled(select.order_kernel, target, "fp32", {**pooling, **chunk}, warps=8)
    each = {"PADDED": True, "PER_ROW": True, **chunk}
    yield "digit", compiled(select.digit_kernel, target, "fp32", {**each, "DIGIT": 2}, warps=8)
    yield "count", compiled(select.count_kernel, target, "fp32", each, warps=8)
    yield "compact", compiled(select.compact_kernel, target, "fp32", {**each, "BC": power_of_two(33)}, warps=8)
    gather = {"D": 128, "DV": 128, "BD": 128, "BDV": 128, "BK": 32}
    moving = {"D": 128, "DV": 128, "BE": 16, "BK": 1024, "PAGE": 16, "PER_ROW": False, "p_count": None}
    yield "move", compiled(move.compact_paged_kernel, target, "bf16", moving, warps=8)
    yield "gather", compiled(select.gather_kernel, target, "bf16", gather, warps=4)


def check(name, what, kernel, shape):
    target, device = TARGETS[name]
    assert kernel.metadata.shared <= device.shared_bytes, (name, what, shape, kernel.metadata.shared)
    allowed = ALLOWED_STACK.get((name, what, shape.get("dtype"), shape.get("dim")), STATE.get(what, 0))
    if shape.get("dtype") == "fp32":
        allowed = WIDE.get(what, allowed)
    assert spilled(kernel, target) <= allowed, (name, what, shape, spilled(kernel, target))


def main(names, *, full):
    for name in names:
        for change in FULL if full else FULL[:1]:
            # without --full DropKV's own score on every target, the other quantities on one of each kind
            only = None if full or name in ("sm90", "gfx942") else ("attend", "score", "one pass")
            for what, kernel in scoring(name, only=only, **change):
                check(name, what, kernel, {**DEFAULT, **change})
        if only is None:
            for what, kernel in scoring(name, page=16, only=None if full else ("attend", "score")):
                check(name, f"{what}, paged", kernel, {**DEFAULT, "page": 16})
        for what, kernel in others(name):
            check(name, what, kernel, {})
        print(f"{name}: compiles, {VERDICT}", flush=True)


if __name__ == "__main__":
    chosen = [name for name in sys.argv[1:] if name != "--full"]
    main(chosen or list(TARGETS), full="--full" in sys.argv)
