"""The kernels as custom ops with fake implementations, so that torch.compile and export can carry them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decantkv.kernels.compaction import launch_gather, launch_select
from decantkv.kernels.launch import Pages, launch_scores
from decantkv.kernels.move import launch_compact


@torch.library.custom_op("decantkv::window_scores", mutates_args=())
def window_scores(
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
    row_pool: str,
    kernel_size: int,
    chunk: int,
    output_projection: Tensor | None,
) -> Tensor:
    """`decantkv.kernels.window_scores` as an op."""
    return launch_scores(
        q, k, v, scale, start=start, softcap=softcap, sink_logits=sink_logits, out=out, lse=lse,
        quantity=quantity, reduce=reduce, row_pool=row_pool, kernel_size=kernel_size, chunk=chunk,
        output_projection=output_projection,
    )  # fmt: skip


@window_scores.register_fake
def _(q: Tensor, k: Tensor, *_: Any) -> Tensor:
    return k.new_empty(k.shape[:3], dtype=torch.float32)


@torch.library.custom_op("decantkv::select_topk", mutates_args=())
def select_topk(
    scores: Tensor,
    n_keep: int,
    counts: Tensor | None,
    start: Tensor | None,
    pool: str,
    kernel_size: int,
    pool_stop: int | None,
    sinks: int,
    window: int,
    forced: Tensor | None,
) -> Tensor:
    """`decantkv.kernels.select_topk` as an op."""
    return launch_select(
        scores, n_keep, counts=counts, start=start, pool=pool, kernel_size=kernel_size, pool_stop=pool_stop,
        sinks=sinks, window=window, forced=forced,
    )  # fmt: skip


@select_topk.register_fake
def _(scores: Tensor, n_keep: int, *_: Any) -> Tensor:
    return scores.new_empty((*scores.shape[:2], n_keep), dtype=torch.int64)


@torch.library.custom_op("decantkv::gather_kv", mutates_args=())
def gather_kv(k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """`decantkv.kernels.gather_kv` as an op."""
    k_kept, v_kept = k.new_empty(*indices.shape, k.shape[3]), v.new_empty(*indices.shape, v.shape[3])
    launch_gather(k, v, indices.contiguous(), k_kept, v_kept)
    return k_kept, v_kept


@gather_kv.register_fake
def _(k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return k.new_empty(*indices.shape, k.shape[3]), v.new_empty(*indices.shape, v.shape[3])


@torch.library.custom_op("decantkv::score_paged", mutates_args=())
def score_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None,
    sink_logits: Tensor | None,
    quantity: str,
    reduce: str,
    row_pool: str,
    kernel_size: int,
    chunk: int,
    output_projection: Tensor | None,
    n_keys: int,
) -> Tensor:
    """`decantkv.kernels.paged.score_paged` as an op."""
    return launch_scores(
        q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), scale, softcap=softcap, sink_logits=sink_logits,
        quantity=quantity, reduce=reduce, row_pool=row_pool, kernel_size=kernel_size, chunk=chunk,
        output_projection=output_projection, pages=Pages(block_table, lengths.contiguous(), n_keys),
    )  # fmt: skip


@score_paged.register_fake
def _(q: Tensor, k_cache: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0], k_cache.shape[2], rest[-1]), dtype=torch.float32)  # the last argument: n_keys


@torch.library.custom_op("decantkv::compact_paged", mutates_args=("k_cache", "v_cache"))
def compact_paged(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    index: Tensor,
    first_block: Tensor,
    counts: Tensor | None,
) -> None:
    """`decantkv.kernels.paged.compact_paged` as an op."""
    launch_compact(k_cache, v_cache, block_table, index, first_block, counts)


@compact_paged.register_fake
def _(*_: Any) -> None:
    return None
