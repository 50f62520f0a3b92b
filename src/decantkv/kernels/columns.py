"""Costs of keys for many queries: a program holds keys, queries pass by, and no weight of a row is ever stored.

A row's dominant key needs the output without it, which no rounded output can give. The launch notes such keys, at most
one per row; their rows alone attend once more, without them, and their costs are added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from decantkv.kernels.blocks import Device, padded_dim
from decantkv.kernels.launcher import on_device
from decantkv.kernels.outputs import outputs
from decantkv.kernels.plan import device_of, precision_of
from decantkv.kernels.primitives import LOG2E, TINY, dot, logit_factors, to_logits2
from decantkv.kernels.weigh import norm_cut, norm_kernel, output_metric

# Up to this weight an output is good to 1 % of the cost, in 32 and in 16 bits; at most one key of a row weighs more.
DOMINANT, DOMINANT_ROUNDED = 0.9, 0.75
CENTRE_KEYS = 64  # whose values' mean is a head's centre


class Tiles(NamedTuple):
    """Keys a program holds, rows it reads at once, warps, stages."""

    held: int
    passing: int
    warps: int
    stages: int


class Rows(NamedTuple):
    """Float32 numbers of each row, [B, HQ, w]; rows that count for nothing have an lse of +inf.

    Attributes:
        lse2: base-2 log-sum-exp.
        factor: of the row's costs, or None for 1.
        norm: squared norm of the output in the cost's metric.
        unit: what `turned` was divided by to fit float16.
    """

    lse2: Tensor
    factor: Tensor | None
    norm: Tensor | None
    unit: Tensor | None


def tiles(itemsize: int, dim: int, device: Device) -> Tiles:
    """Return how the kernel is cut; `dim` is the larger of both head widths, padded."""
    if itemsize == 4:
        return Tiles(32, 16, 4, 1)
    if dim > 128:
        return Tiles(64, 64, 8, 2) if device.warpgroups else Tiles(32, 32, 8 if device.backend == "cuda" else 4, 1)
    if device.warpgroups:
        return Tiles(128, 64, 8, 3)
    return Tiles(64, 32, 4, 1) if device.backend == "hip" else Tiles(32, 64, 8, 2)


def column_costs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lse: Tensor,
    out: Tensor | None,
    scale: float,
    start: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    factor: Tensor | None = None,
    reduce: str = "sum",
    output_projection: Tensor | None = None,
    tiles_: Tiles | None = None,
) -> Tensor:
    """DropKV's cost of every key for the last w queries, or with `out` None the weight that they give it.

    Args:
        q: [B, HQ, w, D]; k, v: [B, H, N, D], [B, H, N, Dv]; one dtype, the last dimension contiguous.
        lse: [B, HQ, w] natural log-sum-exps of the rows; −inf where a row sees no key.
        out: [B, HQ, w, Dv] the rows' outputs, or None for "attention_mass".
        start: [B] integers, the first real key of each batch row; None: all are real.
        sink_logits: [HQ] learned logits that take part in every softmax.
        factor: [B, HQ, w] float32 of each row's cost, finite and not negative; rows of 0 are not looked at. None: 1.
        reduce: "sum" over the rows and mean over the group, or "max" over both.
        output_projection: [HQ, Dv, E]: the shift is measured behind it.
        tiles_: how the kernel is cut; None: by shape and device.

    Returns:
        [B, H, N] float32; 0 at pads.
    """
    (batch, num_heads, window, _), heads, n_keys = q.shape, k.shape[1], k.shape[2]
    group, device = num_heads // heads, device_of(k.device)
    cut = tiles_ or tiles(k.dtype.itemsize, max(padded_dim(k.shape[3]), padded_dim(v.shape[3])), device)
    cut = cut._replace(passing=min(cut.passing, max(16, triton.next_power_of_2(window))))
    silent = lse == -torch.inf if factor is None else (lse == -torch.inf) | (factor == 0)
    lse2 = (lse.float() * LOG2E).masked_fill(silent, torch.inf)
    if factor is not None:  # a row that is not looked at may hold anything
        q = q.masked_fill(silent[..., None], 0.0)
        out = None if out is None else out.masked_fill(silent[..., None], 0.0)
    q = q if q.stride(3) == 1 else q.contiguous()
    metric = v_norm = v_shift = turned = centre = None
    if out is None:
        rows = Rows(lse2, factor, None, None)
    else:
        centre = _centre(v, start)
        if output_projection is not None:
            metric, v_norm = _behind_projection(v, output_projection)
            moved = centre.repeat_interleave(group, 1)
            v_shift = moved[:, :, None] @ metric
            v_norm += (v_shift @ moved[..., None])[..., 0]
            v_shift = (2 * v_shift).contiguous()
        turned, rows = _turned(out, centre, lse2, factor, metric, v.dtype)
    # no program is left without work: heads of a group share one where keys alone give enough of them
    blocks = triton.cdiv(n_keys, cut.held)
    per_program = group if blocks * batch * heads >= 4 * device.processors else 1
    part = torch.empty(batch, heads, group // per_program, n_keys, dtype=torch.float32, device=k.device)
    top = p_top = None
    if out is not None:
        top = torch.full((batch, num_heads, window), -1, dtype=torch.int32, device=k.device)
        p_top = torch.zeros(batch, num_heads, window, dtype=torch.float32, device=k.device)
    # keys that every row sees, and those of which some rows see nothing
    whole = (n_keys - window + 1) // cut.held
    logit_scale, cap2 = logit_factors(scale, softcap)
    dominant = DOMINANT if out is None or out.dtype == torch.float32 else DOMINANT_ROUNDED
    room = -window % cut.passing
    if room:
        q, turned = F.pad(q, (0, 0, 0, room)), turned if turned is None else F.pad(turned, (0, 0, 0, room))
    padded = [x if x is None else F.pad(x, (0, room)) for x in rows]
    padded[0] = F.pad(rows.lse2, (0, room), value=torch.inf)
    with on_device(k.device):
        for first, number, masked in ((0, whole, False), (whole, blocks - whole, True)):
            if number == 0:
                continue
            columns_kernel[(number, batch * heads * (group // per_program))](
                q, k, v, turned, *padded, centre, v_norm, v_shift, part, top, p_top, start,
                first, n_keys, window, window + room, logit_scale, cap2,
                *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], heads,
                G=group, HEADS=per_program, D=k.shape[3], DV=v.shape[3], BD=padded_dim(k.shape[3]),
                BDV=padded_dim(v.shape[3]), HELD=cut.held, PASSING=cut.passing, MASKED=masked, MAX=reduce == "max",
                CAPPED=softcap is not None, DOMINANT=dominant, PRECISION=precision_of(k.dtype, device),
                num_warps=cut.warps, num_stages=cut.stages,
            )  # fmt: skip
    scores = part.sum(2) / group if reduce == "sum" else part.amax(2)
    if top is not None and p_top is not None:
        without, _ = outputs(
            q[:, :, :window], k, v, scale=scale, start=start, softcap=softcap, sink_logits=sink_logits, top=top
        )
        cost = _top_costs(without, v, top, p_top, factor, metric)
        _add(scores, top, cost, reduce, group)
    if start is not None:
        pads = torch.arange(n_keys, device=k.device) < start.to(k.device)[:, None, None]
        scores = scores.masked_fill_(pads, 0.0)
    return scores.masked_fill_(scores < TINY, 0.0)


def _behind_projection(v: Tensor, output_projection: Tensor) -> tuple[Tensor, Tensor]:
    """W_O·W_Oᵀ of each query head [HQ, Dv, Dv], and v·W_O·W_Oᵀ·vᵀ [B, HQ, N], float32."""
    (batch, heads, n_keys, v_dim), num_heads = v.shape, output_projection.shape[0]
    metric, unit = output_metric(output_projection, heads)
    group, device = num_heads // heads, device_of(v.device)
    cut = norm_cut(v.dtype.itemsize, v_dim, n_keys, batch * num_heads, device)
    norm = torch.empty(batch, num_heads, n_keys, dtype=torch.float32, device=v.device)
    with on_device(v.device):
        norm_kernel[(cut.splits, batch * num_heads)](
            v, metric, norm, None, None, n_keys, cut.keys_per_split, *v.stride()[:3], 0, heads, G=group, DV=v_dim,
            BN=cut.blocks.keys, **cut.constants, PRECISION=precision_of(v.dtype, device), PAGE=0,
            num_warps=cut.blocks.warps, num_stages=cut.blocks.stages,
        )  # fmt: skip
    each = unit.repeat_interleave(group)
    return metric * each[:, None, None], norm.mul_(each[:, None])


def _centre(v: Tensor, start: Tensor | None) -> Tensor:
    """[B, H, Dv] float32: the mean of each head's last real values, from which outputs and values are measured.

    ‖a − v‖² does not change when both move alike, but ‖a‖² + ‖v‖² − 2⟨a, v⟩ loses what they share.
    """
    first = max(0, v.shape[2] - CENTRE_KEYS)
    near = v[:, :, first:].float()
    if start is None:
        return near.mean(2)
    real = (torch.arange(first, v.shape[2], device=v.device) >= start.to(v.device)[:, None])[:, None, :, None]
    return near.masked_fill(~real, 0.0).sum(2) / real.sum(2)


def _turned(
    out: Tensor, centre: Tensor, lse2: Tensor, factor: Tensor | None, metric: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Rows]:
    """(a − centre)·M in the dots' dtype, and the rows' numbers.

    Float16 keeps three more bits than bfloat16 of a row that is divided by its unit.
    """
    out = out.float() - centre.repeat_interleave(out.shape[1] // centre.shape[1], 1)[:, :, None]
    turned = out if metric is None else out @ metric
    norm = (turned * out).sum(-1)
    unit = torch.ones_like(norm)
    if dtype != torch.float32:
        unit = torch.ldexp(unit, torch.frexp(turned.abs().amax(-1)).exponent)
        rounded = (turned / unit[..., None]).half()
        # with what was rounded off put into the norm, an error e of `turned` moves a cost by e·(a − v), not by e·v
        norm += 2 * ((rounded.float() * unit[..., None] - turned) * out).sum(-1)
        turned = rounded
    return turned.contiguous(), Rows(lse2, factor, norm, unit)


def _top_costs(
    without: Tensor, v: Tensor, top: Tensor, p_top: Tensor, factor: Tensor | None, metric: Tensor | None
) -> Tensor:
    """[B, HQ, w] float32: p²·‖a₋ⱼ − v_j‖² of each row's dominant key, 0 where it has none."""
    here = top.long().clamp_min(0).view(v.shape[0], v.shape[1], -1, 1).expand(-1, -1, -1, v.shape[3])
    shift = without - v.gather(2, here).view(without.shape)
    turned = shift if metric is None else shift @ metric
    cost = p_top.square() * (turned * shift).sum(-1).clamp_min(0)
    return cost if factor is None else cost * factor


def _add(scores: Tensor, top: Tensor, cost: Tensor, reduce: str, group: int) -> None:
    """Add each row's cost at its key; summed in float64, where the order of summing leaves no trace."""
    where = top.long().clamp_min(0).view(*scores.shape[:2], -1)
    cost = cost.view(where.shape)
    if reduce == "sum":
        scores += (torch.zeros_like(scores, dtype=torch.float64).scatter_add_(2, where, cost.double()) / group).float()
    else:
        scores.scatter_reduce_(2, where, cost, "amax")


@triton.jit(do_not_specialize=["first", "n_keys", "window"])
def columns_kernel(
    p_q, p_k, p_v, p_turned, p_lse, p_factor, p_norm, p_unit, p_centre, p_vnorm, p_vshift, p_part, p_top, p_ptop,
    p_start, first, n_keys, window, room, scale, cap2, sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, heads,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    HELD: tl.constexpr, PASSING: tl.constexpr, MASKED: tl.constexpr, MAX: tl.constexpr, CAPPED: tl.constexpr,
    DOMINANT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of keys from number `first` on, B·H·G/HEADS): [B, H, G/HEADS, N] float32.

    Rows come in whole blocks, `room` of them to a head. MASKED blocks hold keys that some rows do not see.
    """
    PARTS: tl.constexpr = G // HEADS
    i_part = tl.program_id(1)
    i_bh = i_part // PARTS
    i_b, i_h = (i_bh // heads).to(tl.int64), (i_bh % heads).to(tl.int64)
    n0 = (first + tl.program_id(0)) * HELD
    n, d, dv, row = n0 + tl.arange(0, HELD), tl.arange(0, BD), tl.arange(0, BDV), tl.arange(0, PASSING)
    m_n, m_d, m_dv = n < n_keys, (d < D)[None, :], (dv < DV)[None, :]
    begin = 0 if p_start is None else tl.load(p_start + i_b).to(tl.int32)
    p_k += i_b * skb + i_h * skh
    b_k = tl.load(p_k + n.to(tl.int64)[:, None] * skn + d[None, :], mask=m_n[:, None] & m_d, other=0.0)
    b_kt = tl.trans(b_k)  # [BD, HELD]
    if p_turned is not None:
        p_v += i_b * svb + i_h * svh
        p_vn = p_v + n.to(tl.int64)[:, None] * svn + dv[None, :]
        b_centre = tl.load(p_centre + i_bh.to(tl.int64) * DV + dv, mask=dv < DV, other=0.0)
        b_v = tl.load(p_vn, mask=m_n[:, None] & m_dv, other=0.0).to(tl.float32) - b_centre[None, :]
        v_unit = 1.0
        if p_turned.dtype.element_ty == tl.float32:
            b_vt = tl.trans(b_v)
        else:  # a power of two that makes the tile fit float16
            v_most = tl.max(tl.max(tl.abs(b_v), 1), 0)
            v_unit = tl.exp2(tl.ceil(tl.log2(tl.maximum(v_most, 1e-30))))
            b_v = (b_v / v_unit).to(tl.float16)
            b_vt = tl.trans(b_v)  # [BDV, HELD]
            b_v = b_v.to(tl.float32) * v_unit
        v_norm = tl.sum(b_v * b_v, 1)
    low = 0
    if MASKED:
        low = tl.maximum(n0 - (n_keys - window), 0) // PASSING * PASSING
    acc = tl.zeros([PASSING, HELD], tl.float32)
    step = tl.zeros([], tl.int64) + sqn
    o_q = row.to(tl.int64)[:, None] * sqn + d[None, :]
    o_turned = row[:, None] * DV + dv[None, :]
    for member in range(0, HEADS):
        i_q = i_h * G + (i_part % PARTS) * HEADS + member
        i_bq = i_b * heads * G + i_q
        p_qh, o_rows = p_q + i_b * sqb + i_q * sqh, i_bq * room
        if p_vnorm is not None:
            b_shift = tl.load(p_vshift + i_bq * DV + dv, mask=dv < DV, other=0.0)
            b_v = tl.load(p_vn, mask=m_n[:, None] & m_dv, other=0.0).to(tl.float32)
            v_norm = tl.load(p_vnorm + i_bq * n_keys + n, mask=m_n, other=0.0) - tl.sum(b_v * b_shift[None, :], 1)
        for i0 in range(low, room, PASSING):
            i = i0 + row
            b_q = tl.load(p_qh + i0 * step + o_q, mask=m_d, other=0.0)  # [PASSING, BD]
            lse2 = tl.load(p_lse + o_rows + i)
            s = to_logits2(dot(b_q, b_kt, PRECISION), scale, cap2, CAPPED)  # [PASSING, HELD]
            p = tl.exp2(s - lse2[:, None])
            if MASKED:
                p = tl.where(n[None, :] <= n_keys - window + i[:, None], p, 0.0)
            if p_turned is None:
                cost = p
            else:
                if tl.max(tl.max(p, 1), 0) > DOMINANT:
                    dominant = (p > DOMINANT) & ((n >= begin) & m_n)[None, :]
                    top = tl.max(tl.where(dominant, n[None, :], -1), 1)
                    p_row = tl.minimum(tl.max(tl.where(dominant, p, 0.0), 1), 1.0)
                    o_top = i_bq * window + i
                    tl.store(p_top + o_top, top, mask=top >= 0)
                    tl.store(p_ptop + o_top, p_row, mask=top >= 0)
                    p = tl.where(p > DOMINANT, 0.0, p)
                b_turned = tl.load(p_turned + (o_rows + i0) * DV + o_turned, mask=m_dv, other=0.0)
                cross = dot(b_turned, b_vt, PRECISION)
                norm, unit = tl.load(p_norm + o_rows + i), tl.load(p_unit + o_rows + i) * (-2.0 * v_unit)
                distance = tl.maximum(cross * unit[:, None] + (norm[:, None] + v_norm[None, :]), 0.0)
                inverse = tl.rsqrt(1.0 - p)
                odds = p * inverse * inverse
                cost = odds * odds * distance
            if p_factor is not None:
                cost = cost * tl.load(p_factor + o_rows + i)[:, None]
            if MAX:
                acc = tl.maximum(acc, cost)
            else:
                acc += cost
    total = tl.max(acc, 0) if MAX else tl.sum(acc, 0)
    tl.store(p_part + i_part.to(tl.int64) * n_keys + n, total, mask=m_n)
