"""The fused kernels' entry points: window scores, selection, compaction. Importing this needs the package triton.

Each is a registered custom op under `torch.ops.decantkv`, which is what a compiled graph holds; eager calls go straight
to the launchers, since a dispatch costs about as much as a launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from decantkv.kernels import ops
from decantkv.kernels.compaction import POOLS, launch_gather, launch_select
from decantkv.kernels.launch import QUANTITIES, ROW_POOLS, launch_scores
from decantkv.kernels.plan import MAX_DIM
from decantkv.kernels.primitives import INTERPRETED

__all__ = ["INTERPRETED", "MAX_DIM", "QUANTITIES", "gather_kv", "select_topk", "window_scores"]


def window_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    start: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    quantity: str = "perturbation",
    reduce: str = "sum",
    row_pool: str = "none",
    kernel_size: int = 1,
    chunk: int = 4,
    output_projection: Tensor | None = None,
) -> Tensor:
    """A window quantity per key, fused.

    Args:
        q: [B, HQ, w, D] the window's queries, bf16, fp16 or fp32, as k and v.
        k, v: [B, H, N, D], [B, H, N, Dv]; the last dimension contiguous, other strides free.
        start: [B] integers, the first real key of each batch row; None: all are real.
        out, lse: the rows' output [B, HQ, w, Dv] and natural log-sum-exp [B, HQ, w] where the model has them: then
            the keys and values are read once instead of twice. A row's dominant key stays exact; the others are as
            exact as `out`. "alignment", "chunk_alignment" and weighing by W_O make their own.
        quantity: one of QUANTITIES, as in `decantkv.scoring.reference`.
        reduce: "sum" or "max" over a KV head's rows.
        row_pool, kernel_size: "none", "max" or "avg" of each row's weights over an odd number of keys, for
            "attention_mass" and "chunk_alignment".
        chunk: keys of a chunk, for "chunk_alignment".
        output_projection: [HQ, Dv, E], floating point, any strides: "perturbation" then measures ‖(a − v)·W_O‖. None:
            ‖a − v‖.

    Returns:
        [B, H, N] float32; 0 at pads and where the true value's magnitude is below float32's smallest normal number.

    Raises:
        ValueError: a name or option that does not fit; the message names the argument.
    """
    if quantity not in QUANTITIES:
        raise ValueError(f"quantity: expected one of {', '.join(QUANTITIES)}, got {quantity!r}")
    if row_pool not in ROW_POOLS:
        raise ValueError(f"row_pool: expected one of {', '.join(ROW_POOLS)}, got {row_pool!r}")
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size: expected a positive odd number, got {kernel_size}")
    if output_projection is not None and quantity != "perturbation":
        raise ValueError(f"output_projection: expected None for {quantity}, got {list(output_projection.shape)}")
    run = ops.window_scores if torch.compiler.is_compiling() else launch_scores
    scores: Tensor = run(
        q, k, v, scale, start=start, softcap=softcap, sink_logits=sink_logits, out=out, lse=lse, quantity=quantity,
        reduce=reduce, row_pool=row_pool, kernel_size=kernel_size, chunk=chunk, output_projection=output_projection,
    )  # fmt: skip
    return scores


def select_topk(
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
) -> Tensor:
    """The indices of each row's highest pooled scores, exact, ascending, ties to the lowest index; no host sync.

    Args:
        scores: [B, H, N] float32, any sign; NaN and infinities as in `ranking.bounded`.
        n_keep: K, the slots of the result, and how many each row keeps where `counts` is None.
        counts: [B, H] integers ≤ K, how many each row and head keeps; never more than it has real keys.
        start: [B] integers, the first real key; pads before it are edges of the pooling and are never chosen.
        pool, kernel_size: "none", "max" (edges −inf) or "avg" (edges 0, always divided by the odd kernel_size).
        pool_stop: pool only keys before it, as if the row ended there; later scores pass through.
        sinks, window: how many first real keys and last keys are always kept.
        forced: [B, N] bool, further keys always kept. All kept keys count towards `counts`.

    Returns:
        [B, H, K] int64; rows that keep fewer are filled with −1 on the left.

    Raises:
        ValueError: a shape, dtype or name that does not fit; the message names the argument.
    """
    if scores.dim() != 3 or scores.dtype != torch.float32:
        raise ValueError(f"scores: expected float32 [batch, KV heads, keys], got {scores.dtype} {list(scores.shape)}")
    if pool not in POOLS:
        raise ValueError(f"pool: expected one of {', '.join(POOLS)}, got {pool!r}")
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"kernel_size: expected a positive odd number, got {kernel_size}")
    if not 0 <= n_keep <= scores.shape[2]:
        raise ValueError(f"n_keep: expected 0 to {scores.shape[2]} keys, got {n_keep}")
    if counts is not None and (counts.shape != scores.shape[:2] or not counts.is_contiguous()):
        raise ValueError(f"counts: expected contiguous {list(scores.shape[:2])}, got {list(counts.shape)}")
    if forced is not None and (forced.shape != scores.shape[::2] or forced.dtype != torch.bool):
        raise ValueError(f"forced: expected bool {list(scores.shape[::2])}, got {forced.dtype} {list(forced.shape)}")
    run = ops.select_topk if torch.compiler.is_compiling() else launch_select
    index: Tensor = run(
        scores, n_keep, counts=counts, start=start, pool=pool, kernel_size=kernel_size, pool_stop=pool_stop,
        sinks=sinks, window=window, forced=forced,
    )  # fmt: skip
    return index


def gather_kv(
    k: Tensor, v: Tensor, indices: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Copy the kept keys and values out in one launch; filler slots (−1) become zeros.

    Args:
        k, v: [B, H, N, D], [B, H, N, Dv], the last dimension contiguous.
        indices: [B, H, K] int64.
        out: destinations [B, H, K, D] and [B, H, K, Dv] with a contiguous last dimension, e.g. views of a decode
            buffer; None: new tensors.
    """
    if indices.dim() != 3 or indices.shape[:2] != k.shape[:2] or indices.dtype != torch.int64:
        raise ValueError(f"indices: expected int64 [{k.shape[0]}, {k.shape[1]}, kept], got {list(indices.shape)}")
    if k.stride(3) != 1 or v.stride(3) != 1:
        raise ValueError("k, v: expected a contiguous last dimension, got another layout")
    if out is None:
        if torch.compiler.is_compiling():
            k_kept, v_kept = ops.gather_kv(k, v, indices)
            return k_kept, v_kept
        shape = indices.shape
        out = (
            torch.empty((*shape, k.shape[3]), dtype=k.dtype, device=k.device),
            torch.empty((*shape, v.shape[3]), dtype=v.dtype, device=v.device),
        )
    else:
        shapes = ((*indices.shape, k.shape[3]), (*indices.shape, v.shape[3]))
        if tuple(t.shape for t in out) != shapes or any(t.stride(3) != 1 for t in out):
            raise ValueError(f"out: expected tensors {shapes} with a contiguous last dimension, got another layout")
    launch_gather(k, v, indices.contiguous(), *out)
    return out
