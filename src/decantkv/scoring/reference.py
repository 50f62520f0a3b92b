"""The specification: every score in the paper's symbols, in the inputs' precision but never below float32.

Nothing here is fast. The tiled and the Triton implementations are judged against these functions in float64; these
functions are judged against an oracle that deletes a key and recomputes the attention (tests/oracle.py).
Tensors of rows are [B, H, g, w, N]: batch, KV head, query head of the group, window position, key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decantkv.scoring.window import AttentionWindow


class Softmax(NamedTuple):
    """The softmax of every row, with the largest key kept apart from the rest.

    Writing the row's output without its largest key, instead of subtracting that key from the full output, is what
    keeps attention sinks exact: at p = 0.9999 the subtraction has no digits left.
    """

    p: Tensor  # [B, H, g, w, N] weights; 0 where a row does not see a key
    odds: Tensor  # [B, H, g, w, N] p/(1 − p); 0 at the largest key
    a: Tensor  # [B, H, g, w, Dv] output Σ p v
    top: Tensor  # [B, H, g, w, 1] index of the largest key
    p_top: Tensor  # [B, H, g, w, 1] its weight
    a_rest: Tensor  # [B, H, g, w, Dv] the output with the largest key left out and the rest renormalised
    seen: Tensor  # [B, H, g, w, 1] bool: the row sees a key at all


def logits(win: AttentionWindow, dtype: torch.dtype) -> Tensor:
    """s_ij = scale · ⟨q_i, k_j⟩, soft-capped where the model does so, −inf where row i does not see key j."""
    q = win.grouped_q().to(dtype)
    s = win.scale * (q @ win.k.to(dtype)[:, :, None].mT)
    if win.softcap is not None:
        s = win.softcap * torch.tanh(s / win.softcap)
    return s.masked_fill(~win.visible(), -torch.inf)


def softmax(win: AttentionWindow) -> Softmax:
    """The rows' softmax; a learned sink logit counts as one more key, with value 0."""
    dtype = torch.promote_types(torch.promote_types(win.k.dtype, win.v.dtype), torch.float32)
    s = logits(win, dtype)
    v = win.v.to(dtype)[:, :, None]
    m, top = s.max(-1, keepdim=True)
    rest = s.scatter(-1, top, -torch.inf)
    m_rest = rest.amax(-1, keepdim=True)
    sink = None
    if win.sink_logits is not None:
        sink = win.sink_logits.to(dtype).view(1, win.num_kv_heads, win.group_size, 1, 1).expand_as(m_rest)
        m_rest = torch.maximum(m_rest, sink)
    seen = m > -torch.inf
    m, m_rest = _finite(m), _finite(m_rest)
    e_rest = torch.exp(rest - m_rest)
    l_rest = e_rest.sum(-1, keepdim=True)
    if sink is not None:
        l_rest = l_rest + torch.exp(sink - m_rest)
    a_rest = (e_rest @ v) / l_rest.where(l_rest > 0, 1.0)  # a row that sees one key has output 0 without it
    z = 1 + torch.where(l_rest > 0, l_rest * torch.exp(m_rest - m), 0.0)
    p_top = seen / z
    e = torch.exp(rest - m)  # ≤ 1 ≤ z − e: only the largest key can exceed ½
    odds = e / (z - e)
    p = (e / z).scatter(-1, top, p_top)
    v_top = v.expand(*s.shape[:3], *v.shape[3:]).gather(3, top.expand(*top.shape[:-1], v.shape[-1]))
    a = p_top * v_top + (1 - p_top) * a_rest
    return Softmax(p, odds, a, top, p_top, a_rest, seen)


def perturbation(win: AttentionWindow, *, reduce: str = "sum") -> Tensor:
    """DropKV's cost s_j = (1/g) Σ_i [ p_ij/(1−p_ij) · ‖a_i − v_j‖ ]² (the paper's Lemma 1 and §3.3).

    `reduce="max"` takes the largest row instead of the sum over the window and the mean over the group.

    Returns:
        [B, H, N] in the precision of the computation.
    """
    rows = softmax(win)
    v = win.v.to(rows.a.dtype)
    distance = torch.cdist(rows.a.flatten(2, 3), v, compute_mode="donot_use_mm_for_euclid_dist")
    cost = rows.odds * distance.view_as(rows.odds)
    v_top = v[:, :, None].expand(*rows.odds.shape[:3], *v.shape[2:])
    v_top = v_top.gather(3, rows.top.expand(*rows.top.shape[:-1], v.shape[-1]))
    # Lemma 1 in its other form, p·‖a₋ⱼ − v_j‖, for the one key whose odds may be huge.
    cost_top = rows.p_top * torch.linalg.vector_norm(rows.a_rest - v_top, dim=-1, keepdim=True)
    return reduce_rows(cost.scatter(-1, rows.top, cost_top).square(), reduce)


def attention_mass(win: AttentionWindow, *, reduce: str = "sum") -> Tensor:
    """SnapKV's (1/g) Σ_i p_ij, or with `reduce="max"` the largest p_ij over the rows.

    Returns:
        [B, H, N] in the precision of the computation.
    """
    return reduce_rows(softmax(win).p, reduce)


def reduce_rows(rows: Tensor, reduce: str) -> Tensor:
    """[B, H, g, w, N] to [B, H, N]: sum over the window and mean over the group, or the maximum over both."""
    return rows.sum(3).mean(2) if reduce == "sum" else rows.amax((2, 3))


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x == -torch.inf, 0.0)
