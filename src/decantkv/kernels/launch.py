"""Launching the scoring kernels: scratch, grids, and what each dtype needs."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from decantkv.kernels.attend import attend_kernel, merge_kernel
from decantkv.kernels.blocks import (
    Blocks,
    Device,
    attend_blocks,
    padded_dim,
    padded_rows,
    power_of_two,
    row_tile,
    score_blocks,
    split_keys,
)
from decantkv.kernels.launcher import Launch, address, aligned, current_stream, on_device
from decantkv.kernels.primitives import INTERPRETED, LOG2E
from decantkv.kernels.score import MASS, PERTURBATION, add_dominant_kernel, dominant_cost_kernel, score_kernel

QUANTITIES = {"perturbation": PERTURBATION, "attention_mass": MASS}
MERGE_CHUNK = 64  # splits a step of the merge reads at once
MAX_DIM = 256


class Plan(NamedTuple):
    """What a launch is cut by; tests and the benchmark replace it."""

    attend: Blocks
    score: Blocks
    keys_per_split: int
    splits: int


@functools.cache
def device_of(device: torch.device) -> Device:
    """The device class behind a torch device; the interpreter stands for a small one."""
    if INTERPRETED or device.type != "cuda":
        return Device("cpu", 2, 1 << 20)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 65536)
    if torch.version.hip:
        return Device("hip", properties.multi_processor_count, shared)
    return Device("cuda", properties.multi_processor_count, shared, warpgroups=properties.major == 9)


@functools.lru_cache(maxsize=1024)
def plan(
    rows: int, dim: int, v_dim: int, dtype: torch.dtype, n_keys: int, groups: int, device: Device, one_pass: bool
) -> Plan:
    """Blocks and splits for `rows` = g·w rows, `groups` = B·H."""
    bf16 = dtype == torch.bfloat16
    a = attend_blocks(rows, dim, v_dim, dtype.itemsize, device, bf16=bf16)
    b = score_blocks(rows, dim, v_dim, dtype.itemsize, device, bf16=bf16, one_pass=one_pass)
    tiles = padded_rows(rows, a.rows) // a.rows
    keys, splits = split_keys(n_keys, groups * tiles, max(a.keys, b.keys), device)
    return Plan(a, b, keys, splits)


def precision_of(dtype: torch.dtype, device: Device) -> str:
    """How a dot treats float32 operands: full precision from three tf32 products where the device has them."""
    if device.backend != "cuda":
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"  # float16 widened beside weights: tf32 holds it exactly


@dataclass(frozen=True)
class Prepared:
    """All of a call that only depends on shapes, strides, dtypes and options; a prompt's layers share it."""

    plan: Plan
    one_pass: bool
    values: bool
    groups: int
    rows: int
    part_words: int
    row_words: int
    scalars: tuple[int | float, ...]
    strides: tuple[int, ...]
    attend: Launch
    merge: Launch
    score: Launch
    dominant_cost: Launch
    add_dominant: Launch


_prepared: dict[Hashable, Prepared] = {}
_PREPARED_LIMIT = 4096


def launch_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    start: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    quantity: str = "perturbation",
    reduce: str = "sum",
    plan_: Plan | None = None,
) -> Tensor:
    """Run the kernels; arguments as in `decantkv.kernels.window_scores`, already checked."""
    if q.stride(3) != 1:
        q = q.contiguous()
    if lse is None or (out is None and quantity == "perturbation"):
        out = lse = None
    elif out is not None:
        out = out if out.dtype == v.dtype and out.stride(3) == 1 else out.to(v.dtype).contiguous()
    lse = lse.contiguous() if lse is not None else None
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), k.dtype, k.device,
        None if out is None else out.stride(), None if lse is None else lse.dtype,
        None if start is None else start.dtype, None if sink_logits is None else sink_logits.dtype,
        softcap, scale, quantity, reduce, plan_, aligned(q, k, v, out, lse, start, sink_logits),
    )  # fmt: skip
    known = _prepared.get(key)
    if known is None:
        if len(_prepared) >= _PREPARED_LIMIT:
            _prepared.clear()
        known = _prepared[key] = _prepare(q, k, v, scale, start, softcap, sink_logits, lse, quantity, reduce, plan_)
    with on_device(k.device):
        return _run(known, q, k, v, start, sink_logits, out, lse)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    start: Tensor | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    lse: Tensor | None,
    quantity: str,
    reduce: str,
    plan_: Plan | None,
) -> Prepared:
    batch, heads, n_keys, dim = k.shape
    v_dim, window = v.shape[3], q.shape[2]
    group, groups = q.shape[1] // heads, batch * heads
    rows = group * window
    device = device_of(k.device)
    tile = row_tile(dim, v_dim, k.element_size(), device)
    padded, bd, bdv = padded_rows(rows, tile), padded_dim(dim), padded_dim(v_dim)
    values = quantity != "attention_mass"
    # beyond one row tile the rescue of dominant keys has no registers left: the kernels then make their own output
    one_pass = lse is not None and (not values or padded <= tile)
    chosen = plan_ or plan(rows, dim, v_dim, k.dtype, n_keys, groups, device, one_pass)
    splits = chosen.splits
    factor, cap2 = (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)
    width = bdv if values else 0
    shape = {"G": group, "W": window}
    blocks = {"D": dim, "DV": v_dim, "ROWS": padded}
    modes = {"PADDED": start is not None, "CAPPED": softcap is not None}
    numbers = {
        "PARTS": 2 if k.dtype == torch.bfloat16 else 1,
        "PRECISION": precision_of(k.dtype, device),
    }
    merging = {
        **shape, "DV": v_dim, "ROWS": padded, "BDV": bdv,
        "BS": power_of_two(splits), "CHUNK": min(MERGE_CHUNK, power_of_two(splits)), "SINK": sink_logits is not None,
    }  # fmt: skip
    tiles = {"BD": bd, "BDV": bdv, **modes}
    scratch = not one_pass or values
    return Prepared(
        plan=chosen,
        one_pass=one_pass,
        values=values,
        groups=groups,
        rows=padded,
        part_words=groups * splits * padded * (width + (4 if not one_pass else 2)) if scratch else 0,
        row_words=groups * padded * (width + 3 if not one_pass else 2) if scratch else 16,
        scalars=(n_keys, chosen.keys_per_split, splits, factor, cap2),
        strides=(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        attend=Launch(
            attend_kernel,
            {
                **shape, **blocks, "BM": chosen.attend.rows, "BN": chosen.attend.keys, **tiles,
                "VALUES": values, **numbers,
            },
            warps=chosen.attend.warps, stages=chosen.attend.stages,
        ),
        merge=Launch(merge_kernel, {**merging, "VALUES": values}, warps=4),
        score=Launch(
            score_kernel,
            {
                **shape, **blocks, "BM": chosen.score.rows, "BN": chosen.score.keys, **tiles,
                "QUANTITY": QUANTITIES[quantity], "MAX": reduce == "max", "ONE_PASS": one_pass,
                "A_PARTS": 1 if one_pass or k.dtype == torch.float32 else 2, **numbers,
            },
            warps=chosen.score.warps, stages=chosen.score.stages,
        ),
        dominant_cost=Launch(dominant_cost_kernel, merging, warps=8),
        add_dominant=Launch(
            add_dominant_kernel,
            {"G": group, "ROWS": padded, "BM": power_of_two(padded), "MAX": reduce == "max"},
            warps=1,
        ),
    )  # fmt: skip


def _run(
    p: Prepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    sink_logits: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> Tensor:
    heads, splits = k.shape[1], p.plan.splits
    strides_v = p.strides[6:]
    stream = current_stream(k.device)
    scores = torch.empty(k.shape[:3], dtype=torch.float32, device=k.device)
    scratch = torch.empty(p.part_words + p.row_words, dtype=torch.float32, device=k.device)
    strides_out = v.stride()[:3] if out is None else out.stride()[:3]
    at: tuple[Any, ...]
    if p.score.ready and (p.one_pass or p.merge.ready) and (not p.one_pass or not p.values or p.add_dominant.ready):
        base = scratch.data_ptr()
        at = (
            *map(address, (q, k, v, start, sink_logits, out, lse, scores)),
            base,
            base + 4 * p.part_words,
        )
    else:
        at = (q, k, v, start, sink_logits, out, lse, scores, scratch, scratch[p.part_words :])
    p_q, p_k, p_v, p_start, p_sink, p_out, p_lse, p_scores, p_part, p_rows = at
    if not p.one_pass:
        p_out, p_lse = p_v, p_rows
        p.attend(
            (splits * (p.rows // p.plan.attend.rows), p.groups, 1), stream,
            p_q, p_k, p_v, p_part, p_start, *p.scalars, *p.strides, heads,
        )  # fmt: skip
        p.merge((p.rows, p.groups, 1), stream, p_v, p_part, p_sink, p_rows, splits, *strides_v, heads)
    p.score(
        (splits, p.groups, 1), stream,
        p_q, p_k, p_v, p_v if p_out is None else p_out, p_lse, p_rows, p_scores, p_part, p_start,
        *p.scalars, *p.strides, *strides_out, heads,
    )  # fmt: skip
    if p.one_pass and p.values:
        p.dominant_cost((p.rows, p.groups, 1), stream, p_v, p_part, p_lse, p_sink, p_rows, splits, *strides_v, heads)
        p.add_dominant((p.groups, 1, 1), stream, p_scores, p_rows, k.shape[2])
    return scores
