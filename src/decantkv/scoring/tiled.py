"""The scores in plain torch on any device, streaming tiles of keys so that scratch never grows with N.

Two passes. The first folds tiles into each row's softmax state, which carries the largest key apart from the rest so
that an attention sink stays exact; the second turns each tile into scores. Where the window brings its output and
log-sum-exp, the second alone does. Tensors of rows are [B, H, g, w, T].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from decantkv.scoring.scratch import scratch_bytes
from decantkv.scoring.units import BEHIND_PROJECTION, row_factor
from decantkv.scoring.window import AttentionWindow

TINY = torch.finfo(torch.float32).tiny
CENTRE_KEYS = 64  # how many of the last keys' values are averaged into what all values are taken relative to


class RowState(NamedTuple):
    """A row's softmax over the keys seen so far: the largest key, and the running softmax of all others."""

    m_top: Tensor  # [B, H, g, w] logit of the largest key; −inf before any
    top: Tensor  # [B, H, g, w] its index
    m_rest: Tensor  # [B, H, g, w] largest logit among the others
    l_rest: Tensor  # [B, H, g, w] Σ exp(s − m_rest) over the others
    acc_rest: Tensor  # [B, H, g, w, Dv] Σ exp(s − m_rest) v over the others


class Denominators(NamedTuple):
    """Every row's softmax denominator as z·exp(m), both [B, H, g, w]."""

    m: Tensor
    z: Tensor


def perturbation(win: AttentionWindow, *, reduce: str = "sum", weigh: str = "value", power: int = 2) -> Tensor:
    """DropKV's cost; the formula and the result are `reference.perturbation`'s, as [B, H, N] float32."""
    metric = _output_metric(win) if weigh in BEHIND_PROJECTION else None
    centre = _centre(win)
    if win.out is not None and win.lse is not None:
        return _perturbation_once(win, win.out, win.lse, reduce, weigh, metric, centre, power)
    state = _fold(win, centre)
    v_top = _values_at(win, state.top) - centre
    a_rest = _rest_output(state.acc_rest, state.l_rest, centre)
    below = _denominators_of(state)
    p_top = (state.m_top > -torch.inf) / below.z
    a = p_top[..., None] * v_top + (1 - p_top)[..., None] * a_rest
    a_norm, factor = _squared_norm(a, metric), row_factor(win, a + centre, weigh)
    # Lemma 1 in its other form, p·‖a₋ⱼ − v_j‖, for the one key per row whose odds may be huge.
    cost_top = p_top.square() * _squared_norm(a_rest - v_top, metric).clamp_min(0)
    scores = torch.empty(win.k.shape[:3], dtype=torch.float32, device=win.k.device)
    for start, stop, s in _tiles(win):
        v = _rows_of(win.v, start, stop, centre)
        cross = _times(a if metric is None else a @ metric, v.mT)
        distance = a_norm[..., None] + _squared_norm(v, metric)[..., None, :] - 2 * cross
        e = s.sub_(below.m[..., None]).exp_()  # p/(1 − p) is e/(z − e): no key but the largest exceeds p = ½
        cost = (e / (below.z[..., None] - e)).square_().mul_(distance.clamp_min_(0))
        inside = ((state.top >= start) & (state.top < stop))[..., None]
        place = torch.where(inside, state.top[..., None] - start, 0)
        cost.scatter_(-1, place, torch.where(inside, cost_top[..., None], cost.gather(-1, place)))
        scores[:, :, start:stop] = _reduce(cost if power == 2 else cost.sqrt_(), reduce, factor)
    return _flush_tiny(scores)


def _perturbation_once(
    win: AttentionWindow,
    out: Tensor,
    lse: Tensor,
    reduce: str,
    weigh: str,
    metric: Tensor | None,
    centre: Tensor,
    power: int,
) -> Tensor:
    """The same in one pass over the keys; as exact as `out`, but for dominant keys (p > ½), which need none of it."""
    a, lse = _grouped(win, out), _grouped(win, lse)
    factor, a = row_factor(win, a, weigh), a - centre
    a_norm, times_v = _squared_norm(a, metric), a if metric is None else a @ metric
    p_top, top = torch.zeros_like(lse), torch.zeros_like(lse, dtype=torch.int64)
    l_rest, acc_rest = torch.zeros_like(lse), torch.zeros_like(a)
    if win.sink_logits is not None:
        l_rest += torch.exp(win.sink_logits.to(lse.dtype).view(1, win.num_kv_heads, win.group_size, 1) - _finite(lse))
        acc_rest -= l_rest[..., None] * centre
    scores = torch.empty(win.k.shape[:3], dtype=torch.float32, device=win.k.device)
    for start, stop, s in _tiles(win):
        p = s.sub_(_finite(lse)[..., None]).exp_().clamp_max_(1.0)
        p_tile, place = p.max(-1)
        dominant = p_tile > 0.5  # at most one key per row
        top, p_top = torch.where(dominant, place + start, top), torch.where(dominant, p_tile, p_top)
        p.scatter_(-1, place[..., None], torch.where(dominant, 0.0, p_tile)[..., None])
        v = _rows_of(win.v, start, stop, centre)
        l_rest, acc_rest = l_rest + p.sum(-1), acc_rest + _times(p, v)
        distance = a_norm[..., None] + _squared_norm(v, metric)[..., None, :] - 2 * _times(times_v, v.mT)
        cost = p.div_(1 - p).square_().mul_(distance.clamp_min_(0))
        scores[:, :, start:stop] = _reduce(cost if power == 2 else cost.sqrt_(), reduce, factor)
    rest_top = _rest_output(acc_rest, l_rest, centre) - (_values_at(win, top) - centre)
    cost_top = p_top.square() * _squared_norm(rest_top, metric).clamp_min(0)
    cost_top = cost_top if power == 2 else cost_top.sqrt()
    length = _tile_length(win)
    for start in range(0, win.kv_len, length):
        here = scores[:, :, start : start + length]
        is_top = top[..., None] == torch.arange(start, start + here.shape[2], device=top.device)
        added = _reduce(is_top * cost_top[..., None], reduce, factor).to(torch.float32)
        torch.add(here, added, out=here) if reduce == "sum" else torch.maximum(here, added, out=here)
    return _flush_tiny(scores)


def attention_mass(
    win: AttentionWindow, *, reduce: str = "sum", row_pool: str = "none", kernel_size: int = 1
) -> Tensor:
    """SnapKV's attention mass; the formula is `reference.attention_mass`'s, as [B, H, N] float32."""
    scores = torch.empty(win.k.shape[:3], dtype=torch.float32, device=win.k.device)
    factor = row_factor(win)
    for start, stop, p in _weights(win, _denominators(win), row_pool, kernel_size):
        scores[:, :, start:stop] = _reduce(p, reduce, factor)
    return _flush_tiny(scores)


def alignment(win: AttentionWindow, *, reduce: str = "sum") -> Tensor:
    """AnDPro's token form; the formula is `reference.alignment`'s, as [B, H, N] float32."""
    if win.out is not None and win.lse is not None:
        a, below = _grouped(win, win.out), _denominators(win)
    else:
        state = _fold(win)
        below = _denominators_of(state)
        p_top = ((state.m_top > -torch.inf) / below.z)[..., None]
        a = p_top * _values_at(win, state.top)
        a = a + (1 - p_top) * state.acc_rest / state.l_rest.where(state.l_rest > 0, 1.0)[..., None]
    norm = torch.linalg.vector_norm(a, dim=-1, keepdim=True)
    direction = a / norm.where(norm > 0, 1.0)
    scores = torch.empty(win.k.shape[:3], dtype=torch.float32, device=win.k.device)
    for start, stop, p in _weights(win, below, "none", 1):
        along = _times(direction, _rows_of(win.v, start, stop).mT)
        scores[:, :, start:stop] = _reduce(p.mul_(along), reduce, row_factor(win))
    return _flush_tiny(scores)


def chunk_alignment(
    win: AttentionWindow, *, reduce: str = "sum", row_pool: str = "max", kernel_size: int = 7, chunk: int = 4
) -> Tensor:
    """AnDPro's chunk form; the formula is `reference.chunk_alignment`'s, as [B, H, N] float32."""
    below = _denominators(win)
    droppable = win.droppable(chunk)[:, None, None, None]
    u = torch.zeros(*below.m.shape, win.v.shape[3], dtype=below.m.dtype, device=win.k.device)
    for start, stop, p in _weights(win, below, row_pool, kernel_size):
        u += _times(p.mul_(droppable[..., start:stop]), _rows_of(win.v, start, stop))
    scores = torch.empty(win.k.shape[:3], dtype=torch.float32, device=win.k.device)
    for start, stop, p in _weights(win, below, row_pool, kernel_size):
        along = _times(u, _rows_of(win.v, start, stop).mT)
        scores[:, :, start:stop] = _reduce(p.mul_(along), reduce, row_factor(win))
    return _flush_tiny(win.chunk_sums(scores, chunk))


def _centre(win: AttentionWindow) -> Tensor:
    """[B, H, 1, 1, Dv] the mean of each head's last real values, from which `perturbation` measures all others.

    ‖a − v‖² does not change when a and every v move alike, but ‖a‖² + ‖v‖² − 2⟨a, v⟩ loses what the values share.
    """
    stop = win.k.shape[2]
    start = max(0, stop - CENTRE_KEYS)
    v = _rows_of(win.v, start, stop)
    if win.lengths is None:
        return v.sum(3, keepdim=True) / (stop - start)
    real = win.real(start)[:, None, None, :, None]
    return v.where(real, 0.0).sum(3, keepdim=True) / real.sum(3, keepdim=True)


def _rest_output(acc_rest: Tensor, l_rest: Tensor, centre: Tensor) -> Tensor:
    """The rows' output without their largest key, relative to the centre; −centre, which means 0, without any key."""
    left = (l_rest > 0)[..., None]
    return (acc_rest / l_rest.where(l_rest > 0, 1.0)[..., None]).where(left, -centre)


def _output_metric(win: AttentionWindow) -> Tensor:
    """[H, g, Dv, Dv] W_O W_Oᵀ of each query head, so that ‖x W_O‖² = x M xᵀ without anything of width E per key."""
    if win.output_projection is None:
        raise ValueError("output_projection: expected W_O as [HQ, Dv, E], got None")
    w_o = win.output_projection.to(_dtype(win))
    return (w_o @ w_o.mT).view(win.num_kv_heads, win.group_size, *([win.v.shape[3]] * 2))


def _squared_norm(x: Tensor, metric: Tensor | None) -> Tensor:
    """‖x‖² or x M xᵀ over the last dimension of [B, H, g or 1, M, Dv]."""
    return torch.linalg.vector_norm(x, dim=-1).square() if metric is None else ((x @ metric) * x).sum(-1)


def _dtype(win: AttentionWindow) -> torch.dtype:
    return torch.promote_types(torch.promote_types(win.k.dtype, win.v.dtype), torch.float32)


def _tile_length(win: AttentionWindow) -> int:
    batch, heads, kv_len, head_dim = win.k.shape
    per_head = 2 * heads * (head_dim + win.v.shape[3])
    if win.output_projection is not None:
        per_head += win.q.shape[1] * win.v.shape[3]
    per_key = batch * torch.finfo(_dtype(win)).bits // 8 * (4 * win.q.shape[1] * win.q.shape[2] + per_head)
    return min(kv_len, max(16, scratch_bytes(win.k.device) // max(1, per_key)))


def _rows_of(x: Tensor, start: int, stop: int, centre: Tensor | float = 0.0) -> Tensor:
    """[B, H, N, D] to a tile [B, H, 1, T, D] in the computation's precision, relative to a centre if one is given."""
    tile = x[:, :, None, start:stop].to(torch.promote_types(x.dtype, torch.float32))
    if not isinstance(centre, Tensor):
        return tile
    return tile.sub_(centre) if tile.dtype != x.dtype else tile - centre


def _times(rows: Tensor, shared: Tensor) -> Tensor:
    """[B, H, g, w, A] times [B, H, 1, A, C], the rows of a KV head side by side: nothing is repeated for each."""
    return (rows.flatten(2, 3) @ shared[:, :, 0]).view(*rows.shape[:4], shared.shape[-1])


def _tiles(win: AttentionWindow) -> Iterator[tuple[int, int, Tensor]]:
    """Tiles of keys with their logits [B, H, g, w, T], −inf where a row does not see a key."""
    q = _grouped(win, win.q) * win.scale
    length, kv_len = _tile_length(win), win.k.shape[2]
    for start in range(0, kv_len, length):
        stop = min(start + length, kv_len)
        yield start, stop, _logits(win, q, start, stop)


def _logits(win: AttentionWindow, q: Tensor, start: int, stop: int) -> Tensor:
    s = _times(q, _rows_of(win.k, start, stop).mT)
    if win.softcap is not None:
        s = s.div_(win.softcap).tanh_().mul_(win.softcap)
    return s.masked_fill_(~win.visible(start, stop), -torch.inf)


def _grouped(win: AttentionWindow, rows: Tensor) -> Tensor:
    """[B, HQ, w, …] as [B, H, g, w, …] in the precision of the computation."""
    batch, heads = win.k.shape[:2]
    return rows.reshape(batch, heads, rows.shape[1] // heads, *rows.shape[2:]).to(_dtype(win))


def _denominators(win: AttentionWindow) -> Denominators:
    """The window's own, or those of a first pass that needs no values."""
    if win.lse is not None:
        m = _finite(_grouped(win, win.lse))
        return Denominators(m, torch.ones_like(m))
    return _denominators_of(_fold(replace(win, v=win.v[..., :0])))


def _denominators_of(state: RowState) -> Denominators:
    m = _finite(state.m_top)
    over_top = state.l_rest * torch.exp(_finite(state.m_rest) - m)  # (1 − p)/p of the largest key
    return Denominators(m, 1 + torch.where(state.l_rest > 0, over_top, 0.0))


def _weights(
    win: AttentionWindow, below: Denominators, pool: str, kernel_size: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Tiles of weights p [B, H, g, w, T], pooled along the keys before the window, zeros beyond their edges."""
    q = _grouped(win, win.q) * win.scale
    m, z = below.m[..., None], below.z[..., None]
    length, edge = _tile_length(win), win.kv_len - win.window
    reach = kernel_size // 2 if pool != "none" else 0
    for start in [*range(0, edge, length), *range(edge, win.kv_len, length)]:
        stop = min(start + length, edge if start < edge else win.kv_len)
        low, high = (max(0, start - reach), min(edge, stop + reach)) if start < edge else (start, stop)
        p = _logits(win, q, low, high).sub_(m).exp_().div_(z).clamp_max_(1.0)
        if reach and start < edge:
            p = F.pad(p, (reach - (start - low), reach - (high - stop))).flatten(0, 3)[:, None]
            pooled = F.max_pool1d(p, kernel_size, 1) if pool == "max" else F.avg_pool1d(p, kernel_size, 1)
            p = pooled.view(*m.shape[:4], stop - start)
        yield start, stop, p


def _fold(win: AttentionWindow, centre: Tensor | float = 0.0) -> RowState:
    """First pass: every row's softmax state over all keys, and over its learned sink if the model has one.

    `acc_rest` sums values relative to `centre`, from which a sink's value of 0 is −centre away.
    """
    state: RowState | None = None
    for start, stop, s in _tiles(win):
        m_top, top = s.max(-1)
        s = s.scatter_(-1, top[..., None], -torch.inf)
        m_rest = s.amax(-1)
        e = torch.exp(s - _finite(m_rest)[..., None])
        tile = RowState(m_top, top + start, m_rest, e.sum(-1), _times(e, _rows_of(win.v, start, stop, centre)))
        state = tile if state is None else _merge(win, state, tile, centre)
    if state is None:
        raise ValueError("k: expected at least one key, got none")
    if win.sink_logits is not None:
        sink = win.sink_logits.to(state.m_rest.dtype).view(1, win.num_kv_heads, win.group_size, 1)
        state = _add_rest(state, sink.expand_as(state.m_rest), torch.zeros_like(state.acc_rest) - centre)
    return state


def _merge(win: AttentionWindow, left: RowState, right: RowState, centre: Tensor | float) -> RowState:
    """Join two states; the smaller of the two largest keys joins the rest. Ties keep the lower index."""
    right_wins = right.m_top > left.m_top
    loser = torch.where(right_wins, left.top, right.top)
    m_loser = torch.minimum(left.m_top, right.m_top)
    m = torch.maximum(left.m_rest, right.m_rest)
    scale_left, scale_right = torch.exp(left.m_rest - _finite(m)), torch.exp(right.m_rest - _finite(m))
    state = RowState(
        torch.maximum(left.m_top, right.m_top),
        torch.where(right_wins, right.top, left.top),
        m,
        left.l_rest * scale_left + right.l_rest * scale_right,
        left.acc_rest * scale_left[..., None] + right.acc_rest * scale_right[..., None],
    )
    return _add_rest(state, m_loser, _values_at(win, loser) - centre)


def _add_rest(state: RowState, s: Tensor, v: Tensor) -> RowState:
    """One more key per row, with logit s [B, H, g, w] and value v [B, H, g, w, Dv], joins the rest."""
    m = torch.maximum(state.m_rest, s)
    scale, e = torch.exp(state.m_rest - _finite(m)), torch.exp(s - _finite(m))
    return state._replace(
        m_rest=m,
        l_rest=state.l_rest * scale + e,
        acc_rest=state.acc_rest * scale[..., None] + e[..., None] * v,
    )


def _values_at(win: AttentionWindow, index: Tensor) -> Tensor:
    """The values [B, H, g, w, Dv] of one key per row."""
    flat = index.flatten(2)[..., None].expand(-1, -1, -1, win.v.shape[3])
    return win.v.gather(2, flat).to(_dtype(win)).view(*index.shape, win.v.shape[3])


def _reduce(rows: Tensor, reduce: str, factor: Tensor | None) -> Tensor:
    """`reference.reduce_rows`, in place."""
    if factor is not None:
        factor = factor[..., None]
        rows = rows.mul_(factor).masked_fill_(factor == 0, 0.0)
    return rows.sum(3).mean(2) if reduce == "sum" else rows.amax((2, 3))


def _flush_tiny(scores: Tensor) -> Tensor:
    """Numbers below float32's smallest normal one depend on the device; they become 0."""
    return scores.masked_fill_(scores.abs() < TINY, 0.0)


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x == -torch.inf, 0.0)
