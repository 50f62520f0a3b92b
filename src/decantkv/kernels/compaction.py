"""Launching selection and compaction."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from decantkv.kernels.blocks import padded_dim, power_of_two
from decantkv.kernels.select import (
    AVG_POOL,
    DIGIT_BINS,
    MAX_POOL,
    NO_POOL,
    compact_kernel,
    count_kernel,
    digit_kernel,
    gather_kernel,
    order_kernel,
    select_row_kernel,
)

POOLS = {"none": NO_POOL, "max": MAX_POOL, "avg": AVG_POOL}
ROW_LIMIT = 8192  # keys one program holds in registers
CHUNK = 4096  # keys of a long row per program


def launch_select(
    scores: Tensor,
    n_keep: int,
    *,
    counts: Tensor | None = None,
    start: Tensor | None = None,
    pool: str = "none",
    kernel_size: int = 1,
    pool_stop: int | None = None,
    sinks: int = 0,
    window: int = 0,
    forced: Tensor | None = None,
    chunk: int = CHUNK,
    row_limit: int = ROW_LIMIT,
) -> Tensor:
    """Run the kernels; arguments as in `decantkv.kernels.select_topk`, already checked."""
    batch, heads, n_keys = scores.shape
    rows = batch * heads
    scores = scores if scores.is_contiguous() else scores.contiguous()
    index = torch.empty(batch, heads, n_keep, dtype=torch.int64, device=scores.device)
    stop = n_keys if pool_stop is None else pool_stop
    ends = (n_keys, stop, sinks, window)
    pooling = {"POOL": POOLS[pool], "KERNEL": kernel_size, "FORCED": forced is not None}
    per_row = {"PADDED": start is not None, "PER_ROW": counts is not None}
    if n_keys <= row_limit:
        block = max(256, power_of_two(n_keys))
        select_row_kernel[(rows,)](
            scores, forced, start, counts, index, n_keys, n_keep, n_keep, n_keys, *ends[1:], heads,
            **pooling, **per_row, BN=block, num_warps=max(1, min(16, block // 256)),
        )  # fmt: skip
        return index
    chunks = triton.cdiv(n_keys, chunk)
    grid = (chunks, rows)
    order = torch.empty(rows, n_keys, dtype=torch.int32, device=scores.device)
    bins = torch.zeros(rows, 3, DIGIT_BINS, dtype=torch.int32, device=scores.device)
    tally = torch.empty(rows, 2 * chunks + 2, dtype=torch.int32, device=scores.device)
    order_kernel[grid](
        scores, forced, start, order, bins, n_keys, n_keys, *ends[1:], heads,
        **pooling, PADDED=start is not None, BN=chunk, num_warps=8,
    )  # fmt: skip
    for digit in (1, 2):
        digit_kernel[grid](
            order, bins, start, counts, n_keys, n_keep, heads, **per_row, DIGIT=digit, BN=chunk, num_warps=8
        )
    count_kernel[grid](
        order, bins, start, counts, tally, n_keys, n_keep, chunks, heads, **per_row, BN=chunk, num_warps=8
    )
    compact_kernel[grid](
        order, start, counts, tally, index, n_keys, n_keep, chunks, n_keep, heads,
        **per_row, BC=power_of_two(chunks), BN=chunk, num_warps=8,
    )  # fmt: skip
    return index


def launch_gather(k: Tensor, v: Tensor, indices: Tensor, k_kept: Tensor, v_kept: Tensor) -> None:
    """Run the kernel; arguments as in `decantkv.kernels.gather_kv`, already checked."""
    batch, heads, n_slots = indices.shape
    dim, v_dim = k.shape[3], v.shape[3]
    bd, bdv = padded_dim(dim), padded_dim(v_dim)
    block = max(4, 4096 // max(bd, bdv))
    gather_kernel[(triton.cdiv(n_slots, block), batch * heads)](
        k, v, indices, k_kept, v_kept, n_slots, heads,
        *k.stride()[:3], *v.stride()[:3], *k_kept.stride()[:3], *v_kept.stride()[:3],
        D=dim, DV=v_dim, BD=bd, BDV=bdv, BK=block, num_warps=4,
    )  # fmt: skip
