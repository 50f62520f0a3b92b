"""Selection in two stages, which several methods share: some tokens by one score, the others by another."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_highest(scores: Tensor, *, by: Tensor, counts: Tensor) -> Tensor:
    """`scores` with the `counts[b, h]` highest keys of `by` lifted above all others; ties to the lower index.

    Args:
        scores, by: [B, H, N]. counts: [B, H] int64.
    """
    order = torch.sort(by, dim=-1, descending=True, stable=True).indices
    chosen = torch.arange(by.shape[-1], device=by.device) < counts[..., None]
    chosen = torch.zeros_like(chosen).scatter(-1, order, chosen)
    return scores.masked_fill(chosen, torch.finfo(scores.dtype).max)
