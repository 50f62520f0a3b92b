"""From scores to kept tokens: pool, protect, allocate, take the highest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from decantkv.budget import count, fixed_spans
from decantkv.options import (
    Allocation,
    Pool,
    PoolScope,
    Span,
    expect_choice,
    expect_int,
    expect_odd,
    expect_spans,
)

FILLER = -1


@dataclass(frozen=True)
class Kept:
    """Which tokens stay.

    Attributes:
        indices: [B, H, K] int64 key indices, ascending; where a row and head keep fewer than K, FILLER (−1) fills
            up on the left.
        counts: [B, H] int64 how many each row and head keeps.
    """

    indices: Tensor
    counts: Tensor

    def valid(self) -> Tensor:
        """[B, H, K] bool: which slots hold a token and not filler."""
        return self.indices != FILLER

    def mask(self, kv_len: int) -> Tensor:
        """[B, H, N] bool: which of the N keys are kept."""
        slots = torch.where(self.valid(), self.indices, kv_len)
        kept = torch.zeros(*slots.shape[:2], kv_len + 1, dtype=torch.bool, device=slots.device)
        return kept.scatter_(2, slots, True)[..., :kv_len]


def pool_scores(
    scores: Tensor,
    *,
    pool: Pool,
    kernel_size: int,
    lengths: Sequence[int] | None = None,
    stop: int | None = None,
) -> Tensor:
    """Pool scores along keys, stride 1, same length; pads and the array's ends are edges.

    Max pads with −inf; avg pads with zeros and always divides by the kernel size, as DropKV's authors do.

    Args:
        scores: [B, H, N] float32.
        lengths: real keys of each batch row, the rest being pads on the left.
        stop: pool only the keys before `stop`; the others pass through.
    """
    if pool == "none" or kernel_size == 1:
        return scores
    stop = scores.shape[2] if stop is None else stop
    head, tail = scores[..., :stop], scores[..., stop:]
    if stop == 0:
        return scores
    edge = -torch.inf if pool == "max" else 0.0
    pads = _pads(lengths, scores)[..., :stop]
    head = head.masked_fill(pads, edge)
    if pool == "max":
        pooled = F.max_pool1d(head, kernel_size, stride=1, padding=kernel_size // 2)
    else:
        pooled = F.avg_pool1d(head, kernel_size, stride=1, padding=kernel_size // 2, count_include_pad=True)
    return torch.cat([pooled, tail], dim=-1) if tail.shape[-1] else pooled


def select(
    scores: Tensor,
    *,
    n_keep: int | Sequence[int],
    window: int = 0,
    pool: Pool = "none",
    kernel_size: int = 1,
    pool_scope: PoolScope = "all",
    sinks: int = 0,
    protect: Sequence[Span] = (),
    allocation: Allocation = "uniform",
    lengths: Sequence[int] | Tensor | None = None,
    forced_tail: int = 0,
) -> Kept:
    """Choose the tokens to keep.

    Scores are pooled, the protected tokens are taken by index, and the highest of the others fill up to `n_keep`;
    equal scores are broken by position, the earlier token first.

    Args:
        scores: [B, H, N] floating point, higher = keep; no NaN.
        n_keep: tokens each head keeps, protected ones included; one number, or one per batch row.
        window: the last tokens, always kept.
        pool, kernel_size, pool_scope: as in `Method`.
        sinks: the first real tokens, always kept.
        protect: spans (start, stop) of real-token positions, always kept.
        allocation: "uniform": each head its own tokens; "shared": one set for all heads, by their mean score.
        lengths: real keys of each batch row; pads lie on the left and are never chosen.
        forced_tail: the last tokens, always kept, beside the window: whichever reaches further back counts.

    Raises:
        TypeError, ValueError: an argument out of its range, or `n_keep` below what is protected.
    """
    if not isinstance(scores, Tensor) or scores.dim() != 3 or not scores.is_floating_point():
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores: expected a floating-point tensor [batch, KV heads, keys], got {got}")
    tail = max(expect_int("window", window, at_least=0), expect_int("forced_tail", forced_tail, at_least=0))
    expect_choice("pool", pool, get_args(Pool))
    expect_choice("pool_scope", pool_scope, get_args(PoolScope))
    expect_choice("allocation", allocation, get_args(Allocation))
    expect_odd("kernel_size", kernel_size)
    spans = expect_spans("protect", protect)
    batch, heads, kv_len = scores.shape
    rows = _row_lengths(lengths, batch, kv_len)
    fixed = [fixed_spans(n, window=tail, sinks=expect_int("sinks", sinks, at_least=0), protect=spans) for n in rows]
    counts = _row_counts(n_keep, rows, [count(s) for s in fixed])

    if allocation == "shared":
        scores = scores.mean(1, keepdim=True)
    stop = kv_len - min(window, kv_len) if pool_scope == "prefix" else kv_len
    padded = rows if lengths is not None else None
    pooled = pool_scores(scores, pool=pool, kernel_size=kernel_size, lengths=padded, stop=stop)
    limit = torch.finfo(pooled.dtype).max
    pooled = pooled.clamp(-limit, limit)  # so that only protected tokens are at +inf and only pads at −inf
    pooled = pooled.masked_fill(_protected(fixed, rows, pooled), torch.inf)
    if padded is not None:
        pooled = pooled.masked_fill(_pads(padded, pooled), -torch.inf)
    indices = _highest(pooled, counts).expand(-1, heads, -1)
    return Kept(indices, torch.tensor(counts, device=scores.device)[:, None].expand(-1, heads))


def _highest(priority: Tensor, counts: list[int]) -> Tensor:
    """The `counts[b]` highest of each row as ascending indices, FILLER on the left; ties to the lower index."""
    most = max(counts)
    order = torch.sort(priority, dim=-1, descending=True, stable=True).indices[..., :most]
    if min(counts) < most:
        rank = torch.arange(most, device=priority.device)
        surplus = rank >= torch.tensor(counts, device=priority.device)[:, None, None]
        order = order.masked_fill(surplus, FILLER)
    return order.sort(-1).values


def _row_lengths(lengths: Sequence[int] | Tensor | None, batch: int, kv_len: int) -> list[int]:
    if lengths is None:
        return [kv_len] * batch
    rows = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    if len(rows) != batch or not all(1 <= n <= kv_len for n in rows):
        raise ValueError(f"lengths: expected {batch} numbers from 1 to {kv_len}, got {rows}")
    return rows


def _row_counts(n_keep: int | Sequence[int], rows: list[int], fixed: list[int]) -> list[int]:
    wanted = list(n_keep) if isinstance(n_keep, Sequence) else [n_keep] * len(rows)
    if len(wanted) != len(rows):
        raise ValueError(f"n_keep: expected one number or {len(rows)}, one per batch row, got {len(wanted)}")
    counts = []
    for number, length, least in zip(wanted, rows, fixed, strict=True):
        number = min(expect_int("n_keep", number, at_least=1), length)
        if number < least:
            raise ValueError(
                f"n_keep: expected at least {least}, which window, sinks and protect always keep, got {number}"
            )
        counts.append(number)
    return counts


def _pads(lengths: Sequence[int] | None, scores: Tensor) -> Tensor:
    """[B or 1, 1, N] bool: True at a pad."""
    position = torch.arange(scores.shape[2], device=scores.device)
    if lengths is None:
        return torch.zeros_like(position, dtype=torch.bool)[None, None]
    return position < (scores.shape[2] - torch.tensor(lengths, device=scores.device))[:, None, None]


def _protected(fixed: list[tuple[Span, ...]], rows: list[int], scores: Tensor) -> Tensor:
    """[B, 1, N] bool: the always-kept keys; spans count from a row's first real token."""
    kv_len = scores.shape[2]
    protected = torch.zeros(len(rows), 1, kv_len, dtype=torch.bool)
    for row, (spans, length) in enumerate(zip(fixed, rows, strict=True)):
        for start, stop in spans:
            protected[row, 0, kv_len - length + start : kv_len - length + stop] = True
    return protected.to(scores.device)
