"""Scores from the fused kernels. `unsupported` names inputs that they cannot take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decantkv import kernels
from decantkv.kernels.columns import column_costs
from decantkv.kernels.outputs import outputs
from decantkv.scoring.units import BEHIND_PROJECTION, row_factor
from decantkv.scoring.window import AttentionWindow

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MANY_ROWS = 256  # window positions from which on keys are held and rows pass


def perturbation(win: AttentionWindow, *, reduce: str = "sum", weigh: str = "value", power: int = 2) -> Tensor:
    """DropKV's cost; the formula and the result are `reference.perturbation`'s, as [B, H, N] float32."""
    if by_columns(win, weigh):
        return _column_costs(win, reduce, weigh)
    projection = win.output_projection if weigh == "output" else None
    return _scores(win, "perturbation", reduce, output_projection=projection)


def attention_mass(
    win: AttentionWindow, *, reduce: str = "sum", row_pool: str = "none", kernel_size: int = 1
) -> Tensor:
    """SnapKV's attention mass; the formula is `reference.attention_mass`'s, as [B, H, N] float32, 0 at pads."""
    if by_columns(win) and (row_pool == "none" or kernel_size == 1):
        return _column_costs(win, reduce, None)
    return _scores(win, "attention_mass", reduce, row_pool=row_pool, kernel_size=kernel_size)


def alignment(win: AttentionWindow, *, reduce: str = "sum") -> Tensor:
    """AnDPro's token form; the formula is `reference.alignment`'s, as [B, H, N] float32."""
    return _scores(win, "alignment", reduce)


def chunk_alignment(
    win: AttentionWindow, *, reduce: str = "sum", row_pool: str = "max", kernel_size: int = 7, chunk: int = 4
) -> Tensor:
    """AnDPro's chunk form; the formula is `reference.chunk_alignment`'s, as [B, H, N] float32."""
    return _scores(win, "chunk_alignment", reduce, row_pool=row_pool, kernel_size=kernel_size, chunk=chunk)


def unsupported(
    win: AttentionWindow,
    *,
    quantity: str,
    reduce: str = "sum",
    weigh: str = "value",
    pooled: bool = False,
    power: int = 2,
) -> str | None:
    """Return the reason why the kernels cannot take this input, or None if they can."""
    if quantity not in kernels.QUANTITIES:
        return f"no kernel computes {quantity}"
    if reduce not in ("sum", "max"):
        return f"no kernel reduces rows by {reduce}"
    if not (win.k.is_cuda or kernels.INTERPRETED):
        return f"the tensors are on {win.k.device}, the kernels run on a GPU"
    if win.mask is not None:
        return "the window has a mask that is not plainly causal"
    if not win.q.dtype == win.k.dtype == win.v.dtype or win.k.dtype not in _DTYPES:
        return f"q, k, v are {win.q.dtype}, {win.k.dtype}, {win.v.dtype}, not all one of bfloat16, float16, float32"
    if max(win.k.shape[3], win.v.shape[3]) > kernels.MAX_DIM:
        return f"head_dim {max(win.k.shape[3], win.v.shape[3])} is above {kernels.MAX_DIM}"
    if win.k.stride(3) != 1 or win.v.stride(3) != 1:
        return "the last dimension of k or v is not contiguous"
    if power != 2:
        return "no kernel sums shifts that are not squared"
    if weigh in BEHIND_PROJECTION and win.output_projection is None:
        return "there is no output_projection to weigh by; pass W_O as [HQ, Dv, E]"
    if weigh == "stream" and win.stream_norm is None:
        return "there is no stream_norm to divide by; pass squared norms as [B, w]"
    if win.row_weights is not None and (quantity not in ("perturbation", "attention_mass") or pooled):
        return f"no kernel weighs the rows of {quantity}"
    if by_columns(win, weigh) and win.k.dtype == torch.float32 and max(win.k.shape[3], win.v.shape[3]) > 128:
        return f"head_dim {max(win.k.shape[3], win.v.shape[3])} is above 128"
    return None


def by_columns(win: AttentionWindow, weigh: str = "value") -> bool:
    """Return whether keys are held while rows pass: if rows are many, or each has a factor."""
    return win.window >= MANY_ROWS or win.row_weights is not None or weigh not in ("value", "output")


def _column_costs(win: AttentionWindow, reduce: str, weigh: str | None) -> Tensor:
    """The costs in the unit `weigh`, or the weights where it is None."""
    start = None if win.lengths is None else win.kv_len - win.lengths.to(win.k.device)
    common: dict[str, Any] = {
        "scale": win.scale,
        "start": start,
        "softcap": win.softcap,
        "sink_logits": win.sink_logits,
    }
    out, lse = win.out, win.lse
    if lse is None or (out is None and weigh is not None):
        out, lse = outputs(win.q, win.k, win.v, **common)
    if weigh is None:
        factor, out, projection = row_factor(win), None, None
    else:
        assert out is not None
        grouped = out.reshape(win.batch, win.num_kv_heads, win.group_size, win.window, -1).float()
        factor = row_factor(win, grouped, weigh)
        projection = win.output_projection if weigh in BEHIND_PROJECTION else None
    if factor is not None:
        shape = (win.batch, win.num_kv_heads, win.group_size, win.window)
        factor = factor.float().expand(shape).reshape(win.q.shape[:3])
    return column_costs(
        win.q, win.k, win.v, lse=lse, out=out, factor=factor, reduce=reduce, output_projection=projection, **common
    )


def _scores(win: AttentionWindow, quantity: str, reduce: str, **options: Any) -> Tensor:
    start = None
    if win.lengths is not None:
        start = win.kv_len - win.lengths.to(win.k.device)
    return kernels.window_scores(
        win.q, win.k, win.v, scale=win.scale, start=start, softcap=win.softcap, sink_logits=win.sink_logits,
        out=win.out, lse=win.lse, quantity=quantity, reduce=reduce, **options,
    )  # fmt: skip
