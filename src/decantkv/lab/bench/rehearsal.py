"""Scoring by many queries, timed: what a chunk of a rehearsal adds to its attention in one layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from decantkv import scoring
from decantkv.kernels import columns
from decantkv.kernels.outputs import outputs
from decantkv.lab.bench import quantities
from decantkv.lab.bench.rows import Row, circumstances
from decantkv.lab.bench.score import LLAMA_8B, Geometry, timed
from decantkv.lab.bench.timing import gpu_time, scratch_bytes, wall_time
from decantkv.scoring.window import AttentionWindow

PEAKS = {"H100": 989.4e12, "H200": 989.4e12, "A100": 312e12}  # dense bf16, of the data sheets
COPIED = 8  # one row in so many copies a token: its key draws nearly all of the row's weight
GATED = 32768  # keys up to which scores are judged by the tiled implementation
UNITS = (None, "head", "block", "stream")  # None: the weight
TILES = (
    columns.Tiles(128, 64, 8, 2), columns.Tiles(128, 64, 8, 1), columns.Tiles(64, 64, 4, 3),
    columns.Tiles(64, 64, 4, 2), columns.Tiles(64, 128, 8, 2), columns.Tiles(128, 128, 8, 2),
)  # fmt: skip


def inputs(geometry: Geometry, kv_len: int, *, seed: int) -> AttentionWindow:
    """A window of many rows with W_O, a residual stream, and the output and log-sum-exp of its attention."""
    win = quantities.inputs(geometry, kv_len, seed=seed)
    q, k = win.q, win.k
    copied = torch.arange(0, geometry.window, COPIED, device=q.device)
    keys = k[:, :, copied * (kv_len - geometry.window) // geometry.window].float()
    strong = keys * (30 * geometry.head_dim**0.5 / keys.square().sum(-1, keepdim=True))
    q[:, :, copied] = strong.repeat_interleave(geometry.num_heads // geometry.num_kv_heads, 1).to(q.dtype)
    out, lse = outputs(q, k, win.v, scale=win.scale)
    return replace(win, out=out.to(q.dtype), lse=lse, stream_norm=torch.ones_like(lse[:, 0]))


def measure(
    lengths: Sequence[int], *, window: int = 2048, sweep: bool = False, seed: int = 0, geometry: Geometry = LLAMA_8B
) -> Iterator[Row]:
    """Rows per number of keys: flash attention of the same rows, then every cost, with its share of the peak.

    Args:
        window: rows of a head.
        sweep: also other cuts of the kernel.

    Raises:
        RedGateError: before any time of what is wrong is taken.
    """
    where, shape = circumstances(), dataclasses.replace(geometry, window=window)
    roof, peak = matmul_speed(), next((x for name, x in PEAKS.items() if name in where["device"]), None)
    for kv_len in lengths:
        win = inputs(shape, kv_len, seed=seed)
        base = {
            **where, "geometry": dataclasses.asdict(shape), "kv_len": kv_len, "seed": seed, "step": f"{window} rows",
            "matmul_flops_per_s": roof, "peak_flops_per_s": peak,
        }  # fmt: skip

        def row(
            name: str, call: Callable[[], object], widths: int, base: Row = base, seen: int = kv_len, **more: Any
        ) -> Row:
            """One contender; `widths`: the head widths of the products that it needs."""
            flops = 2.0 * shape.batch * shape.num_heads * window * (seen - window / 2) * widths
            times = gpu_time(call, repeats=20)
            share = flops / (times.p50 * 1e-6) / (peak or roof)
            return {
                **base, "contender": name, "timed_by": "graph replay", **timed(times, wall_time(call, repeats=10)),
                "scratch_bytes": scratch_bytes(call), "share_of_roof": share, **more,
            }  # fmt: skip

        d = shape.head_dim
        yield row("torch flash attention, all keys", partial(flash, win), 2 * d)
        yield row("outputs", partial(outputs, win.q, win.k, win.v, scale=win.scale), 2 * d)
        for unit in UNITS:
            compute = partial(cost, win, unit)
            green = quantities.check(compute(), compute(), cost(win, unit, "torch")) if kv_len <= GATED else {}
            yield row(f"cost per {unit}" if unit else "weight", compute, 2 * d if unit else d, gate=green)
        for cut in TILES if sweep else ():
            try:
                yield row(f"cost, {tuple(cut)}", partial(cost_in_tiles, win, cut), 2 * d)
            except Exception as error:  # a cut that does not fit this device is a row as well
                yield {**base, "contender": f"cost, {tuple(cut)}", "left_out": type(error).__name__}


def cost(win: AttentionWindow, unit: str | None, impl: Any = "triton") -> Tensor:
    """A unit's cost of every key, or its largest weight."""
    if unit is None:
        return scoring.compute("attention_mass", win, impl=impl, reduce="max")
    return scoring.compute("perturbation", win, impl=impl, weigh=unit)


def cost_in_tiles(win: AttentionWindow, cut: columns.Tiles) -> Tensor:
    """The plain cost by a kernel that is cut so."""
    if win.lse is None:
        raise ValueError("lse: expected log-sum-exps, got None")
    return columns.column_costs(win.q, win.k, win.v, lse=win.lse, out=win.out, scale=win.scale, tiles_=cut)


def flash(win: AttentionWindow) -> Tensor:
    """The rows' attention over all keys, those behind a row included: what torch's fastest backend takes."""
    return F.scaled_dot_product_attention(win.q, win.k, win.v, enable_gqa=True)


def matmul_speed() -> float:
    """Multiply-adds times two per second of a large bf16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    return 2 * 8192**3 / (gpu_time(lambda: a @ b, repeats=10).p50 * 1e-6)
