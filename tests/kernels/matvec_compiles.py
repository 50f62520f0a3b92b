"""Compile the kernels of one token's linear layers for GPUs that are not there: no spills, wide reads, no barriers."""

from __future__ import annotations

import re
import sys

from decantkv.kernels import matvec
from tests.kernels.compiles import TARGETS, VERDICT, compiled, spilled, used

NARROW, MANY = (1000, 100), (14336, 4096)
SHAPES = (NARROW, (1024, 4096), (4096, 14336), MANY, (3584, 18944), (512, 3584))  # rows, elements of each
WIDE_READ = re.compile(r"ld\.global\S*\.v4\.b32")
STATEMENT = re.compile(r"(?:@!?%p\d+\s+)?([a-z]\S*)")
LABEL = re.compile(r"(\$L\w+):")


def loops(ptx):
    """The instructions between each label and a later jump back to it."""
    lines = [line.strip() for line in ptx.splitlines()]
    labels = {found[1]: i for i, line in enumerate(lines) if (found := LABEL.match(line))}
    for i, line in enumerate(lines):
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+)", line)
        if jump and labels[jump[1]] < i:
            yield [found[1] for x in lines[labels[jump[1]] : i] if (found := STATEMENT.match(x))]


def check_reads(ptx, rows, inner, dtype):
    """Every read of a weight takes 16 bytes a lane; nothing waits for another warp while there is more to read."""
    reads = [line for line in ptx.splitlines() if "ld.global" in line and "evict_first" in line]
    narrow = [line for line in reads if not WIDE_READ.search(line)]
    assert reads, (rows, inner, dtype)
    assert not narrow, (rows, inner, dtype, narrow[0])
    for body in loops(ptx):
        waits = [x for x in body if x.startswith(("bar.", "ld.shared", "st.shared", "stmatrix", "shfl", "cp.async"))]
        assert not waits, (rows, inner, dtype, waits)
    last_read = max(i for i, line in enumerate(ptx.splitlines()) if "ld.global" in line and "evict_first" in line)
    assert not any("bar.sync" in line for line in ptx.splitlines()[:last_read]), (rows, inner, dtype)


def check(name, kernel, constants, dtype, rows, inner):
    target, _ = TARGETS[name]
    fused = kernel is matvec.gated_kernel
    itemsize = 4 if dtype == "fp32" else 2
    tile = (matvec.gated_tile if fused else matvec.tile_of)(inner, itemsize)
    constants = {**constants, "K": inner, "BN": tile.rows, "BK": tile.elements}
    made = compiled(kernel, target, dtype, constants, warps=tile.warps)
    what = kernel.fn.__name__, rows, inner, dtype
    assert spilled(made, target) == 0, (*what, spilled(made, target))
    if target.backend == "cuda" and (rows, inner) != NARROW and kernel is not matvec.three_kernel:  # three of the same
        check_reads(made.asm["ptx"], rows, inner, dtype)
    if target.backend == "cuda" and "-v" in sys.argv:
        print(*what, tile, "bias" if "p_bias" not in constants and not fused else "", used(made, "REG"), "registers")


if __name__ == "__main__":
    name = sys.argv[1]
    for dtype, shapes in (("bf16", SHAPES), ("fp16", (MANY,)), ("fp32", (MANY,))):
        for shape in shapes:
            for constants in ({"p_bias": None}, {}):
                check(name, matvec.matvec_kernel, constants, dtype, *shape)
            check(name, matvec.gated_kernel, {}, dtype, *shape)
        for constants in (dict.fromkeys(("p_bias0", "p_bias1", "p_bias2")), {}):
            check(name, matvec.three_kernel, constants, dtype, 4096, 4096)
    print(f"{name}: every linear layer compiles, {VERDICT}", flush=True)
