"""The kernels on paged storage: scores read through a block table, and compaction in place.

The scoring kernels are those of dense storage with another way from a key to its address. Registered as custom ops
like theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decantkv.kernels import ops
from decantkv.kernels.launch import QUANTITIES, ROW_POOLS, Pages, launch_scores
from decantkv.kernels.move import launch_compact
from decantkv.kernels.plan import MAX_DIM

__all__ = ["compact_paged", "score_paged"]


def score_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    quantity: str = "perturbation",
    reduce: str = "sum",
    row_pool: str = "none",
    kernel_size: int = 1,
    chunk: int = 4,
    output_projection: Tensor | None = None,
    max_len: int | None = None,
) -> Tensor:
    """A window quantity per key of requests whose keys lie in pages; no dense copy is made.

    Args:
        q: [R, HQ, w, D] each request's last w queries, bf16, fp16 or fp32, as the caches.
        k_cache, v_cache: [blocks, block_size, H, D], [blocks, block_size, H, Dv]; the last dimension contiguous, other
            strides free.
        block_table: [R, nblocks] int32, which block holds each request's keys i·block_size and on. Entries past a
            request's last block are not read.
        lengths: [R] integers on the device, each request's keys; query row i stands at key lengths − w + i.
        scale, softcap, sink_logits, quantity, reduce, row_pool, kernel_size, chunk, output_projection: as in
            `decantkv.kernels.window_scores`.
        max_len: N, where the host knows that no request is longer; None: nblocks · block_size.

    Returns:
        [R, H, N] float32, what `window_scores` gives for each request alone; −inf behind a request's end.

    Raises:
        ValueError: tensors or options that do not fit; the message names the argument.
    """
    page = _check_caches(k_cache, v_cache, block_table)
    rows, heads = block_table.shape[0], k_cache.shape[2]
    if q.dim() != 4 or q.shape[0] != rows or q.shape[3] != k_cache.shape[3] or q.shape[1] % heads:
        raise ValueError(f"q: expected [{rows}, a multiple of {heads}, window, {k_cache.shape[3]}], got {[*q.shape]}")
    if q.dtype != k_cache.dtype or q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"q: expected one of bf16, fp16, fp32 as in the caches, got {q.dtype} and {k_cache.dtype}")
    if max(k_cache.shape[3], v_cache.shape[3]) > MAX_DIM:
        raise ValueError(f"k_cache: expected head_dim of at most {MAX_DIM}, got {k_cache.shape[3]}")
    if lengths.shape != (rows,) or lengths.is_floating_point():
        raise ValueError(f"lengths: expected {rows} integers, got {lengths.dtype} {list(lengths.shape)}")
    if quantity not in QUANTITIES or row_pool not in ROW_POOLS:
        raise ValueError(f"quantity, row_pool: expected {[*QUANTITIES]}, {[*ROW_POOLS]}, got {quantity}, {row_pool}")
    capacity = block_table.shape[1] * page
    if max_len is not None and not 0 < max_len <= capacity:
        raise ValueError(f"max_len: expected 1 to {capacity}, the keys that the table names, got {max_len}")
    n_keys = capacity if max_len is None else max_len
    if torch.compiler.is_compiling():
        scores: Tensor = ops.score_paged(
            q, k_cache, v_cache, block_table, lengths, scale, softcap, sink_logits, quantity, reduce, row_pool,
            kernel_size, chunk, output_projection, n_keys,
        )  # fmt: skip
        return scores
    return launch_scores(
        q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), scale, softcap=softcap, sink_logits=sink_logits,
        quantity=quantity, reduce=reduce, row_pool=row_pool, kernel_size=kernel_size, chunk=chunk,
        output_projection=output_projection, pages=Pages(block_table, lengths.contiguous(), n_keys),
    )  # fmt: skip


def compact_paged(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    index: Tensor,
    first_block: Tensor,
    *,
    counts: Tensor | None = None,
) -> None:
    """Move each KV head's kept tokens together within their request, K and V of all requests in one launch.

    Token `index[r, h, i]` of request r goes to its slot first_block[r]·block_size + i. Destinations may overlap
    sources in any way. Blocks that a request writes must not be read or written by another of the same call; blocks
    that it only reads may be shared.

    Args:
        k_cache, v_cache: [blocks, block_size, H, D], [blocks, block_size, H, Dv], any dtype; the last dimension
            contiguous, other strides free. Changed in place.
        block_table: [R, nblocks] int32.
        index: [R, H, K] int64, tokens of the request, ascending without repeats.
        first_block: [R] integers on the device, the block of the request where its first kept token goes.
        counts: [R] integers on the device, how many each request keeps: then the first K − count slots of `index` are
            filler and ignored, as in `decantkv.kernels.select_topk`. None: all K.

    Raises:
        ValueError: tensors that do not fit; the message names the argument.
    """
    _check_caches(k_cache, v_cache, block_table)
    rows, heads = block_table.shape[0], k_cache.shape[2]
    if index.dim() != 3 or index.shape[:2] != (rows, heads) or index.dtype != torch.int64:
        raise ValueError(f"index: expected int64 [{rows}, {heads}, kept], got {index.dtype} {list(index.shape)}")
    for name, tensor in (("first_block", first_block), ("counts", counts)):
        if tensor is not None and (tensor.shape != (rows,) or tensor.is_floating_point()):
            raise ValueError(f"{name}: expected {rows} integers, got {tensor.dtype} {list(tensor.shape)}")
    if torch.compiler.is_compiling():
        ops.compact_paged(k_cache, v_cache, block_table, index, first_block, counts)
        return
    launch_compact(k_cache, v_cache, block_table, index, first_block, counts)


def _check_caches(k_cache: Tensor, v_cache: Tensor, block_table: Tensor) -> int:
    if k_cache.dim() != 4 or v_cache.dim() != 4 or k_cache.shape[:3] != v_cache.shape[:3]:
        shapes = f"{list(k_cache.shape)} and {list(v_cache.shape)}"
        raise ValueError(f"k_cache, v_cache: expected [blocks, block_size, KV heads, head_dim] each, got {shapes}")
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(f"v_cache: expected {k_cache.dtype} as k_cache, got {v_cache.dtype}")
    if k_cache.stride(3) != 1 or v_cache.stride(3) != 1:
        raise ValueError("k_cache, v_cache: expected a contiguous last dimension, got another layout")
    if block_table.dim() != 2 or block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError(
            f"block_table: expected int32 [requests, blocks] with contiguous rows, got {block_table.dtype} "
            f"{list(block_table.shape)}"
        )
    return k_cache.shape[1]
