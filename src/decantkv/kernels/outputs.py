"""Attention's outputs and log-sum-exps for many queries, and outputs without one key per row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decantkv.kernels.blocks import Blocks, Device, padded_dim
from decantkv.kernels.launcher import on_device
from decantkv.kernels.plan import device_of, precision_of
from decantkv.kernels.primitives import dot, finite, logit_factors, to_logits2


def output_blocks(itemsize: int, dim: int, device: Device) -> Blocks:
    """Return how the kernel is cut, which holds rows; `dim` is the larger of both head widths, padded."""
    if itemsize == 4:
        return Blocks(16, 16, 4, 1)
    if dim > 128:
        return Blocks(32, 32, 8 if device.backend == "cuda" else 4, 2 if device.backend != "hip" else 1)
    if device.warpgroups:
        return Blocks(128, 64, 8, 3)
    return Blocks(64, 32, 8 if device.backend == "cuda" else 4, 2 if device.backend != "hip" else 1)


def outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    start: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    top: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each row's output and log-sum-exp, causal, the rows being the last ones.

    Args:
        q: [B, HQ, w, D]; k, v: [B, H, N, D], [B, H, N, Dv]; one dtype, the last dimension contiguous.
        start: [B] integers, the first real key of each batch row; None: all are real.
        sink_logits: [HQ] learned logits that take part in every softmax.
        top: [B, HQ, w] int32, the key that a row leaves out; rows with −1 are not computed. None: every row is
            computed, over all its keys.

    Returns:
        [B, HQ, w, Dv] and [B, HQ, w], float32; 0 and −inf where a row sees no key. Rows that are not computed hold 0.
    """
    (batch, num_heads, window, dim), heads, v_dim = q.shape, k.shape[1], v.shape[3]
    device = device_of(k.device)
    cut = output_blocks(k.dtype.itemsize, max(padded_dim(dim), padded_dim(v_dim)), device)
    make = torch.empty if top is None else torch.zeros
    out = make(batch, num_heads, window, v_dim, dtype=torch.float32, device=k.device)
    lse = make(batch, num_heads, window, dtype=torch.float32, device=k.device)
    order = counts = None
    if top is not None:  # the rows to compute come first, in their order
        order = (top < 0).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)
        counts = (top >= 0).sum(-1, dtype=torch.int32)
    factor, cap2 = logit_factors(scale, softcap)
    with on_device(k.device):
        outputs_kernel[(triton.cdiv(window, cut.rows), batch * num_heads)](
            q, k, v, out, lse, start, None if sink_logits is None else sink_logits.float().contiguous(),
            top, order, counts, window, k.shape[2], factor, cap2, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            num_heads, G=num_heads // heads, D=dim, DV=v_dim, BD=padded_dim(dim), BDV=padded_dim(v_dim),
            BM=cut.rows, BN=cut.keys, PARTS=2 if top is None else 1, CAPPED=softcap is not None,
            PRECISION=precision_of(k.dtype, device), num_warps=cut.warps, num_stages=cut.stages,
        )  # fmt: skip
    return out, lse


@triton.jit(do_not_specialize=["window", "n_keys"])
def outputs_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_start, p_sink, p_top, p_order, p_count, window, n_keys, scale, cap2,
    sqb, sqh, sqn, skb, skh, skn, svb, svh, svn, num_heads,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, B·HQ)."""
    i_bq = tl.program_id(1)
    i_b, i_q = (i_bq // num_heads).to(tl.int64), i_bq % num_heads
    o_row = i_bq.to(tl.int64) * window
    i_slot = tl.program_id(0) * BM + tl.arange(0, BM)
    n_rows = window
    if p_order is not None:
        n_rows = tl.load(p_count + i_bq)
    m_i = i_slot < n_rows
    i = i_slot
    if p_order is not None:
        i = tl.load(p_order + o_row + i_slot, mask=m_i, other=0)
    d, dv = tl.arange(0, BD), tl.arange(0, BDV)
    p_q += i_b * sqb + i_q.to(tl.int64) * sqh
    b_q = tl.load(p_q + i.to(tl.int64)[:, None] * sqn + d[None, :], mask=m_i[:, None] & (d < D)[None, :], other=0.0)
    p_k += i_b * skb + (i_q // G).to(tl.int64) * skh
    p_v += i_b * svb + (i_q // G).to(tl.int64) * svh
    top = tl.full([BM], -1, tl.int32)
    if p_top is not None:
        top = tl.load(p_top + o_row + i, mask=m_i, other=-1)
    begin = 0 if p_start is None else tl.load(p_start + i_b).to(tl.int32)
    at = n_keys - window + i  # the last key that a row sees
    stop = tl.max(tl.where(m_i, at, -1), 0) + 1
    m = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    if p_sink is not None:
        m = tl.zeros([BM], tl.float32) + tl.load(p_sink + i_q) * 1.4426950408889634
        weight += 1.0
    acc = tl.zeros([BM, BDV], tl.float32)
    for n0 in range(begin, stop, BN):
        n = n0 + tl.arange(0, BN)
        m_n = n < n_keys
        b_k = tl.load(p_k + n.to(tl.int64)[:, None] * skn + d[None, :], mask=m_n[:, None] & (d < D)[None, :], other=0.0)
        s = to_logits2(dot(b_q, tl.trans(b_k), PRECISION), scale, cap2, CAPPED)  # [BM, BN]
        s = tl.where((n[None, :] <= at[:, None]) & (n[None, :] != top[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        decay = tl.exp2(m - finite(m_new))
        e = tl.exp2(s - finite(m_new)[:, None])
        b_v = tl.load(
            p_v + n.to(tl.int64)[:, None] * svn + dv[None, :], mask=m_n[:, None] & (dv < DV)[None, :], other=0.0
        )
        acc = acc * decay[:, None]
        if b_v.dtype == tl.bfloat16:
            e_hi = e.to(tl.bfloat16)
            if PARTS == 1:  # what all values share is then divided by the very weights that multiplied it
                e = e_hi.to(tl.float32)
            acc += dot(e_hi, b_v, PRECISION)
            if PARTS == 2:
                acc += dot((e - e_hi.to(tl.float32)).to(tl.bfloat16), b_v, PRECISION)
        else:  # float16 weights would lose a flat row's tail to underflow; tf32 holds float16 values exactly
            acc += dot(e, b_v.to(tl.float32), PRECISION)
        weight = weight * decay + tl.sum(e, 1)
        m = m_new
    seen = weight > 0
    out = acc / tl.where(seen, weight, 1.0)[:, None]
    lse = tl.where(seen, (finite(m) + tl.log2(tl.where(seen, weight, 1.0))) * 0.6931471805599453, float("-inf"))
    o_out = (o_row + i)[:, None] * DV + dv[None, :]
    tl.store(p_out + o_out, out, mask=m_i[:, None] & (dv < DV)[None, :])
    tl.store(p_lse + o_row + i, lse, mask=m_i)
