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
from decantkv.kernels.launcher import Launcher, aligned, on_device
from decantkv.kernels.primitives import INTERPRETED, LOG2E
from decantkv.kernels.score import MASS, PERTURBATION, add_dominant_kernel, dominant_cost_kernel, score_kernel

QUANTITIES = {"perturbation": PERTURBATION, "attention_mass": MASS}
MERGE_CHUNK = 64  # splits a step of the merge reads at once
MAX_DIM = 256

attend = Launcher(attend_kernel)
merge = Launcher(merge_kernel)
score = Launcher(score_kernel)
dominant_cost = Launcher(dominant_cost_kernel)
add_dominant = Launcher(add_dominant_kernel)


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
    return Device("hip" if torch.version.hip else "cuda", properties.multi_processor_count, shared)


@functools.lru_cache(maxsize=1024)
def plan(
    rows: int, dim: int, v_dim: int, itemsize: int, n_keys: int, groups: int, device: Device, one_pass: bool
) -> Plan:
    """Blocks and splits for `rows` = g·w rows, `groups` = B·H."""
    a = attend_blocks(rows, dim, v_dim, itemsize, device)
    b = score_blocks(rows, dim, v_dim, itemsize, device, one_pass=one_pass)
    tiles = padded_rows(rows, a.rows) // a.rows
    keys, splits = split_keys(n_keys, groups * tiles, max(a.keys, b.keys), device)
    return Plan(a, b, keys, splits)


def precision_of(dtype: torch.dtype, device: Device) -> str:
    """How a dot treats float32 operands: full precision from three tf32 products where the device has them."""
    if device.backend != "cuda":
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"  # float16 widened beside weights: tf32 holds it exactly


@dataclass(frozen=True)
class _Prepared:
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
    attend: dict[str, Any]
    merge: dict[str, Any]
    score: dict[str, Any]
    dominant_cost: dict[str, Any]
    add_dominant: dict[str, Any]


_prepared: dict[Hashable, _Prepared] = {}
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
        known = _prepared[key] = _prepare(q, k, v, scale, start, softcap, sink_logits, out, lse, quantity, reduce, plan_)
    with on_device(k.device):
        return _run(key, known, q, k, v, start, sink_logits, out, lse)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    start: Tensor | None,
    softcap: float | None,
    sink_logits: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
    quantity: str,
    reduce: str,
    plan_: Plan | None,
) -> _Prepared:
    batch, heads, n_keys, dim = k.shape
    v_dim, window = v.shape[3], q.shape[2]
    group, groups = q.shape[1] // heads, batch * heads
    rows, itemsize = group * window, k.element_size()
    device = device_of(k.device)
    tile = row_tile(dim, v_dim, itemsize)
    padded, bd, bdv = padded_rows(rows, tile), padded_dim(dim), padded_dim(v_dim)
    values = quantity != "attention_mass"
    # beyond one row tile the rescue of dominant keys has no registers left: the kernels then make their own output
    one_pass = lse is not None and (not values or padded <= tile)
    chosen = plan_ or plan(rows, dim, v_dim, itemsize, n_keys, groups, device, one_pass)
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
    return _Prepared(
        plan=chosen,
        one_pass=one_pass,
        values=values,
        groups=groups,
        rows=padded,
        part_words=groups * splits * padded * (width + (4 if not one_pass else 2)),
        row_words=groups * padded * (width + 3 if not one_pass else 2),
        scalars=(n_keys, chosen.keys_per_split, splits, factor, cap2),
        strides=(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        attend={
            **shape, **blocks, "BM": chosen.attend.rows, "BN": chosen.attend.keys, "BD": bd, "BDV": bdv,
            **modes, "VALUES": values, **numbers,
        },
        merge={**merging, "VALUES": values},
        score={
            **shape, **blocks, "BM": chosen.score.rows, "BN": chosen.score.keys, "BD": bd, "BDV": bdv,
            **modes, "QUANTITY": QUANTITIES[quantity], "MAX": reduce == "max", "ONE_PASS": one_pass,
            "A_PARTS": 1 if one_pass or k.dtype == torch.float32 else 2, **numbers,
        },
        dominant_cost=merging,
        add_dominant={"G": group, "ROWS": padded, "BM": power_of_two(padded), "MAX": reduce == "max"},
    )  # fmt: skip


def _run(
    key: Hashable,
    p: _Prepared,
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
    scores = torch.empty(k.shape[:3], dtype=torch.float32, device=k.device)
    rescue = p.one_pass and p.values
    part = torch.empty(p.part_words, dtype=torch.float32, device=k.device) if not p.one_pass or rescue else scores
    rows = torch.empty(p.row_words, dtype=torch.float32, device=k.device) if not p.one_pass or rescue else scores
    if not p.one_pass:
        out, lse = v, rows
        attend(
            key, (splits * (p.rows // p.plan.attend.rows), p.groups, 1),
            (q, k, v, part, start, *p.scalars, *p.strides, heads), p.attend, _options(p.plan.attend),
        )  # fmt: skip
        merge(key, (p.rows, p.groups, 1), (v, part, sink_logits, rows, splits, *strides_v, heads), p.merge, _SMALL)
    out = v if out is None else out
    score(
        key, (splits, p.groups, 1),
        (q, k, v, out, lse, rows, scores, part, start, *p.scalars, *p.strides, *out.stride()[:3], heads),
        p.score, _options(p.plan.score),
    )  # fmt: skip
    if rescue:
        dominant_cost(
            key, (p.rows, p.groups, 1), (v, part, lse, sink_logits, rows, splits, *strides_v, heads),
            p.dominant_cost, _SMALL,
        )  # fmt: skip
        add_dominant(key, (p.groups, 1, 1), (scores, rows, k.shape[2]), p.add_dominant, _ONE_WARP)
    return scores


_SMALL = {"num_warps": 4, "num_stages": 1}
_ONE_WARP = {"num_warps": 1, "num_stages": 1}


@functools.cache
def _options(blocks: Blocks) -> dict[str, int]:
    return {"num_warps": blocks.warps, "num_stages": blocks.stages}
