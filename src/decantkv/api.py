"""`score` for engines that have only tensors. It imports neither transformers nor triton until they are needed."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from decantkv.base.options import Impl, expect_choice
from decantkv.methods import Method, resolve
from decantkv.scoring.window import Rotate, make_window


def score(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: str | Method = "dropkv",
    scale: float | None = None,
    lengths: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    queries: Tensor | None = None,
    output_projection: Tensor | None = None,
    rotate: Rotate | None = None,
    row_weights: Tensor | None = None,
    stream_norm: Tensor | None = None,
    impl: Impl = "auto",
    **options: Any,
) -> Tensor:
    """Score every cached token by how costly it is to lose.

    Args:
        q_window: [B, HQ, w, D] the prompt's last w queries, as the attention used them (after norms and RoPE).
        k: [B, H, N, D] keys; HQ is a multiple of H. Last dimension contiguous, other strides free.
        v: [B, H, N, Dv] values.
        method: a name, "name:preset", or a `Method`; `options` are the named method's own.
        scale: factor of q·k; None means 1/√D.
        lengths: [B] real keys of each batch row; the N − length leftmost keys are pads.
        softcap: c of c·tanh(s/c) on the scaled logits, or None.
        sink_logits: [HQ] learned logits that join the softmax's denominator with value 0, or None.
        mask: [B or 1, 1, w, N] bool, True where a window row sees a key; None for causal with the pads hidden.
        out: [B, HQ, w, Dv] the attention's own output of the window's rows; with `lse`, lets kernels skip a pass.
        lse: [B, HQ, w] float32 natural log of the rows' softmax denominators.
        queries: [B, HQ, N, D] every query of the prompt, for the methods whose `needs` name them.
        output_projection: [HQ, Dv, E] each query head's slice of W_O, for methods that need it.
        rotate: turns RoPE vectors [B, H, T, D] by [T] or [B, T] positions, for methods that need it.
        row_weights: [B, HQ or 1, w] float32, not negative: each row's factor before rows are reduced; None: 1.
        stream_norm: [B, w] float32 squared norms of the residual stream at the window's positions, for methods that
            need it.
        impl: "auto", "reference", "torch" or "triton".

    Returns:
        [B, H, N] float32, unpooled; higher = keep.

    Raises:
        TypeError, ValueError: an argument out of its range; the message names it, what was expected and what came.
    """
    expect_choice("impl", impl, get_args(Impl))
    _check_lengths(lengths, k)
    chosen = resolve(method, **options)
    win = make_window(
        q_window,
        k,
        v,
        scale=scale,
        lengths=lengths,
        softcap=softcap,
        sink_logits=sink_logits,
        mask=mask,
        out=out,
        lse=lse,
        queries=queries,
        output_projection=output_projection,
        rotate=rotate,
        row_weights=row_weights,
        stream_norm=stream_norm,
    )
    _check_not_negative("row_weights", row_weights)
    _check_not_negative("stream_norm", stream_norm)
    return chosen.score(win, impl=impl)


def _check_not_negative(name: str, numbers: Tensor | None) -> None:
    """Raise unless all numbers are finite and not negative; on CUDA the host waits once."""
    if numbers is not None and not bool((numbers.isfinite() & (numbers >= 0)).all()):
        raise ValueError(f"{name}: expected finite numbers of at least 0, got others")


def _check_lengths(lengths: Tensor | None, k: Tensor) -> None:
    """Raise unless `lengths` are whole numbers, at least one real key per row; on CUDA the host waits once."""
    if not isinstance(lengths, Tensor) or not isinstance(k, Tensor) or k.dim() != 4:
        return  # the window's own check names what is wrong
    wanted = f"whole numbers from 1 to {k.shape[2]}"
    if lengths.is_floating_point() or lengths.is_complex() or lengths.dtype == torch.bool:
        raise TypeError(f"lengths: expected {wanted}, got {str(lengths.dtype).removeprefix('torch.')}")
    if not bool(((lengths >= 1) & (lengths <= k.shape[2])).all()):
        raise ValueError(f"lengths: expected {wanted}, got {lengths.tolist()}")
