"""What a row's cost is divided by, and multiplied by, before rows are reduced."""

from __future__ import annotations

import torch
from torch import Tensor

from decantkv.scoring.window import AttentionWindow

BEHIND_PROJECTION = ("output", "block", "stream")  # the units that are measured behind W_O


def row_factor(win: AttentionWindow, a: Tensor | None = None, weigh: str = "value") -> Tensor | None:
    """The factor of each row's cost: its weight over the divisor of its unit, or None for 1 everywhere.

    Args:
        a: [B, H, g, w, Dv] the rows' outputs, for "head" and "block".

    Returns:
        [B, H or 1, g or 1, w] in at least float32; 0 where the divisor is below float32's smallest normal number.

    Raises:
        ValueError: the window lacks what the unit divides by.
    """
    weights = None if win.row_weights is None else _per_head(win.row_weights, win)
    if a is None or weigh in ("value", "output"):
        return weights
    if weigh == "head":
        divisor = a.square().sum(-1)
    elif weigh == "block":
        divisor = _block_norm(a, win)[:, None, None]
    else:
        if win.stream_norm is None:
            raise ValueError("stream_norm: expected squared norms of the residual stream as [B, w], got None")
        divisor = win.stream_norm[:, None, None].to(a.dtype)
    counts = divisor >= torch.finfo(torch.float32).tiny
    factor = counts / divisor.where(counts, 1.0)
    return factor if weights is None else weights * factor


def _per_head(rows: Tensor, win: AttentionWindow) -> Tensor:
    """[B, HQ or 1, w] as [B, H or 1, g or 1, w]."""
    return rows[:, None] if rows.shape[1] == 1 else rows.view(win.batch, win.num_kv_heads, win.group_size, -1)


def _block_norm(a: Tensor, win: AttentionWindow) -> Tensor:
    """[B, w]: the squared norm of the attention block's output, all heads together and without a bias."""
    if win.output_projection is None:
        raise ValueError("output_projection: expected W_O as [HQ, Dv, E], got None")
    side_by_side = a.permute(0, 3, 1, 2, 4).flatten(2)  # [B, w, HQ·Dv]
    return (side_by_side @ win.output_projection.to(a.dtype).flatten(0, 1)).square().sum(-1)
