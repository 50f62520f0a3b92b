"""Top-k with a fixed order: higher first, ties to the lower index, so that runs repeat bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from decantkv.base.selection_numbers import BOUND, FILLER

__all__ = ["BOUND", "FILLER", "bounded", "highest", "keep_highest"]


def bounded(scores: Tensor, *, parts: int = 1, nan: float | None = None) -> Tensor:
    """Return the scores as finite numbers of the same order, NaN as the lowest, without a check on the host.

    Args:
        parts: how many of the results can be added up without an overflow.
        nan: what a NaN becomes; None: the lowest score.
    """
    limit = torch.finfo(scores.dtype).max / BOUND / parts
    return scores.nan_to_num(-limit if nan is None else nan, limit, -limit).clamp_(-limit, limit)


def highest(priority: Tensor, counts: Tensor, most: int) -> Tensor:
    """Return the `counts[b, h]` highest keys of each head as ascending indices, FILLER on the left.

    Args:
        priority: [B, H, N]. counts: [B, H] int64, none above `most`.

    Returns:
        [B, H, most] int64.
    """
    order = torch.sort(priority, dim=-1, descending=True, stable=True).indices[..., :most]
    surplus = torch.arange(most, device=priority.device) >= counts[..., None]
    return order.masked_fill(surplus, FILLER).sort(-1).values


def keep_highest(scores: Tensor, *, by: Tensor, counts: Tensor, to: float | None = None) -> Tensor:
    """Return `scores` with the `counts[b, h]` highest keys of `by` raised above all others that are `bounded`.

    Args:
        scores, by: [B, H, N], `by` without NaN. counts: [B, H] int64.
        to: what they are lifted to; None: what is above all that is `bounded`.
    """
    order = torch.sort(by, dim=-1, descending=True, stable=True).indices
    chosen = torch.arange(by.shape[-1], device=by.device) < counts[..., None]
    chosen = torch.zeros_like(chosen).scatter(-1, order, chosen)
    return scores.masked_fill(chosen, torch.finfo(scores.dtype).max / 2 if to is None else to)


def wins(priority: Tensor, total: int) -> Tensor:
    """Return how many of the `total` highest keys of all heads together each head holds; ties go to the lower head.

    Args:
        priority: [..., H, N], −inf at keys that take no part. At least `total` keys of every [H, N] take part.

    Returns:
        [..., H] int64, summing to `total`.
    """
    if total == 0:
        return torch.zeros(priority.shape[:-1], dtype=torch.int64, device=priority.device)
    least = torch.topk(priority.flatten(-2), total).values[..., -1:, None]
    above, level = (priority > least).sum(-1), (priority == least).sum(-1)
    spare = total - above.sum(-1, keepdim=True) - (level.cumsum(-1) - level)
    return above + torch.minimum(spare.clamp_min(0), level)
