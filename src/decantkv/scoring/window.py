"""The attention window: the tensors of one attention call that methods and implementations score."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

Rotate = Callable[[Tensor, Tensor], Tensor]  # (x [B, H, T, D], positions [T] or [B, T] int64, negative too) -> x turned


@dataclass(frozen=True)
class AttentionWindow:
    """The last w queries of a prompt with all of its keys and values.

    A *row* is one of the g·w (query head, window position) pairs that share a KV head. Row i of the window stands
    at key position N − w + i and sees the keys up to it. Pads, if any, are the leftmost keys of a batch row.

    Attributes:
        q: [B, HQ, w, D] queries as the model's attention used them, after norms and RoPE.
        k: [B, H, N, D] keys, one per KV head, never repeated. The last dimension is contiguous, the rest free.
        v: [B, H, N, Dv] values.
        scale: factor of q·k before the softmax.
        lengths: [B] int64, the real keys of each batch row, or None if all N are real.
        softcap: c of c·tanh(s/c) applied to the scaled logits, or None.
        sink_logits: [HQ] a learned logit per query head that joins the softmax's denominator with value 0, or None.
        mask: [B or 1, 1, w, N] bool, True where a row sees a key, or None for causal with the pads hidden. A mask
            is given only where the model's own differs from that.
        out: [B, HQ, w, Dv] the model's own output of these rows, or None. A hint: an implementation may use it.
        lse: [B, HQ, w] float32, the natural log of the same rows' softmax denominators, or None. A hint.
        layer_idx: which layer this is, for methods whose choice depends on it.
        queries: [B, HQ, N, D] the queries of the whole prompt, of which `q` is the end, or None. Only methods that
            name "queries" among their `needs` look at it.
        output_projection: [HQ, Dv, E] the slice of W_O that each query head's output goes through, or None ("W_O").
        rotate: turns vectors that carry RoPE by a number of positions, R(δ)x, or None ("rotate").
        column_mass: [B, H, M] float32, `streams.column_mass` of the first M ≤ N tokens alone, or None. A hint: a
            caller that scores a prompt more than once need not sum up its beginning again.
        row_weights: [B, HQ or 1, w] float32, not negative: the factor of each row's cost before rows are reduced, or
            None for 1 everywhere. A row of weight 0, such as a pad's query, contributes nothing.
        stream_norm: [B, w] float32, the squared norm of the residual stream before the block at each window position,
            or None ("stream").
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    lengths: Tensor | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
    mask: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None
    layer_idx: int = 0
    queries: Tensor | None = None
    output_projection: Tensor | None = None
    rotate: Rotate | None = None
    column_mass: Tensor | None = None
    row_weights: Tensor | None = None
    stream_norm: Tensor | None = None

    @functools.cached_property
    def batch(self) -> int:
        """B."""
        return self.k.shape[0]

    @functools.cached_property
    def num_kv_heads(self) -> int:
        """H."""
        return self.k.shape[1]

    @functools.cached_property
    def group_size(self) -> int:
        """g = HQ/H, the query heads that share a KV head."""
        return self.q.shape[1] // self.k.shape[1]

    @functools.cached_property
    def window(self) -> int:
        """w, the query positions."""
        return self.q.shape[2]

    @functools.cached_property
    def kv_len(self) -> int:
        """N."""
        return self.k.shape[2]

    def grouped_q(self) -> Tensor:
        """[B, H, g, w, D]: the queries beside the KV head they share."""
        return self.q.reshape(*self.k.shape[:2], self.q.shape[1] // self.k.shape[1], *self.q.shape[2:])

    def last(self, rows: int) -> AttentionWindow:
        """The same call seen by its last `rows` queries alone."""
        if rows >= self.window:
            return self
        of_rows = {"out": self.out, "lse": self.lse, "mask": self.mask, "row_weights": self.row_weights}
        cut: dict[str, Any] = {name: x if x is None else x[:, :, -rows:] for name, x in of_rows.items()}
        stream_norm = self.stream_norm if self.stream_norm is None else self.stream_norm[:, -rows:]
        return replace(self, q=self.q[:, :, -rows:], stream_norm=stream_norm, **cut)

    def bare(self) -> AttentionWindow:
        """The same call without hints."""
        return replace(self, out=None, lse=None, column_mass=None)

    def real(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[B or 1, stop − start] bool: which keys are no pads."""
        position = torch.arange(start, self.kv_len if stop is None else stop, device=self.k.device)
        if self.lengths is None:
            return torch.ones_like(position, dtype=torch.bool)[None]
        return position >= (self.kv_len - self.lengths.to(position.device))[:, None]

    def droppable(self, first: int) -> Tensor:
        """[B or 1, N] bool: the real keys behind the first `first` ones and before the window."""
        position = torch.arange(self.kv_len, device=self.k.device)
        start = 0 if self.lengths is None else self.kv_len - self.lengths.to(position.device)[:, None]
        droppable = (position >= start + first) & (position < self.kv_len - self.window)
        return droppable.view(-1, self.kv_len)

    def chunk_sums(self, scores: Tensor, chunk: int) -> Tensor:
        """Give every key before the window its chunk's sum; chunks count from a row's first real key.

        Args:
            scores: [B, H, N]. The window's keys become 0.
        """
        stop, sums = self.kv_len - self.window, torch.zeros_like(scores)
        lengths = [self.kv_len] * self.batch if self.lengths is None else self.lengths.tolist()
        for row, length in enumerate(lengths):
            real = scores[row, :, self.kv_len - length : stop]
            if real.shape[1] == 0:  # nothing before the window
                continue
            ragged = torch.nn.functional.pad(real, (0, -real.shape[1] % chunk))
            total = ragged.view(self.num_kv_heads, -1, chunk).sum(-1)
            sums[row, :, self.kv_len - length : stop] = total.repeat_interleave(chunk, 1)[:, : real.shape[1]]
        return sums

    def visible(self, start: int = 0, stop: int | None = None) -> Tensor:
        """[B or 1, 1, 1, w, stop − start] bool: which of the keys [start, stop) each row sees."""
        kv_len, window = self.k.shape[2], self.q.shape[2]
        stop = kv_len if stop is None else stop
        if self.mask is not None:
            shown = self.mask[:, None, :, :, start:stop]
        else:
            row = torch.arange(kv_len - window, kv_len, device=self.k.device)
            shown = (torch.arange(start, stop, device=self.k.device) <= row[:, None])[None, None, None]
        return shown if self.lengths is None else shown & self.real(start, stop)[:, None, None, None]


def make_window(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    lengths: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    layer_idx: int = 0,
    queries: Tensor | None = None,
    output_projection: Tensor | None = None,
    rotate: Rotate | None = None,
    row_weights: Tensor | None = None,
    stream_norm: Tensor | None = None,
) -> AttentionWindow:
    """Check the tensors of an attention call against each other and bind them; shapes as in `AttentionWindow`.

    Args:
        scale: None means 1/√D.

    Raises:
        TypeError: a tensor is not a floating-point tensor.
        ValueError: shapes, devices or values that do not fit together; the message names the argument.
    """
    for name, tensor in (("q_window", q_window), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise TypeError(f"{name}: expected a floating-point tensor, got {_describe(tensor)}")
        if tensor.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions [batch, heads, positions, head_dim], got {tensor.dim()}")
    batch, heads, kv_len, head_dim = k.shape
    if q_window.shape[0] != batch or q_window.shape[3] != head_dim:
        raise ValueError(
            f"q_window: expected [{batch}, heads, window, {head_dim}] to fit k, got {list(q_window.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: expected [{batch}, {heads}, {kv_len}, head_dim] to fit k, got {list(v.shape)}")
    if heads == 0 or q_window.shape[1] % heads or q_window.shape[1] == 0:
        raise ValueError(f"q_window: expected a multiple of k's {heads} KV heads, got {q_window.shape[1]} heads")
    if not 1 <= q_window.shape[2] <= kv_len:
        raise ValueError(f"q_window: expected 1 to {kv_len} window positions (k's length), got {q_window.shape[2]}")
    if len({q_window.device, k.device, v.device}) != 1:
        raise ValueError(f"q_window, k, v: expected one device, got {q_window.device}, {k.device}, {v.device}")
    scale = 1.0 / math.sqrt(head_dim) if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"scale: expected a finite number, got {scale}")
    if softcap is not None and not 0 < softcap < math.inf:  # NaN excluded
        raise ValueError(f"softcap: expected a positive finite number or None, got {softcap}")
    if mask is not None:
        fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[1:] == (1, q_window.shape[2], kv_len)
        if not fits or mask.dtype != torch.bool:
            raise ValueError(
                f"mask: expected bool [1 or {batch}, 1, {q_window.shape[2]}, {kv_len}], got {_describe(mask)}"
            )
    if rotate is not None and not callable(rotate):
        raise TypeError(f"rotate: expected a function (x, positions) -> x or None, got {_describe(rotate)}")
    of_rows, per_head = tuple(q_window.shape[:3]), isinstance(row_weights, Tensor) and row_weights.shape[1:2] != (1,)
    width = output_projection.shape[-1:] if isinstance(output_projection, Tensor) else (0,)
    for name, given, shape in (
        ("lengths", lengths, (batch,)),
        ("sink_logits", sink_logits, of_rows[1:2]),
        ("out", out, (*of_rows, v.shape[3])),
        ("lse", lse, of_rows),
        ("queries", queries, (*of_rows[:2], kv_len, head_dim)),
        ("output_projection", output_projection, (of_rows[1], v.shape[3], *width)),
        ("row_weights", row_weights, of_rows if per_head else (batch, 1, of_rows[2])),
        ("stream_norm", stream_norm, (batch, of_rows[2])),
    ):
        if given is not None and (not isinstance(given, Tensor) or tuple(given.shape) != shape):
            raise ValueError(f"{name}: expected a tensor {list(shape)}, got {_describe(given)}")
    extra = (out, lse, layer_idx, queries, output_projection, rotate)
    return AttentionWindow(
        q_window, k, v, scale, lengths, softcap, sink_logits, mask, *extra,
        row_weights=row_weights, stream_norm=stream_norm,
    )  # fmt: skip


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return type(value).__name__
