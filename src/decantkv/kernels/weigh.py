"""Weighing by W_O: ‖x·W_O‖² = x·M·xᵀ, M = W_O·W_Oᵀ of a query head: nothing of W_O's width is held for a key."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decantkv.kernels.primitives import dot, key_offset, keys_of, page_of

WIDENED_BYTES = 16 * 2**20  # of W_O at once


def output_metric(output_projection: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """M of each query head, relative to the largest entry in its KV head's group, so that float16 parts hold it.

    Args:
        output_projection: [HQ, Dv, E].
        heads: H.

    Returns:
        M [HQ, Dv, Dv] and those entries [H], float32.
    """
    num_heads, v_dim, width = output_projection.shape
    metric = torch.empty(num_heads, v_dim, v_dim, dtype=torch.float32, device=output_projection.device)
    step = max(1, WIDENED_BYTES // (4 * v_dim * width))
    for first in range(0, num_heads, step):
        w_o = output_projection[first : first + step].float()
        torch.bmm(w_o, w_o.mT, out=metric[first : first + step])
    unit = metric.view(heads, -1).abs().amax(1)
    metric.view(heads, -1).div_(unit.where(unit > 0, 1.0)[:, None])
    return metric, unit


@triton.jit(do_not_specialize=["n_keys", "s_table", "H"])
def norm_kernel(
    p_v, p_metric, p_norm, p_table, p_lengths,
    n_keys, svb, svh, svn, s_table,
    H, G: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BE: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of keys, B·HQ): v·M·vᵀ [B, HQ, N] float32, BE columns of M at a time."""
    i_bq = tl.program_id(1)
    i_b = (i_bq // (H * G)).to(tl.int64)
    i_q = i_bq % (H * G)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    dv = tl.arange(0, BDV)
    m_n = n < keys_of(p_lengths, i_b, n_keys, PAGE)
    p_v += (i_q // G).to(tl.int64) * svh
    if PAGE == 0:
        p_v += i_b * svb
    else:
        p_table += i_b * s_table
    p_vn = (p_v + key_offset(n, page_of(n, m_n, p_table, PAGE), svb, svn, PAGE))[:, None]
    p_m = p_metric + i_q.to(tl.int64) * (DV * DV)
    # [BN, BDV]
    b_v = tl.load(p_vn + dv[None, :], mask=m_n[:, None] & (dv < DV)[None, :], other=0.0)
    norm = tl.zeros([BN], tl.float32)
    for e0 in range(0, DV, BE):
        e = e0 + tl.arange(0, BE)
        # [BDV, BE], [BN, BE]
        b_m = tl.load(p_m + dv[:, None] * DV + e[None, :], mask=(dv < DV)[:, None] & (e < DV)[None, :], other=0.0)
        b_ve = tl.load(p_vn + e[None, :], mask=m_n[:, None] & (e < DV)[None, :], other=0.0)
        if b_v.dtype == tl.float32:
            b_vm = dot(b_v, b_m, PRECISION)
        else:
            m_hi = b_m.to(b_v.dtype)
            b_vm = dot(b_v, m_hi, PRECISION)
            b_vm += dot(b_v, (b_m - m_hi.to(tl.float32)).to(b_v.dtype), PRECISION)
        norm += tl.sum(b_vm * b_ve.to(tl.float32), 1)
    tl.store(p_norm + i_bq.to(tl.int64) * n_keys + n, norm, mask=m_n)
