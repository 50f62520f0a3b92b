"""H2O's Σ_i p_ij over every query of a prompt: softmax denominators in one launch, the columns' sums in a second."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decantkv.kernels.blocks import Device, padded_dim
from decantkv.kernels.launcher import on_device
from decantkv.kernels.plan import device_of, precision_of, whole_heads_misfit
from decantkv.kernels.primitives import dot, finite, logit_factors, normal_or_zero, to_logits2


class Tiles(NamedTuple):
    """Queries or keys a program holds, those of the other kind it reads at once, warps, stages."""

    held: int
    passing: int
    warps: int
    stages: int


def unsupported(q: Tensor, k: Tensor) -> str | None:
    """Return why the kernels cannot take this input, or None if they can."""
    if q.stride(3) != 1 or k.stride(3) != 1:
        return "the last dimension of the queries or keys is not contiguous"
    return whole_heads_misfit("keys and queries", k, q)


def tiles(itemsize: int, dim: int, device: Device) -> Tiles:
    """Return how the denominators' kernel is cut, which holds queries."""
    if itemsize == 4:
        return Tiles(32, 16, 4, 1)
    if dim > 128:
        return Tiles(64, 32, 4, 2)
    return Tiles(128, 64, 8, 3) if device.warpgroups else Tiles(64, 64, 4, 2)


def column_tiles(itemsize: int, dim: int, device: Device) -> Tiles:
    """Return how the columns' kernel is cut, which holds keys; the queries that pass are its dots' rows.

    On Hopper four warps to a program, so that two share a multiprocessor: one exponentiates while the other multiplies.
    """
    if itemsize == 4:
        return Tiles(32, 16, 4, 1)
    if dim > 128:
        return Tiles(128, 64, 8, 2) if device.warpgroups else Tiles(64, 32, 4 if device.backend == "hip" else 8, 2)
    return Tiles(128, 64, 4, 3) if device.warpgroups else Tiles(64, 64, 4, 2)


def column_mass(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    start: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Σ_i p_ij over every query i, causal, mean over a KV head's group; no N×N matrix is stored.

    Args:
        q: [B, HQ, N, D]; k: [B, H, N, D]; one dtype, the last dimension contiguous, other strides free.
        start: [B] integers, the first real token of each row; None: all are real.
        sink_logits: [HQ] learned logits that take part in every softmax.

    Returns:
        [B, H, N] float32; 0 at pads.

    Raises:
        ValueError: a dtype, head_dim or layout that the kernels do not take.
    """
    if (reason := unsupported(q, k)) is not None:
        raise ValueError(f"q, k: {reason}")
    (batch, heads, length, dim), num_heads = k.shape, q.shape[1]
    device = device_of(k.device)
    lse2 = torch.empty(batch, num_heads, length, dtype=torch.float32, device=k.device)
    mass = torch.empty(batch, heads, length, dtype=torch.float32, device=k.device)
    factor, cap2 = logit_factors(scale, softcap)
    sinks = None if sink_logits is None else sink_logits.float().contiguous()
    strides = (*q.stride()[:3], *k.stride()[:3])
    options = {
        "G": num_heads // heads, "D": dim, "BD": padded_dim(dim), "CAPPED": softcap is not None,
        "PRECISION": precision_of(k.dtype, device),
    }  # fmt: skip
    rows, columns = tiles(k.dtype.itemsize, dim, device), column_tiles(k.dtype.itemsize, dim, device)
    with on_device(k.device):
        denominators_kernel[(triton.cdiv(length, rows.held), batch * num_heads)](
            q, k, lse2, start, sinks, length, factor, cap2, *strides, num_heads,
            HELD=rows.held, PASSING=rows.passing, num_warps=rows.warps, num_stages=rows.stages, **options,
        )  # fmt: skip
        columns_kernel[(triton.cdiv(length, columns.held), batch * heads)](
            q, k, lse2, mass, start, length, factor, cap2, *strides, heads,
            HELD=columns.held, PASSING=columns.passing, num_warps=columns.warps, num_stages=columns.stages, **options,
        )  # fmt: skip
    return mass


@triton.jit(do_not_specialize=["length"])
def denominators_kernel(
    p_q, p_k, p_lse, p_start, p_sink, length, scale, cap2, sqb, sqh, sqn, skb, skh, skn, num_heads,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HELD: tl.constexpr, PASSING: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of queries, B·HQ): base-2 log-sum-exp, +inf where a query sees nothing."""
    i_bq = tl.program_id(1)
    i_b, i_q = (i_bq // num_heads).to(tl.int64), i_bq % num_heads
    # the last queries see most keys: their programs begin first
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * HELD
    i, d = first + tl.arange(0, HELD), tl.arange(0, BD)
    o_q = i.to(tl.int64)[:, None] * sqn + d[None, :]
    p_q += i_b * sqb + i_q.to(tl.int64) * sqh
    b_q = tl.load(p_q + o_q, mask=(i < length)[:, None] & (d < D)[None, :], other=0.0)  # [HELD, BD]
    p_k += i_b * skb + (i_q // G).to(tl.int64) * skh
    begin = 0 if p_start is None else tl.load(p_start + i_b).to(tl.int32)
    m = tl.full([HELD], float("-inf"), tl.float32)
    weight = tl.zeros([HELD], tl.float32)
    if p_sink is not None:
        m = tl.zeros([HELD], tl.float32) + tl.load(p_sink + i_q) * 1.4426950408889634
        weight += 1.0
    plain = begin + tl.maximum(first - begin, 0) // PASSING * PASSING  # keys before it are seen by all queries held
    for n0 in range(begin, plain, PASSING):
        n = n0 + tl.arange(0, PASSING)
        b_k = tl.load(p_k + n.to(tl.int64)[:, None] * skn + d[None, :], mask=(d < D)[None, :], other=0.0)
        s = to_logits2(dot(b_q, tl.trans(b_k), PRECISION), scale, cap2, CAPPED)  # [HELD, PASSING]
        m_new = tl.maximum(m, tl.max(s, 1))
        weight = weight * tl.exp2(m - m_new) + tl.sum(tl.exp2(s - m_new[:, None]), 1)
        m = m_new
    for n0 in range(plain, tl.minimum(first + HELD, length), PASSING):
        n = n0 + tl.arange(0, PASSING)
        m_n = n < length
        b_k = tl.load(p_k + n.to(tl.int64)[:, None] * skn + d[None, :], mask=m_n[:, None] & (d < D)[None, :], other=0.0)
        s = to_logits2(dot(b_q, tl.trans(b_k), PRECISION), scale, cap2, CAPPED)
        s = tl.where(m_n[None, :] & (n[None, :] <= i[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        weight = weight * tl.exp2(m - finite(m_new)) + tl.sum(tl.exp2(s - finite(m_new)[:, None]), 1)
        m = m_new
    seen = (weight > 0) & (i >= begin)
    lse2 = tl.where(seen, finite(m) + tl.log2(tl.where(seen, weight, 1.0)), float("inf"))
    tl.store(p_lse + i_bq.to(tl.int64) * length + i, lse2, mask=i < length)


@triton.jit(do_not_specialize=["length"])
def columns_kernel(
    p_q, p_k, p_lse, p_mass, p_start, length, scale, cap2, sqb, sqh, sqn, skb, skh, skn, heads,
    G: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, HELD: tl.constexpr, PASSING: tl.constexpr,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of keys, B·H): [B, H, N] float32, the weights of a block of queries at a time.

    Queries are rows, so that a thread needs few denominators; their sum over rows waits for the end.
    """
    i_bh = tl.program_id(1)
    i_b, i_h = (i_bh // heads).to(tl.int64), i_bh % heads
    first = tl.program_id(0) * HELD
    n, d, row = first + tl.arange(0, HELD), tl.arange(0, BD), tl.arange(0, PASSING)
    m_n, m_d = n < length, (d < D)[None, :]
    p_k += i_b * skb + i_h.to(tl.int64) * skh
    b_k = tl.load(p_k + n.to(tl.int64)[:, None] * skn + d[None, :], mask=m_n[:, None] & m_d, other=0.0)
    b_kt = tl.trans(b_k)  # [BD, HELD]
    begin = 0 if p_start is None else tl.load(p_start + i_b).to(tl.int32)
    weight = tl.zeros([PASSING, HELD], tl.float32)
    o_tile, step = row.to(tl.int64)[:, None] * sqn + d[None, :], tl.zeros([], tl.int64) + sqn
    last = first + HELD + tl.maximum(length - first - HELD, 0) // PASSING * PASSING  # whole blocks end here
    for head in range(0, G):
        p_qh = p_q + i_b * sqb + (i_h * G + head).to(tl.int64) * sqh
        p_lseh = p_lse + (i_bh.to(tl.int64) * G + head) * length
        for edge in tl.range(0, HELD + PASSING, PASSING, num_stages=1):  # the diagonal, and what the last block lacks
            i0 = tl.where(edge < HELD, first + edge, last)
            i = i0 + row
            m_i = i < length
            b_q = tl.load(p_qh + i0 * step + o_tile, mask=m_i[:, None] & m_d, other=0.0)  # [PASSING, BD]
            lse2 = tl.load(p_lseh + i, mask=m_i, other=float("inf"))
            s = to_logits2(dot(b_q, b_kt, PRECISION), scale, cap2, CAPPED)  # [PASSING, HELD]
            weight += tl.where(n[None, :] <= i[:, None], tl.exp2(s - lse2[:, None]), 0.0)
        for i0 in range(first + HELD, last, PASSING):
            b_q = tl.load(p_qh + i0 * step + o_tile, mask=m_d, other=0.0)
            lse2 = tl.load(p_lseh + i0 + row)
            s = to_logits2(dot(b_q, b_kt, PRECISION), scale, cap2, CAPPED)
            weight += tl.exp2(s - lse2[:, None])
    mass = tl.where(n >= begin, normal_or_zero(tl.sum(weight, 0) / G), 0.0)
    tl.store(p_mass + i_bh.to(tl.int64) * length + n, mass, mask=m_n)
