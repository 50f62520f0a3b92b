"""The scores from the fused kernels. What they cannot take, `unsupported` says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decantkv import kernels
from decantkv.scoring.window import AttentionWindow

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def perturbation(win: AttentionWindow, *, reduce: str = "sum", weigh: str = "value") -> Tensor:
    """DropKV's cost; the formula and the result are `reference.perturbation`'s, as [B, H, N] float32."""
    projection = win.output_projection if weigh == "output" else None
    return _scores(win, "perturbation", reduce, output_projection=projection)


def attention_mass(
    win: AttentionWindow, *, reduce: str = "sum", row_pool: str = "none", kernel_size: int = 1
) -> Tensor:
    """SnapKV's attention mass; the formula is `reference.attention_mass`'s, as [B, H, N] float32, 0 at pads."""
    return _scores(win, "attention_mass", reduce, row_pool=row_pool, kernel_size=kernel_size)


def alignment(win: AttentionWindow, *, reduce: str = "sum") -> Tensor:
    """AnDPro's token form; the formula is `reference.alignment`'s, as [B, H, N] float32."""
    return _scores(win, "alignment", reduce)


def chunk_alignment(
    win: AttentionWindow, *, reduce: str = "sum", row_pool: str = "max", kernel_size: int = 7, chunk: int = 4
) -> Tensor:
    """AnDPro's chunk form; the formula is `reference.chunk_alignment`'s, as [B, H, N] float32."""
    return _scores(win, "chunk_alignment", reduce, row_pool=row_pool, kernel_size=kernel_size, chunk=chunk)


def unsupported(win: AttentionWindow, *, quantity: str, reduce: str = "sum", weigh: str = "value") -> str | None:
    """Why the kernels cannot take this input, or None when they can."""
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
    if win.row_weights is not None:
        return "no kernel weighs rows"
    if weigh not in ("value", "output"):
        return f"no kernel measures shifts in the unit {weigh!r}"
    if weigh == "output" and win.output_projection is None:
        return "there is no output_projection to weigh by; pass W_O as [HQ, Dv, E]"
    return None


def _scores(win: AttentionWindow, quantity: str, reduce: str, **options: Any) -> Tensor:
    start = None
    if win.lengths is not None:
        start = win.kv_len - win.lengths.to(win.k.device)
    return kernels.window_scores(
        win.q, win.k, win.v, scale=win.scale, start=start, softcap=win.softcap, sink_logits=win.sink_logits,
        out=win.out, lse=win.lse, quantity=quantity, reduce=reduce, **options,
    )  # fmt: skip
