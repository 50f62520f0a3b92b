"""What protecting a span costs: the tokens that would have been kept in its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from decantkv.selection.budget import fixed_spans
from decantkv.selection.selector import pool_scores
from decantkv.settings import Settings


@dataclass(frozen=True)
class SpanCost:
    """What protecting one span cost a method.

    Attributes:
        name: "window", "sinks" or "protected".
        start, stop: prompt positions.
        bought: slots per head, mean over all heads, that the span has only because it is protected.
        share: those slots' share of what a head keeps.
        lost: the displaced tokens' share of the sum of all tokens' pooled scores; None if scores are negative and
            have no shares.
    """

    name: str
    start: int
    stop: int
    bought: float
    share: float
    lost: float | None


def pooled(chosen: Settings, score: Tensor) -> Tensor:
    """[H, N]: scores [H, N] of one prompt pooled as the method does before it selects."""
    method = chosen.method
    stop = score.shape[-1] - method.window if method.pool_scope == "prefix" else None
    return pool_scores(score[None], pool=method.pool, kernel_size=method.kernel_size, stop=stop)[0]


def span_costs(chosen: Settings, scores: Sequence[np.ndarray], kept: Sequence[np.ndarray]) -> tuple[SpanCost, ...]:
    """Let every head choose again, equally many tokens, with one span at a time having to earn its place.

    Args:
        scores: by layer, [H, N] float32 unpooled.
        kept: by layer, [H, N] bool, what was kept.
    """
    n = kept[0].shape[1]
    spans = [("window", max(0, n - chosen.method.window), n), ("sinks", 0, min(chosen.sinks, n))]
    spans = [span for span in spans if span[1] < span[2]] + [("protected", *span) for span in chosen.protect]
    found = []
    for name, start, stop in spans:
        fixed = fixed_spans(
            n,
            window=0 if name == "window" else chosen.method.window,
            sinks=0 if name == "sinks" else chosen.sinks,
            protect=tuple(span for span in chosen.protect if name != "protected" or span != (start, stop)),
        )
        bought, share, lost = [], [], []
        for score, mask in zip(scores, kept, strict=True):
            priority = pooled(chosen, torch.from_numpy(score))
            counts = torch.from_numpy(mask.sum(-1))
            before = torch.from_numpy(np.ascontiguousarray(mask))
            after = _chosen_again(priority, fixed, counts)
            slots = (before & ~after)[:, start:stop].sum(-1).double()
            bought.append(slots.mean())
            share.append((slots / counts).mean())
            lost.append(((priority * (after & ~before)).sum(-1) / priority.sum(-1)).mean())
            if bool((priority < 0).any()):
                lost[-1] = torch.tensor(float("nan"))
        mean = [float(torch.stack(x).mean()) for x in (bought, share, lost)]
        found.append(SpanCost(name, start, stop, mean[0], mean[1], None if mean[2] != mean[2] else mean[2]))
    return tuple(found)


def _chosen_again(priority: Tensor, fixed: Sequence[tuple[int, int]], counts: Tensor) -> Tensor:
    """[H, N] bool: the `counts` highest of each head, what is still fixed before all."""
    priority = priority.clone()
    for start, stop in fixed:
        priority[:, start:stop] = torch.inf
    order = torch.sort(priority, dim=-1, descending=True, stable=True).indices
    taken = torch.arange(priority.shape[1]) < counts[:, None]
    return torch.zeros_like(taken).scatter(1, order, taken)
