"""The judge: delete keys, renormalise, recompute the attention, all in float64.

It shares neither code nor algebra with `decantkv.scoring`: no p/(1 − p), no expanded norms.
Shapes and meanings of the arguments are those of an attention window: q_window [B, HQ, w, D], k [B, H, N, D],
v [B, H, N, Dv], lengths [B], sink_logits [HQ], mask [B or 1, 1, w, N] bool. Row i of the window stands at key
N − w + i, sees the keys up to it, and pads are leftmost. Arguments are trusted: a wrong shape fails in torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Evicted = Tensor | Sequence[int]  # [B, H, N] bool, True = gone; or the key indices gone from every head


def attention(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    lengths: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    mask: Tensor | None = None,
    without: Evicted = (),
) -> Tensor:
    """The rows' outputs over the keys that are left when `without` has been deleted.

    A row that sees no key at all has output 0; with a learned sink logit that is also what the softmax gives.

    Returns:
        [B, HQ, w, Dv] float64.
    """
    batch, num_kv_heads, kv_len, _ = k.shape
    group_size = q_window.shape[1] // num_kv_heads
    gone = _as_mask(without, k)
    output = torch.zeros(*q_window.shape[:3], v.shape[3], dtype=torch.float64, device=q_window.device)
    for b in range(batch):
        pads = 0 if lengths is None else kv_len - int(lengths[b])
        row_mask = None if mask is None else mask[b if mask.shape[0] > 1 else 0, 0]
        for h in range(num_kv_heads):
            left = torch.nonzero(~gone[b, h, pads:]).flatten() + pads
            for hq in range(h * group_size, (h + 1) * group_size):
                sink = None if sink_logits is None else sink_logits[hq].double()
                output[b, hq] = _one_head(
                    q_window[b, hq].double(), k[b, h, left].double(), v[b, h, left].double(),
                    left, kv_len, scale, softcap, sink, None if row_mask is None else row_mask[:, left],
                )  # fmt: skip
    return output


def joint_shift(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    evicted: Evicted,
    *,
    scale: float,
    lengths: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """‖a_i − a_i(without the evicted set)‖ of every row: what losing the whole set at once does.

    Returns:
        [B, HQ, w] float64.
    """
    options = {"lengths": lengths, "softcap": softcap, "sink_logits": sink_logits, "mask": mask}
    full = attention(q_window, k, v, scale=scale, **options)  # type: ignore[arg-type]  # one dict, three types
    left = attention(q_window, k, v, scale=scale, without=evicted, **options)  # type: ignore[arg-type]
    shift: Tensor = torch.linalg.vector_norm(full - left, dim=-1)
    return shift


def leave_one_out_cost(
    q_window: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    lengths: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """(1/g) Σ_i ‖a_i − a_i(without j)‖² over the g·w rows of a KV head, one attention per key.

    Pads cost nothing. Quadratic in N and meant for N of a few hundred.

    Returns:
        [B, H, N] float64.
    """
    options = {"lengths": lengths, "softcap": softcap, "sink_logits": sink_logits, "mask": mask}
    group_size = q_window.shape[1] // k.shape[1]
    full = attention(q_window, k, v, scale=scale, **options)  # type: ignore[arg-type]  # one dict, three types
    cost = torch.zeros(k.shape[:3], dtype=torch.float64, device=k.device)
    for j in range(k.shape[2]):
        left = attention(q_window, k, v, scale=scale, without=[j], **options)  # type: ignore[arg-type]
        moved = (full - left).square().sum((-1, -2))  # [B, HQ]
        cost[:, :, j] = moved.view(k.shape[0], k.shape[1], group_size).sum(-1) / group_size
    return cost


def _as_mask(evicted: Evicted, k: Tensor) -> Tensor:
    if isinstance(evicted, Tensor):
        return evicted.expand(k.shape[:3])
    gone = torch.zeros(k.shape[:3], dtype=torch.bool, device=k.device)
    gone[:, :, list(evicted)] = True
    return gone


def _one_head(
    q: Tensor,  # [w, D]
    k: Tensor,  # [M, D], only the keys that are left
    v: Tensor,  # [M, Dv]
    position: Tensor,  # [M], where those keys stood
    kv_len: int,
    scale: float,
    softcap: float | None,
    sink: Tensor | None,
    mask: Tensor | None,  # [w, M]
) -> Tensor:
    """[w, Dv]: one head's outputs."""
    s = scale * (q @ k.T)
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if mask is None:
        row = torch.arange(kv_len - len(q), kv_len, device=q.device)
        mask = position[None, :] <= row[:, None]
    s = s.masked_fill(~mask, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink.expand(len(q), 1)], dim=-1)
        v = torch.cat([v, v.new_zeros(1, v.shape[1])])
    p = torch.softmax(s, dim=-1).nan_to_num(0.0)  # a row of −inf alone gives NaN: it sees no key
    return p @ v
