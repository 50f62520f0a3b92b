"""Launching selection and compaction."""

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch
from torch import Tensor

from decantkv.kernels.blocks import padded_dim, power_of_two
from decantkv.kernels.launcher import Launch, address, aligned, current_stream, on_device
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
ROW_LIMIT = 4096  # keys one program holds in registers


def chunk_of(n_keys: int) -> int:
    """Keys of a long row per program: enough programs to fill a device, few enough to sum over."""
    return 2048 if n_keys <= 2**16 else 4096


@functools.lru_cache(maxsize=512)
def _select_launches(
    key: Hashable, pool: str, kernel_size: int, forced: bool, padded: bool, per_row: bool, chunk: int, chunks: int
) -> tuple[Launch, ...]:
    """The launches of one select; `key` holds what else they specialise on. No chunks: a row a program."""
    pooling = {"POOL": POOLS[pool], "KERNEL": kernel_size, "FORCED": forced, "PADDED": padded}
    rows = {"PADDED": padded, "PER_ROW": per_row}
    size = {"BN": chunk}
    if not chunks:
        warps = max(1, min(16, chunk // 256))
        return (Launch(select_row_kernel, {**pooling, "PER_ROW": per_row, **size}, warps=warps),)
    return (
        Launch(order_kernel, {**pooling, **size}, warps=8),
        *(Launch(digit_kernel, {**rows, "DIGIT": digit, **size}, warps=8) for digit in (1, 2, 3)),
        Launch(count_kernel, {**rows, **size}, warps=8),
        Launch(compact_kernel, {**rows, "BC": chunks, **size}, warps=8),
    )


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
    chunk: int | None = None,
    row_limit: int = ROW_LIMIT,
) -> Tensor:
    """Run the kernels; arguments as in `decantkv.kernels.select_topk`, already checked."""
    batch, heads, n_keys = scores.shape
    rows = batch * heads
    scores = scores.contiguous()
    index = torch.empty(batch, heads, n_keep, dtype=torch.int64, device=scores.device)
    ends = (n_keys if pool_stop is None else pool_stop, sinks, window, heads)
    key = (
        scores.device, heads, None if start is None else start.dtype, None if counts is None else counts.dtype,
        aligned(scores, forced, start, counts),
    )  # fmt: skip
    chunk = chunk or chunk_of(n_keys)
    chunks = -(-n_keys // chunk) if n_keys > row_limit else 0
    block = chunk if chunks else max(256, power_of_two(n_keys))
    padded_chunks = power_of_two(chunks) if chunks else 0
    launches = _select_launches(
        key, pool, kernel_size, forced is not None, start is not None, counts is not None, block, padded_chunks
    )
    with on_device(scores.device):
        stream = current_stream(scores.device)
        if not chunks:
            row = launches[0]
            at = (scores, forced, start, counts, index)
            row((rows, 1, 1), stream, *(map(address, at) if row.ready else at), n_keys, n_keep, n_keep, *ends)
            return index
        grid = (chunks, rows, 1)
        order = torch.empty(rows, n_keys, dtype=torch.int32, device=scores.device)
        bins = torch.zeros(rows, 4, DIGIT_BINS, dtype=torch.int32, device=scores.device)
        tally = torch.empty(rows, 2 * chunks + 2, dtype=torch.int32, device=scores.device)
        launches[0](grid, stream, scores, forced, start, order, bins, n_keys, *ends)
        for digit in launches[1:4]:
            digit(grid, stream, order, bins, start, counts, n_keys, n_keep, heads)
        launches[4](grid, stream, order, bins, start, counts, tally, n_keys, n_keep, chunks, heads)
        launches[5](grid, stream, order, start, counts, tally, index, n_keys, n_keep, chunks, n_keep, heads)
    return index


def launch_gather(k: Tensor, v: Tensor, indices: Tensor, k_kept: Tensor, v_kept: Tensor) -> None:
    """Run the kernel; arguments as in `decantkv.kernels.gather_kv`, already checked."""
    batch, heads, n_slots = indices.shape
    if n_slots == 0:
        return
    strides = (*k.stride()[:3], *v.stride()[:3], *k_kept.stride()[:3], *v_kept.stride()[:3])
    key = (k.device, k.dtype, v.dtype, heads, strides, aligned(k, v, indices, k_kept, v_kept))
    tensors = (k, v, indices, k_kept, v_kept)
    launch, block = _gather_launch(key, k.shape[3], v.shape[3])
    with on_device(k.device):
        launch(
            (-(-n_slots // block), batch * heads, 1), current_stream(k.device),
            *(map(address, tensors) if launch.ready else tensors), n_slots, heads, *strides,
        )  # fmt: skip


@functools.lru_cache(maxsize=512)
def _gather_launch(key: Hashable, dim: int, v_dim: int) -> tuple[Launch, int]:
    bd, bdv = padded_dim(dim), padded_dim(v_dim)
    block = max(4, 4096 // max(bd, bdv))
    return Launch(gather_kernel, {"D": dim, "DV": v_dim, "BD": bd, "BDV": bdv, "BK": block}, warps=4), block
