"""Kernel A and its merge: the window's attention, split along keys, with each row's dominant key kept apart.

A row's output without its dominant key cannot be recovered from the full output once that key's weight nears 1: the
subtraction has no digits left. So kernel A moves a key out of the running sums as soon as it outweighs everything
its row has seen in this split, and the merge writes that key's cost from sums it never entered.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decantkv.kernels.primitives import dot, finite, to_logits2

_NO_INDEX = tl.constexpr(2147483647)


@triton.jit
def attend_split(
    i_split, i_tile, i_bh,
    p_q, p_k, p_v, p_acc, p_state, p_top, p_start,
    n_keys, keys_per_split, n_splits, scale, cap2,
    sqb, sqh, sqw, skb, skh, skn, svb, svh, svn,
    H, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    PADDED: tl.constexpr, CAPPED: tl.constexpr, VALUES: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of keys for BM rows. Writes the others' Σ e·v [BM, BDV], their (max, Σ e) and the dominant key."""
    i_b = (i_bh // H).to(tl.int64)
    i_h = i_bh % H
    r = i_tile * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    m_row = r < G * W
    # [BM, BD]
    p_row = p_q + i_b * sqb + (i_h * G + r // W).to(tl.int64) * sqh + (r % W).to(tl.int64) * sqw
    b_q = tl.load(p_row[:, None] + d[None, :], mask=m_row[:, None] & (d < D)[None, :], other=0.0)
    last_seen = tl.where(m_row, n_keys - W + r % W, -1)
    lo = i_split * keys_per_split
    hi = tl.minimum(lo + keys_per_split, n_keys)
    if PADDED:
        lo = tl.maximum(lo, tl.load(p_start + i_b).to(tl.int32))
    p_k += i_b * skb + i_h.to(tl.int64) * skh
    p_v += i_b * svb + i_h.to(tl.int64) * svh
    j = tl.arange(0, BN)
    o_k = j[:, None] * skn + d[None, :]
    o_v = j[:, None] * svn + dv[None, :]

    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BDV], tl.float32)
    s_top = tl.full([BM], float("-inf"), tl.float32)
    top = tl.full([BM], -1, tl.int32)
    for t in range(0, tl.cdiv(tl.maximum(hi - lo, 0), BN)):
        n0 = lo + t * BN
        n = n0 + j
        m_n = n < hi
        # [BN, BD], [BN, BDV]
        b_k = tl.load(p_k + n0.to(tl.int64) * skn + o_k, mask=m_n[:, None] & (d < D)[None, :], other=0.0)
        s = to_logits2(dot(b_q, tl.trans(b_k), PRECISION), scale, cap2, CAPPED)
        s = tl.where(m_n[None, :] & (n[None, :] <= last_seen[:, None]), s, float("-inf"))
        if VALUES:
            b_v = tl.load(p_v + n0.to(tl.int64) * svn + o_v, mask=m_n[:, None] & (dv < DV)[None, :], other=0.0)
        s_max = tl.max(s, 1)
        m_new = tl.maximum(m, s_max)
        e = tl.exp2(s - finite(m_new)[:, None])
        l_tile = tl.sum(e, 1)
        decay = tl.exp2(m - finite(m_new))
        if VALUES:
            others = l * decay + l_tile + tl.exp2(s_top - finite(m_new))
            dominant = (s_max > s_top) & (tl.exp2(s_max - finite(m_new)) > 0.5 * others)
            if tl.max(dominant.to(tl.int32), 0) > 0:
                found = tl.min(tl.where(s == s_max[:, None], n[None, :], _NO_INDEX), 1)
                # the key it displaces joins the sums
                back = dominant & (top >= 0)
                m_new = tl.maximum(m, tl.where(back, s_top, float("-inf")))
                decay = tl.exp2(m - finite(m_new))
                e_back = tl.where(back, tl.exp2(s_top - finite(m_new)), 0.0)
                p_back = p_v + tl.where(back, top, 0).to(tl.int64) * svn
                b_back = tl.load(p_back[:, None] + dv[None, :], mask=back[:, None] & (dv < DV)[None, :], other=0.0)
                acc = acc * decay[:, None] + e_back[:, None] * b_back.to(tl.float32)
                l = l * decay + e_back
                m = m_new
                s_top = tl.where(dominant, s_max, s_top)
                top = tl.where(dominant, found, top)
                s = tl.where(dominant[:, None] & (n[None, :] == found[:, None]), float("-inf"), s)
                m_new = tl.maximum(m, tl.max(s, 1))
                e = tl.exp2(s - finite(m_new)[:, None])
                l_tile = tl.sum(e, 1)
                decay = tl.exp2(m - finite(m_new))
            acc = acc * decay[:, None]
            if PARTS == 2:
                # bf16 weights as two parts: 16 bits of weight at the price of one more dot
                e_hi = e.to(b_v.dtype)
                acc += dot(e_hi, b_v, PRECISION)
                acc += dot((e - e_hi.to(tl.float32)).to(b_v.dtype), b_v, PRECISION)
            else:
                # float16 weights would lose a flat row's tail to underflow; tf32 holds float16 values exactly
                acc += dot(e, b_v.to(tl.float32), PRECISION)
        l = l * decay + l_tile
        m = m_new

    o_row = (i_bh * n_splits + i_split).to(tl.int64) * ROWS + r
    o_state = (i_bh * n_splits + i_split).to(tl.int64) * (3 * ROWS) + r
    tl.store(p_state + o_state, m)
    tl.store(p_state + o_state + ROWS, l)
    tl.store(p_state + o_state + 2 * ROWS, s_top)
    if VALUES:
        tl.store(p_top + o_row, top)
        tl.store(p_acc + o_row[:, None] * BDV + dv[None, :], acc)


@triton.jit(do_not_specialize=["n_keys", "keys_per_split", "n_splits"])
def attend_kernel(
    p_q, p_k, p_v, p_acc, p_state, p_top, p_start,
    n_keys, keys_per_split, n_splits, scale, cap2,
    sqb, sqh, sqw, skb, skh, skn, svb, svh, svn,
    H, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    PADDED: tl.constexpr, CAPPED: tl.constexpr, VALUES: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (splits · row tiles, B·H); the row tiles of a split are neighbours, so that L2 serves all but one."""
    i = tl.program_id(0)
    attend_split(
        i // (ROWS // BM), i % (ROWS // BM), tl.program_id(1),
        p_q, p_k, p_v, p_acc, p_state, p_top, p_start,
        n_keys, keys_per_split, n_splits, scale, cap2,
        sqb, sqh, sqw, skb, skh, skn, svb, svh, svn,
        H, G, W, D, DV, ROWS, BM, BN, BD, BDV, PADDED, CAPPED, VALUES, PARTS, PRECISION,
    )  # fmt: skip


@triton.jit
def merge_row(
    i_row, i_bh,
    p_v, p_acc, p_state, p_top, p_sink, p_a_hi, p_a_lo, p_row,
    n_splits, svb, svh, svn,
    H, G: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BDV: tl.constexpr,
    BS: tl.constexpr, CHUNK: tl.constexpr, SINK: tl.constexpr, VALUES: tl.constexpr, A_PARTS: tl.constexpr,
):  # fmt: skip
    """Join a row's splits. Writes the output in parts, and (LSE, ‖a‖², dominant key, its cost²) as 4 × ROWS words."""
    i_b = (i_bh // H).to(tl.int64)
    i_h = i_bh % H
    i_s = tl.arange(0, BS)
    m_s = i_s < n_splits
    o_state = (i_bh * n_splits + i_s).to(tl.int64) * (3 * ROWS) + i_row
    ms = tl.load(p_state + o_state, mask=m_s, other=float("-inf"))
    ls = tl.load(p_state + o_state + ROWS, mask=m_s, other=0.0)
    o_out = i_bh.to(tl.int64) * (4 * ROWS) + i_row
    m = tl.max(ms, 0)
    if SINK:
        # a learned logit is one more key, with value 0
        sink2 = tl.load(p_sink + i_h * G + i_row // W, mask=i_row < G * W, other=0.0).to(tl.float32) * 1.4426950408889634
    if VALUES:
        tops = tl.load(p_state + o_state + 2 * ROWS, mask=m_s, other=float("-inf"))
        idx = tl.load(p_top + (i_bh * n_splits + i_s).to(tl.int64) * ROWS + i_row, mask=m_s, other=-1)
        s_top = tl.max(tops, 0)
        winner = tl.min(tl.where((tops == s_top) & (idx >= 0), i_s, BS), 0)
        top = tl.max(tl.where(i_s == winner, idx, -1), 0)
        m = tl.maximum(m, tl.max(tl.where(i_s == winner, float("-inf"), tops), 0))
    if SINK:
        m = tl.maximum(m, sink2)
    l = tl.sum(ls * tl.exp2(ms - finite(m)), 0)
    if SINK:
        l += tl.exp2(sink2 - m)
    if VALUES:
        l += tl.sum(tl.where(i_s == winner, 0.0, tl.exp2(tops - finite(m))), 0)
        dv = tl.arange(0, BDV)
        m_dv = dv < DV
        p_v += i_b * svb + i_h.to(tl.int64) * svh
        acc = tl.zeros([BDV], tl.float32)
        for s0 in range(0, n_splits, CHUNK):
            c = s0 + tl.arange(0, CHUNK)
            m_c = c < n_splits
            o_c = (i_bh * n_splits + c).to(tl.int64)
            # [CHUNK, BDV]
            b_acc = tl.load(p_acc + (o_c * ROWS + i_row)[:, None] * BDV + dv[None, :], mask=m_c[:, None], other=0.0)
            m_part = tl.load(p_state + o_c * (3 * ROWS) + i_row, mask=m_c, other=float("-inf"))
            acc += tl.sum(b_acc * tl.exp2(m_part - finite(m))[:, None], 0)
            # dominant keys of the other splits join the sums
            j = tl.load(p_top + o_c * ROWS + i_row, mask=m_c, other=-1)
            s_j = tl.load(p_state + o_c * (3 * ROWS) + 2 * ROWS + i_row, mask=m_c, other=float("-inf"))
            joins = (j >= 0) & (c != winner)
            p_j = p_v + tl.where(joins, j, 0).to(tl.int64) * svn
            b_v = tl.load(p_j[:, None] + dv[None, :], mask=joins[:, None] & m_dv[None, :], other=0.0).to(tl.float32)
            acc += tl.sum(b_v * tl.where(joins, tl.exp2(s_j - finite(m)), 0.0)[:, None], 0)
        rest = acc / tl.where(l > 0, l, 1.0)
        mm = tl.maximum(m, s_top)
        e_top = tl.exp2(s_top - finite(mm))
        e_rest = l * tl.exp2(m - finite(mm))
        z = e_top + e_rest
        z_safe = tl.where(z > 0, z, 1.0)
        v_top = tl.load(p_v + tl.maximum(top, 0).to(tl.int64) * svn + dv, mask=m_dv & (top + tl.zeros([BDV], tl.int32) >= 0), other=0.0)
        v_top = v_top.to(tl.float32)
        apart = rest - v_top
        cost = (e_top / z_safe) * (e_top / z_safe) * tl.sum(apart * apart, 0)
        a = (e_top / z_safe) * v_top + (e_rest / z_safe) * rest
        o_a = (i_bh.to(tl.int64) * ROWS + i_row) * BDV + dv
        a_hi = a.to(p_a_hi.dtype.element_ty)
        used = a_hi.to(tl.float32)
        tl.store(p_a_hi + o_a, a_hi)
        if A_PARTS == 2:
            a_lo = (a - used).to(p_a_hi.dtype.element_ty)
            used += a_lo.to(tl.float32)
            tl.store(p_a_lo + o_a, a_lo)
        tl.store(p_row + o_out + ROWS, tl.sum(used * used, 0))
        tl.store(p_row + o_out + 2 * ROWS, top.to(tl.float32, bitcast=True))
        tl.store(p_row + o_out + 3 * ROWS, cost)
        m = mm
        l = z
    # a row that sees no key has weights 0 everywhere
    tl.store(p_row + o_out, tl.where(l > 0, finite(m) + tl.log2(tl.where(l > 0, l, 1.0)), float("inf")))


@triton.jit(do_not_specialize=["n_splits"])
def merge_kernel(
    p_v, p_acc, p_state, p_top, p_sink, p_a_hi, p_a_lo, p_row,
    n_splits, svb, svh, svn,
    H, G: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BDV: tl.constexpr,
    BS: tl.constexpr, CHUNK: tl.constexpr, SINK: tl.constexpr, VALUES: tl.constexpr, A_PARTS: tl.constexpr,
):  # fmt: skip
    """Grid (ROWS, B·H)."""
    merge_row(
        tl.program_id(0), tl.program_id(1),
        p_v, p_acc, p_state, p_top, p_sink, p_a_hi, p_a_lo, p_row,
        n_splits, svb, svh, svn,
        H, G, W, DV, ROWS, BDV, BS, CHUNK, SINK, VALUES, A_PARTS,
    )  # fmt: skip
