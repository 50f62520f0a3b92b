"""The specification: every score in the paper's symbols, in the inputs' precision but never below float32.

Nothing here is fast. The tiled and the Triton implementations are judged against these functions in float64; these
functions are judged against an oracle that deletes a key and recomputes the attention (theory/oracle.py).
Tensors of rows are [B, H, g, w, N]: batch, KV head, query head of the group, window position, key.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from decantkv.scoring.units import BEHIND_PROJECTION, row_factor
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


def perturbation(win: AttentionWindow, *, reduce: str = "sum", weigh: str = "value", power: int = 2) -> Tensor:
    """DropKV's cost s_j = (1/g) Σ_i [ p_ij/(1−p_ij) · ‖a_i − v_j‖ ]² (the paper's Lemma 1 and §3.3).

    `reduce="max"` takes the largest row instead of the sum over the window and the mean over the group.
    `weigh` names the unit of a row's shift Δ = p/(1−p)·(a − v): "value" is ‖Δ‖², "output" ‖W_O Δ‖² behind each query
    head's own slice of W_O; "head" divides ‖Δ‖² by ‖a‖²; "block" divides ‖W_O Δ‖² by ‖Σ W_O a‖² over all query heads
    of the position, without a bias; "stream" divides it by the window's `stream_norm`. A row whose divisor is 0 costs
    nothing. `power=1` sums shifts, not their squares, in the units "value" and "output".

    Returns:
        [B, H, N] in the precision of the computation.
    """
    rows = softmax(win)
    v = win.v.to(rows.a.dtype)[:, :, None].expand(-1, -1, win.group_size, -1, -1)
    v_top = v.gather(3, rows.top.expand(*rows.top.shape[:-1], v.shape[-1]))
    a, rest_top = rows.a, rows.a_rest - v_top
    factor = row_factor(win, a, weigh)
    if weigh in BEHIND_PROJECTION:
        a, v, rest_top = (project(x, win) for x in (a, v, rest_top))
    distance = torch.cdist(a, v, compute_mode="donot_use_mm_for_euclid_dist")
    # Lemma 1 in its other form, p·‖a₋ⱼ − v_j‖, for the one key whose odds may be huge.
    cost_top = rows.p_top * torch.linalg.vector_norm(rest_top, dim=-1, keepdim=True)
    return reduce_rows((rows.odds * distance).scatter(-1, rows.top, cost_top).pow(power), reduce, factor)


def attention_mass(
    win: AttentionWindow, *, reduce: str = "sum", row_pool: str = "none", kernel_size: int = 1
) -> Tensor:
    """SnapKV's (1/g) Σ_i p_ij, or with `reduce="max"` the largest p_ij over the rows.

    `row_pool` and `kernel_size` pool every row's p over the keys before the window, ahead of the reduction.

    Returns:
        [B, H, N] in the precision of the computation.
    """
    return reduce_rows(pool_rows(softmax(win).p, win, row_pool, kernel_size), reduce, row_factor(win))


def alignment(win: AttentionWindow, *, reduce: str = "sum") -> Tensor:
    """AnDPro's token form (1/g) Σ_i p_ij ⟨v_j, a_i⟩/‖a_i‖; 0 where a row's output is 0. May be negative.

    Returns:
        [B, H, N] in the precision of the computation.
    """
    rows = softmax(win)
    norm = torch.linalg.vector_norm(rows.a, dim=-1, keepdim=True)
    direction = rows.a / norm.where(norm > 0, 1.0)
    along = direction @ win.v.to(rows.a.dtype)[:, :, None].mT
    return reduce_rows(rows.p * along, reduce, row_factor(win))


def chunk_alignment(
    win: AttentionWindow, *, reduce: str = "sum", row_pool: str = "max", kernel_size: int = 7, chunk: int = 4
) -> Tensor:
    """AnDPro's chunk form: (1/g) Σ_i ⟨z_ci, u_i⟩ for a key's chunk c, z_ci = Σ_{j∈c} p̃_ij v_j, u_i = Σ_c z_ci.

    p̃ is p pooled along each row. Chunks count from a row's first real key; the first chunk and the window take no
    part in u. The window's keys score 0.

    Returns:
        [B, H, N] in the precision of the computation.
    """
    p = pool_rows(softmax(win).p, win, row_pool, kernel_size)
    v = win.v.to(p.dtype)[:, :, None]
    droppable = win.droppable(chunk)[:, None, None, None]
    u = (p * droppable) @ v
    tokens = reduce_rows(p * (u @ v.mT), reduce, row_factor(win))
    return win.chunk_sums(tokens, chunk)


def project(x: Tensor, win: AttentionWindow) -> Tensor:
    """[B, H, g, M, Dv] to [B, H, g, M, E]: each query head's slice of W_O."""
    if win.output_projection is None:
        raise ValueError("output_projection: expected W_O as [HQ, Dv, E], got None")
    w_o = win.output_projection.to(x.dtype)
    return x @ w_o.view(win.num_kv_heads, win.group_size, *w_o.shape[1:])


def pool_rows(p: Tensor, win: AttentionWindow, row_pool: str, kernel_size: int) -> Tensor:
    """Pool [B, H, g, w, N] along the keys before the window, zeros beyond the edges; the window's keys as they are."""
    stop = win.kv_len - win.window
    if row_pool == "none" or kernel_size == 1 or stop == 0:
        return p
    head = torch.nn.functional.pad(p[..., :stop], (kernel_size // 2, kernel_size // 2))
    near = head.unfold(-1, kernel_size, 1)  # [B, H, g, w, stop, kernel]
    return torch.cat([near.amax(-1) if row_pool == "max" else near.mean(-1), p[..., stop:]], dim=-1)


def reduce_rows(rows: Tensor, reduce: str, factor: Tensor | None = None) -> Tensor:
    """[B, H, g, w, N] to [B, H, N]: sum over the window and mean over the group, or the maximum over both.

    Args:
        factor: of `units.row_factor`; a row of factor 0 contributes 0, whatever it holds.
    """
    if factor is not None:
        factor = factor[..., None].to(rows.dtype)
        rows = (rows * factor).masked_fill(factor == 0, 0.0)
    return rows.sum(3).mean(2) if reduce == "sum" else rows.amax((2, 3))


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x == -torch.inf, 0.0)
