"""Weighing by W_O: ‖x·W_O‖² = x·M·xᵀ, M = W_O·W_Oᵀ of a query head: nothing of W_O's width is held for a key."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decantkv.kernels.blocks import Blocks, Device, norm_blocks, padded_dim, split_keys
from decantkv.kernels.launcher import on_device
from decantkv.kernels.plan import device_of, precision_of
from decantkv.kernels.primitives import dot, key_offset, keys_of, page_of

METRIC_WIDTH = 1024  # of W_O that a program multiplies with itself
METRIC_BLOCK = 64


def output_metric(output_projection: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """M of each query head, relative to the largest entry in its KV head's group, so that float16 parts hold it.

    It is made anew at every call: that takes microseconds, and weights may change in place.

    Args:
        output_projection: [HQ, Dv, E], floating point, any strides.
        heads: H.

    Returns:
        M [HQ, Dv, Dv] and those entries [H], float32.
    """
    w_o = output_projection
    num_heads, v_dim, width = w_o.shape
    device = device_of(w_o.device)
    parts = -(-width // METRIC_WIDTH)
    part = torch.empty(parts, num_heads, v_dim, v_dim, dtype=torch.float32, device=w_o.device)
    with on_device(w_o.device):
        metric_kernel[(parts, num_heads)](
            w_o, part, width, *w_o.stride(), num_heads, DV=v_dim, BDV=padded_dim(v_dim), WIDTH=METRIC_WIDTH,
            BE=METRIC_BLOCK if w_o.element_size() == 2 else 16, PRECISION=precision_of(w_o.dtype, device), num_warps=8,
            num_stages=2,
        )  # fmt: skip
    metric = part.sum(0)
    # of a matrix W·Wᵀ no entry is larger than the largest on its diagonal
    unit = metric.diagonal(dim1=1, dim2=2).reshape(heads, -1).amax(1)
    metric.view(heads, -1).div_(unit.where(unit > 0, 1.0)[:, None])
    return metric, unit


class NormCut(NamedTuple):
    """The norms' kernel's cut: blocks, keys per split, splits, and the constants HALF, BLOCKS and TOGETHER."""

    blocks: Blocks
    keys_per_split: int
    splits: int
    constants: dict[str, int | bool]


def norm_cut(itemsize: int, v_dim: int, n_keys: int, num_heads: int, device: Device) -> NormCut:
    """Return the cut for `num_heads` = B·HQ; a program keeps M, or a block of it, while the keys of its split pass."""
    blocks, width = norm_blocks(itemsize), max(32, padded_dim(v_dim))
    together = itemsize == 2 and width <= 128
    half = width // 2 if together else 32 if itemsize == 4 else 64
    constants = {"HALF": half, "BLOCKS": width // half, "TOGETHER": together}
    return NormCut(blocks, *split_keys(n_keys, num_heads, blocks.keys, device), constants)


@triton.jit(do_not_specialize=["width"])
def metric_kernel(
    p_w, p_part, width, swh, swd, swe, num_heads, DV: tl.constexpr, BDV: tl.constexpr, WIDTH: tl.constexpr,
    BE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (parts of W_O's width, HQ): a part's W·Wᵀ, as [parts, HQ, DV, DV] float32."""
    i_part, i_q = tl.program_id(0), tl.program_id(1)
    dv, e = tl.arange(0, BDV), tl.arange(0, BE)
    p_w += i_q.to(tl.int64) * swh + dv[None, :].to(tl.int64) * swd
    acc = tl.zeros([BDV, BDV], tl.float32)
    for e0 in range(i_part * WIDTH, (i_part + 1) * WIDTH, BE):
        at = e0 + e
        # [BE, BDV]
        b_w = tl.load(p_w + at[:, None].to(tl.int64) * swe, mask=(at < width)[:, None] & (dv < DV)[None, :], other=0.0)
        acc += dot(tl.trans(b_w), b_w, PRECISION)
    p_part += (i_part * num_heads + i_q).to(tl.int64) * (DV * DV)
    tl.store(p_part + dv[:, None] * DV + dv[None, :], acc, mask=(dv < DV)[:, None] & (dv < DV)[None, :])


@triton.jit
def metric_parts(p_m, first, second, like, DV: tl.constexpr):
    """Return M's entries of rows `first` and columns `second`, in two parts of the dtype of `like`."""
    inside = (first < DV)[:, None] & (second < DV)[None, :]
    b_m = tl.load(p_m + first[:, None] * DV + second[None, :], mask=inside, other=0.0)
    if like.dtype == tl.float32:
        return b_m, b_m
    else:
        m_hi = b_m.to(like.dtype)
        return m_hi, (b_m - m_hi.to(tl.float32)).to(like.dtype)


@triton.jit
def behind(b_v, m_hi, m_lo, PRECISION: tl.constexpr):
    """v·M [BN, HALF] of values [BN, HALF]."""
    b_vm = dot(b_v, m_hi, PRECISION)
    if b_v.dtype != tl.float32:
        b_vm += dot(b_v, m_lo, PRECISION)
    return b_vm


@triton.jit
def norms_of_block(
    p_v, p_m, p_norm, p_table, lo, hi, n_row, svb, svn, ROW: tl.constexpr, COLUMN: tl.constexpr,
    DV: tl.constexpr, HALF: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Add one block of M's, and its mirror image's, to the norms of a split's keys; the first block stores them."""
    x, y = ROW * HALF + tl.arange(0, HALF), COLUMN * HALF + tl.arange(0, HALF)
    m_hi, m_lo = metric_parts(p_m, x, y, tl.zeros([1], p_v.dtype.element_ty), DV)
    for n0 in range(lo, hi, BN):
        n = n0 + tl.arange(0, BN)
        m_n = n < n_row
        p_vn = (p_v + key_offset(n, page_of(n, m_n, p_table, PAGE), svb, svn, PAGE))[:, None]
        # [BN, HALF]
        b_x = tl.load(p_vn + x[None, :], mask=m_n[:, None] & (x < DV)[None, :], other=0.0)
        b_y = tl.load(p_vn + y[None, :], mask=m_n[:, None] & (y < DV)[None, :], other=0.0)
        norm = tl.sum(behind(b_x, m_hi, m_lo, PRECISION) * b_y.to(tl.float32), 1) * (1.0 if ROW == COLUMN else 2.0)
        if COLUMN > 0:
            norm += tl.load(p_norm + n, mask=m_n, other=0.0)
        tl.store(p_norm + n, norm, mask=m_n)


@triton.jit(do_not_specialize=["n_keys", "keys_per_split", "s_table", "H"])
def norm_kernel(
    p_v, p_metric, p_norm, p_table, p_lengths,
    n_keys, keys_per_split, svb, svh, svn, s_table,
    H, G: tl.constexpr, DV: tl.constexpr, BN: tl.constexpr, HALF: tl.constexpr, BLOCKS: tl.constexpr,
    TOGETHER: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (splits, B·HQ): v·M·vᵀ [B, HQ, N] float32.

    With v = (x, y) and the symmetric M in quarters it is x·A·xᵀ + (2x·B + y·C)·yᵀ: three quarters of the products. The
    quarters stay in shared memory; of what is larger, one block at a time.
    """
    i_split, i_bq = tl.program_id(0), tl.program_id(1)
    i_b = (i_bq // (H * G)).to(tl.int64)
    i_q = i_bq % (H * G)
    n_row = keys_of(p_lengths, i_b, n_keys, PAGE)
    p_v += (i_q // G).to(tl.int64) * svh
    if PAGE == 0:
        p_v += i_b * svb
    else:
        p_table += i_b * s_table
    p_m = p_metric + i_q.to(tl.int64) * (DV * DV)
    p_norm += i_bq.to(tl.int64) * n_keys
    lo = i_split * keys_per_split
    hi = tl.minimum(lo + keys_per_split, n_row)
    if not TOGETHER:
        for column in tl.static_range(BLOCKS):
            for row in tl.static_range(column + 1):
                norms_of_block(
                    p_v, p_m, p_norm, p_table, lo, hi, n_row, svb, svn, row, column, DV, HALF, BN, PRECISION, PAGE
                )
                tl.debug_barrier()
    else:
        x, y = tl.arange(0, HALF), HALF + tl.arange(0, HALF)
        like = tl.zeros([1], p_v.dtype.element_ty)
        a_hi, a_lo = metric_parts(p_m, x, x, like, DV)
        b_hi, b_lo = metric_parts(p_m, x, y, like, DV)
        c_hi, c_lo = metric_parts(p_m, y, y, like, DV)
        for n0 in range(lo, hi, BN):
            n = n0 + tl.arange(0, BN)
            m_n = n < n_row
            p_vn = (p_v + key_offset(n, page_of(n, m_n, p_table, PAGE), svb, svn, PAGE))[:, None]
            # [BN, HALF]
            b_x = tl.load(p_vn + x[None, :], mask=m_n[:, None] & (x < DV)[None, :], other=0.0)
            b_y = tl.load(p_vn + y[None, :], mask=m_n[:, None] & (y < DV)[None, :], other=0.0)
            x_part = behind(b_x, a_hi, a_lo, PRECISION) * b_x.to(tl.float32)
            y_part = 2.0 * behind(b_x, b_hi, b_lo, PRECISION) + behind(b_y, c_hi, c_lo, PRECISION)
            tl.store(p_norm + n, tl.sum(x_part + y_part * b_y.to(tl.float32), 1), mask=m_n)
