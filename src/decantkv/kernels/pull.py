"""AnDPro's chunk form around kernel B: what the droppable keys pull each row towards, and sums over chunks."""

from __future__ import annotations

import triton
import triton.language as tl

from decantkv.kernels.primitives import key_offset, keys_of, normal_or_zero, page_of, weighted_sum
from decantkv.kernels.score import MASS, NO_POOL, load_rows, pooled_weights, weights

_MASS = tl.constexpr(MASS)
_NO_POOL = tl.constexpr(NO_POOL)


@triton.jit(do_not_specialize=["n_keys", "keys_per_split", "n_splits", "s_table", "H"])
def pull_kernel(
    p_q, p_k, p_v, p_rows, p_part, p_start, p_table, p_lengths,
    n_keys, keys_per_split, n_splits, scale, cap2,
    sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, s_table,
    H, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, RW: tl.constexpr,
    PADDED: tl.constexpr, CAPPED: tl.constexpr, POOL: tl.constexpr, KERNEL: tl.constexpr, FIRST: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (splits · row tiles, B·H): a split's Σ p̃ v [BDV] of each row, over keys behind the first FIRST real ones
    and before the window. Scratch: [ROWS, BDV] float32 a split."""
    i_split = tl.program_id(0) // (ROWS // BM)
    i_tile = tl.program_id(0) % (ROWS // BM)
    i_bh = tl.program_id(1)
    i_b = (i_bh // H).to(tl.int64)
    i_h = i_bh % H
    j = tl.arange(0, BN)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    start = 0
    if PADDED:
        start = tl.load(p_start + i_b).to(tl.int32)
    n_keys = keys_of(p_lengths, i_b, n_keys, PAGE)
    lo = tl.maximum(i_split * keys_per_split, start + FIRST)
    hi = tl.minimum((i_split + 1) * keys_per_split, n_keys - W)
    p_k += i_h.to(tl.int64) * skh
    p_v += i_h.to(tl.int64) * svh
    if PAGE == 0:
        p_k += i_b * skb
        p_v += i_b * svb
    else:
        p_table += i_b * s_table
    b_q, last_seen, lse2, _, _, _, _, _ = load_rows(
        i_tile, i_bh, p_q, p_q, p_q, p_rows, n_keys, sqb, sqh, sqw, sqb, sqh, sqw,
        H, G, W, D, DV, ROWS, BM, BD, BDV, RW, _MASS, False, 1,
    )  # fmt: skip
    acc = tl.zeros([BDV, BM], tl.float32)
    for t in range(0, tl.cdiv(tl.maximum(hi - lo, 0), BN)):
        n = lo + t * BN + j
        m_n = n < hi
        # [BN, BDV]
        page = page_of(n, m_n, p_table, PAGE)
        p_vn = p_v + key_offset(n, page, svb, svn, PAGE)[:, None] + dv[None, :]
        b_v = tl.load(p_vn, mask=m_n[:, None] & (dv < DV)[None, :], other=0.0)
        if POOL == _NO_POOL:
            p_kn = p_k + key_offset(n, page, skb, skn, PAGE)[:, None] + d[None, :]
            b_k = tl.load(p_kn, mask=m_n[:, None] & (d < D)[None, :], other=0.0)
            p = weights(b_k, b_q, lse2, scale, cap2, CAPPED, PRECISION)
        else:
            p = pooled_weights(
                n, p_k, p_table, start, n_keys, b_q, last_seen, lse2, scale, cap2, skb, skn,
                W, D, BN, BM, BD, POOL, KERNEL, CAPPED, PRECISION, PAGE,
            )  # fmt: skip
        p = tl.where(m_n[:, None] & (last_seen >= 0)[None, :], p, 0.0)
        acc = weighted_sum(acc, b_v, p, False, PARTS, PRECISION)
    r = i_tile * BM + tl.arange(0, BM)
    p_part += (i_bh * n_splits + i_split).to(tl.int64) * (ROWS * BDV)
    tl.store(p_part + r[None, :] * BDV + dv[:, None], acc)


@triton.jit(do_not_specialize=["n_keys", "H"])
def chunk_sum_kernel(
    p_token, p_score, p_start, p_lengths, n_keys, H,
    W: tl.constexpr, CHUNK: tl.constexpr, PADDED: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of keys, B·H): give every key before the window its chunk's sum; the window's keys become 0."""
    i_bh = tl.program_id(1)
    start = 0
    if PADDED:
        start = tl.load(p_start + i_bh // H).to(tl.int32)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_row = keys_of(p_lengths, i_bh // H, n_keys, PAGE)
    real = (n >= start) & (n < n_row - W)
    first = start + (n - start) // CHUNK * CHUNK
    p_token += i_bh.to(tl.int64) * n_keys
    total = tl.zeros([BN], tl.float32)
    for o in range(0, CHUNK):
        i = first + o
        total += tl.load(p_token + i, mask=real & (i < n_row - W), other=0.0)
    total = normal_or_zero(tl.where(real, total, 0.0))
    if PAGE != 0:
        total = tl.where(n < n_row, total, float("-inf"))
    tl.store(p_score + i_bh.to(tl.int64) * n_keys + n, total, mask=n < n_keys)
