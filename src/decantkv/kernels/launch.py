"""Launching the scoring kernels: scratch, grids, and what each dtype needs."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from decantkv.kernels.attend import attend_kernel, merge_kernel
from decantkv.kernels.blocks import (
    Blocks,
    Device,
    attend_blocks,
    padded_dim,
    padded_rows,
    power_of_two,
    score_blocks,
    split_keys,
)
from decantkv.kernels.primitives import INTERPRETED, LOG2E
from decantkv.kernels.score import (
    MASS,
    PERTURBATION,
    add_dominant_kernel,
    dominant_cost_kernel,
    score_kernel,
)

QUANTITIES = {"perturbation": PERTURBATION, "attention_mass": MASS}
MERGE_CHUNK = 16  # splits a step of the merge reads at once
MAX_DIM = 256


class Plan(NamedTuple):
    """Everything a launch is decided by; tests and the benchmark replace parts of it."""

    attend: Blocks
    score: Blocks
    keys_per_split: int
    splits: int


@functools.lru_cache(maxsize=None)
def device_of(device: torch.device) -> Device:
    """The device class behind a torch device; the interpreter stands for a small one."""
    if INTERPRETED or device.type != "cuda":
        return Device("cpu", 2, 1 << 20)
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 65536)
    return Device("hip" if torch.version.hip else "cuda", properties.multi_processor_count, shared)


@functools.lru_cache(maxsize=1024)
def plan(rows: int, dim: int, v_dim: int, itemsize: int, n_keys: int, groups: int, device: Device) -> Plan:
    """Blocks and splits for `rows` = g·w rows, `groups` = B·H."""
    attend = attend_blocks(rows, dim, v_dim, itemsize, device)
    score = score_blocks(rows, dim, v_dim, itemsize, device)
    tiles = padded_rows(rows) // attend.rows
    keys, splits = split_keys(n_keys, groups * tiles, max(attend.keys, score.keys), device)
    return Plan(attend, score, keys, splits)


def precision_of(dtype: torch.dtype, device: Device) -> str:
    """How a dot treats float32 operands: full precision from three tf32 products where the device has them."""
    if dtype == torch.float32:
        return "tf32x3" if device.backend == "cuda" else "ieee"
    return "tf32" if device.backend == "cuda" else "ieee"  # float16 widened beside weights: tf32 holds it exactly


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
    batch, heads, n_keys, dim = k.shape
    v_dim, window = v.shape[3], q.shape[2]
    group, groups = q.shape[1] // heads, batch * heads
    rows = group * window
    device = device_of(k.device)
    chosen = plan_ or plan(rows, dim, v_dim, k.element_size(), n_keys, groups, device)
    padded, bd, bdv = padded_rows(rows), padded_dim(dim), padded_dim(v_dim)
    code = QUANTITIES[quantity]
    values = code != MASS
    # beyond one row tile the rescue of dominant keys has no registers left: the kernels then make their own output
    one_pass = lse is not None and (not values or (out is not None and padded <= chosen.score.rows))
    precision = precision_of(k.dtype, device)
    bf16 = k.dtype == torch.bfloat16
    split_a = 1 if one_pass or k.dtype == torch.float32 else 2
    if softcap is None:
        factor, cap2 = scale * LOG2E, 0.0
    else:
        factor, cap2 = scale / softcap, softcap * LOG2E
    if q.stride(3) != 1:
        q = q.contiguous()

    new = functools.partial(torch.empty, device=k.device)
    scores = new(batch, heads, n_keys, dtype=torch.float32)
    splits, keys_per_split = chosen.splits, chosen.keys_per_split
    words = new(groups, 4, padded, dtype=torch.float32) if not one_pass else scores
    sizes = q.stride()[:3], k.stride()[:3], v.stride()[:3]
    shape = {"G": group, "W": window, "ROWS": padded, "BDV": bdv}
    dims = {"D": dim, "DV": v_dim, "BD": bd}
    modes = {"PADDED": start is not None, "CAPPED": softcap is not None, "PRECISION": precision}
    merge_splits = {"BS": power_of_two(splits), "CHUNK": min(MERGE_CHUNK, power_of_two(splits))}

    a_hi = a_lo = acc = mass = hot = v
    if values and (not one_pass or out is not None):
        acc = new(groups, splits, padded, bdv, dtype=torch.float32)
    if not one_pass:
        state = new(groups, splits, 3, padded, dtype=torch.float32)
        top = new(groups, splits, padded, dtype=torch.int32) if values else words
        if values:
            a_hi = new(split_a, groups, padded, bdv, dtype=v.dtype)
            a_lo = a_hi[-1]
            a_hi = a_hi[0]
        attend = chosen.attend
        attend_kernel[(splits * (padded // attend.rows), groups)](
            q, k, v, acc, state, top, start, n_keys, keys_per_split, splits, factor, cap2,
            *sizes[0], *sizes[1], *sizes[2], heads,
            **shape, **dims, BM=attend.rows, BN=attend.keys, **modes, VALUES=values, PARTS=2 if bf16 else 1,
            num_warps=attend.warps, num_stages=attend.stages,
        )  # fmt: skip
        merge_kernel[(padded, groups)](
            v, acc, state, top, sink_logits, a_hi, a_lo, words, splits, *sizes[2], heads,
            **shape, DV=v_dim, **merge_splits, SINK=sink_logits is not None, VALUES=values, A_PARTS=split_a,
            num_warps=4,
        )  # fmt: skip
    elif values:
        mass = new(groups, splits, padded, dtype=torch.float32)
        hot = new(groups, splits, padded, dtype=torch.int32)
        assert out is not None  # by one_pass
        out = out if out.stride(3) == 1 else out.contiguous()
        a_hi = a_lo = out.to(v.dtype)
    lse = lse.contiguous() if one_pass and lse is not None else words
    score = chosen.score
    score_kernel[(splits, groups)](
        q, k, v, a_hi, a_lo, words, lse, scores, acc, mass, hot, start,
        n_keys, keys_per_split, splits, factor, cap2,
        *sizes[0], *sizes[1], *sizes[2], *a_hi.stride()[:3], heads,
        **shape, **dims, BM=score.rows, BN=score.keys, **modes, QUANTITY=code, MAX=reduce == "max",
        ONE_PASS=one_pass, A_PARTS=split_a, PARTS=2 if bf16 else 1,
        num_warps=score.warps, num_stages=score.stages,
    )  # fmt: skip
    if one_pass and values:
        tops = new(groups, padded, dtype=torch.int32)
        costs = new(groups, padded, dtype=torch.float32)
        dominant_cost_kernel[(padded, groups)](
            v, acc, mass, hot, lse, sink_logits, tops, costs, splits, *sizes[2], heads,
            **shape, DV=v_dim, **merge_splits, SINK=sink_logits is not None, num_warps=4,
        )  # fmt: skip
        add_dominant_kernel[(groups,)](
            scores, tops, costs, n_keys, G=group, ROWS=power_of_two(padded), MAX=reduce == "max", num_warps=1
        )
    return scores


__all__ = ["MAX_DIM", "Plan", "device_of", "launch_scores", "plan", "triton"]
