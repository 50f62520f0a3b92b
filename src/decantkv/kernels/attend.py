"""Kernel A and its merge: the window's attention, split along keys, with each row's dominant key kept apart.

A row's output without its dominant key cannot be recovered from the full output once that key's weight nears 1: the
subtraction has no digits left. So kernel A moves a key out of the running sums as soon as it has nine tenths of all
the weight its row has seen in this split, and the merge writes that key's cost from sums it never entered.

Most tiles hold nothing that large. They are folded in under the old reference maximum, without any reduction over
rows: only a key above the row's running total makes the kernel look closer.

Scratch, float32 words. A split: [ROWS, BDV] Σ e·v of the others, then (m, Σ e, s_top, top) as [4, ROWS].
A KV head: [ROWS, RW] the output a, then (lse2, top, cost² of top) as [3, ROWS]; without values only the words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decantkv.kernels.primitives import (
    dot,
    finished,
    finite,
    key_offset,
    keys_of,
    page_of,
    per_column,
    per_row,
    to_logits2,
    weighted_sum,
)

_NO_INDEX = tl.constexpr(2147483647)
# A key below this share of what its row has seen stays in the sums: with 16-bit weights a 1−p of 0.1 keeps its digits,
# and a lower bar would set ordinary keys apart in most first tiles.
_DOMINANT = tl.constexpr(0.9)
_HEADROOM = tl.constexpr(100.0)  # a weight stays below 2^100 of the reference, far from overflow


@triton.jit
def row_sums(weight, e, ROWS_FIRST: tl.constexpr):
    """Return Σ over keys [BM] of what `weight` holds and of a tile's weights."""
    if ROWS_FIRST:
        return tl.sum(weight, 1) + tl.sum(e, 1)
    else:
        return tl.sum(weight + e, 0)


@triton.jit
def attend_split(
    i_split, i_tile, i_bh,
    p_q, p_k, p_v, p_part, p_start, p_table, p_lengths,
    n_keys, keys_per_split, n_splits, scale, cap2,
    sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, s_table,
    H, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    PADDED: tl.constexpr, CAPPED: tl.constexpr, VALUES: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    PAGE: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """One split of keys for BM rows: the softmax state of all keys but the dominant one, which is named beside it.

    With ROWS_FIRST the rows are the dots' rows, and a tile is [BM, BN] instead of [BN, BM]: weights stay in registers
    between both dots, and sums over keys are nearly free, so that `weight` holds one number per row, not per element.
    """
    KEYS: tl.constexpr = 1 if ROWS_FIRST else 0  # the axis
    i_b = (i_bh // H).to(tl.int64)
    i_h = i_bh % H
    r = i_tile * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    m_row = r < G * W
    # [BM, BD]
    p_row = p_q + i_b * sqb + (i_h * G + r // W).to(tl.int64) * sqh + (r % W).to(tl.int64) * sqw
    b_q = tl.load(p_row[:, None] + d[None, :], mask=m_row[:, None] & (d < D)[None, :], other=0.0)
    n_keys = keys_of(p_lengths, i_b, n_keys, PAGE)
    last_seen = tl.where(m_row, n_keys - W + r % W, -1)
    lo = i_split * keys_per_split
    hi = tl.minimum(lo + keys_per_split, n_keys)
    if PADDED:
        lo = tl.maximum(lo, tl.load(p_start + i_b).to(tl.int32))
    p_k += i_h.to(tl.int64) * skh
    p_v += i_h.to(tl.int64) * svh
    if PAGE == 0:
        p_k += i_b * skb
        p_v += i_b * svb
    else:
        p_table += i_b * s_table
    j = tl.arange(0, BN)
    o_k = j[:, None] * skn + d[None, :]
    o_v = j[:, None] * svn + dv[None, :]

    m = tl.full([BM], float("-inf"), tl.float32)
    bar = tl.full([BM], float("-inf"), tl.float32)  # log2 of the running total when last looked at
    s_top = tl.full([BM], float("-inf"), tl.float32)
    top = tl.full([BM], -1, tl.int32)
    p_part += (i_bh * n_splits + i_split).to(tl.int64) * (ROWS * ((BDV if VALUES else 0) + 4))
    weight = tl.zeros([BM, 1] if ROWS_FIRST else [BN, BM], tl.float32)
    acc = tl.zeros([BM, BDV] if ROWS_FIRST else [BDV, BM], tl.float32)
    for t in range(0, tl.cdiv(tl.maximum(hi - lo, 0), BN)):
        n0 = lo + t * BN
        n = n0 + j
        m_n = n < hi
        # [BN, BD], [BN, BDV]
        if PAGE == 0:
            p_kn = p_k + n0.to(tl.int64) * skn + o_k
            p_vn = p_v + n0.to(tl.int64) * svn + o_v
        else:
            page = page_of(n, m_n, p_table, PAGE)
            p_kn = p_k + key_offset(n, page, skb, skn, PAGE)[:, None] + d[None, :]
            p_vn = p_v + key_offset(n, page, svb, svn, PAGE)[:, None] + dv[None, :]
        b_k = tl.load(p_kn, mask=m_n[:, None] & (d < D)[None, :], other=0.0)
        if VALUES:
            b_v = tl.load(p_vn, mask=m_n[:, None] & (dv < DV)[None, :], other=0.0)
        s = dot(b_q, tl.trans(b_k), PRECISION) if ROWS_FIRST else dot(b_k, tl.trans(b_q), PRECISION)
        s = to_logits2(s, scale, cap2, CAPPED)
        if (n0 + BN > hi) | (n0 + BN > n_keys - W + 1):  # rows that fill up a tile are left to the merge
            seen = per_column(m_n, ROWS_FIRST) & (per_column(n, ROWS_FIRST) <= per_row(last_seen, ROWS_FIRST))
            s = tl.where(seen, s, float("-inf"))
        if ROWS_FIRST:
            s_max = tl.max(s, 1)
            closer = tl.max((s_max > bar).to(tl.int32), 0) > 0
        else:
            closer = tl.max(tl.max((s > bar[None, :]).to(tl.int32), 1), 0) > 0
        if closer:
            if not ROWS_FIRST:
                s_max = tl.max(s, 0)
            m_new = tl.maximum(m, s_max)
            ref = finite(m_new)
            e = tl.exp2(s - per_row(ref, ROWS_FIRST))
            total = row_sums(weight * per_row(tl.exp2(m - ref), ROWS_FIRST), e, ROWS_FIRST) + tl.exp2(s_top - ref)
            if VALUES:
                dominant = (s_max > s_top) & (tl.exp2(s_max - ref) > _DOMINANT * total)
                if tl.max(dominant.to(tl.int32), 0) > 0:
                    i_n = per_column(n, ROWS_FIRST)
                    found = tl.min(tl.where(s == per_row(s_max, ROWS_FIRST), i_n, _NO_INDEX), KEYS)
                    here = per_row(dominant, ROWS_FIRST) & (i_n == per_row(found, ROWS_FIRST))
                    s = tl.where(here, float("-inf"), s)
                    back = dominant & (top >= 0)  # the key it displaces joins the sums
                    s_back = tl.where(back, s_top, float("-inf"))
                    m_new = tl.maximum(tl.maximum(m, tl.max(s, KEYS)), s_back)
                    ref = finite(m_new)
                    e_back = tl.exp2(s_back - ref)
                    i_back = tl.where(back, top, 0)
                    p_back = p_v + key_offset(i_back, page_of(i_back, back, p_table, PAGE), svb, svn, PAGE)
                    m_back = per_row(back, ROWS_FIRST) & per_column(dv < DV, ROWS_FIRST)
                    b_back = tl.load(per_row(p_back, ROWS_FIRST) + per_column(dv, ROWS_FIRST), mask=m_back, other=0.0)
                    decay = per_row(tl.exp2(m - ref), ROWS_FIRST)
                    acc = acc * decay + per_row(e_back, ROWS_FIRST) * b_back.to(tl.float32)
                    once = e_back[:, None] if ROWS_FIRST else tl.where(j == 0, 1.0, 0.0)[:, None] * e_back[None, :]
                    weight = weight * decay + once
                    m = m_new
                    s_top = tl.where(dominant, s_max, s_top)
                    top = tl.where(dominant, found, top)
                    e = tl.exp2(s - per_row(ref, ROWS_FIRST))
                    total = row_sums(weight, e, ROWS_FIRST) + tl.exp2(s_top - ref)
            decay = per_row(tl.exp2(m - ref), ROWS_FIRST)
            if VALUES:
                acc = acc * decay
            weight = weight * decay
            m = m_new
            known = (m > float("-inf")) & (total > 0)
            bar = tl.where(known, m + tl.minimum(tl.log2(tl.where(known, total, 1.0)), _HEADROOM), float("-inf"))
        e = tl.exp2(s - per_row(finite(m), ROWS_FIRST))
        weight += tl.sum(e, 1)[:, None] if ROWS_FIRST else e
        if VALUES:
            acc = weighted_sum(acc, b_v, e, ROWS_FIRST, PARTS, PRECISION)
            if ROWS_FIRST:
                acc = finished(acc, PRECISION)

    if VALUES:
        tl.store(p_part + per_row(r, ROWS_FIRST) * BDV + per_column(dv, ROWS_FIRST), acc)
        p_part += ROWS * BDV
    tl.store(p_part + r, m)
    tl.store(p_part + ROWS + r, tl.sum(weight, KEYS))
    tl.store(p_part + 2 * ROWS + r, s_top)
    tl.store(p_part + 3 * ROWS + r, top.to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["n_keys", "keys_per_split", "n_splits", "s_table", "H"])
def attend_kernel(
    p_q, p_k, p_v, p_part, p_start, p_table, p_lengths,
    n_keys, keys_per_split, n_splits, scale, cap2,
    sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, s_table,
    H, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    PADDED: tl.constexpr, CAPPED: tl.constexpr, VALUES: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
    PAGE: tl.constexpr, ROWS_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid (splits · row tiles, B·H); the row tiles of a split are neighbours, so that L2 serves all but one."""
    i = tl.program_id(0)
    attend_split(
        i // (ROWS // BM), i % (ROWS // BM), tl.program_id(1),
        p_q, p_k, p_v, p_part, p_start, p_table, p_lengths,
        n_keys, keys_per_split, n_splits, scale, cap2,
        sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, s_table,
        H, G, W, D, DV, ROWS, BM, BN, BD, BDV, PADDED, CAPPED, VALUES, PARTS, PRECISION, PAGE, ROWS_FIRST,
    )  # fmt: skip


@triton.jit
def project_row(a, apart, p_m, p_am, DV: tl.constexpr, BDV: tl.constexpr):
    """Store a·M [BDV] for a symmetric M [DV, DV]; return a·M·aᵀ and apart·M·apartᵀ."""
    BE: tl.constexpr = 16
    dv = tl.arange(0, BDV)
    a_norm = tl.sum(tl.zeros([BDV], tl.float32), 0)
    distance = a_norm
    for e0 in range(0, BDV, BE):
        e = e0 + tl.arange(0, BE)
        # [BE, BDV]
        b_m = tl.load(p_m + e[:, None] * DV + dv[None, :], mask=(e < DV)[:, None] & (dv < DV)[None, :], other=0.0)
        here = dv[None, :] == e[:, None]
        am = tl.sum(b_m * a[None, :], 1)
        tl.store(p_am + e, am)
        a_norm += tl.sum(am * tl.sum(tl.where(here, a[None, :], 0.0), 1), 0)
        distance += tl.sum(tl.sum(b_m * apart[None, :], 1) * tl.sum(tl.where(here, apart[None, :], 0.0), 1), 0)
    return tl.maximum(a_norm, 0.0), tl.maximum(distance, 0.0)


@triton.jit
def merge_row(
    i_row, i_bh,
    p_v, p_part, p_sink, p_metric, p_rows, p_table,
    n_splits, svb, svh, svn, s_table,
    H, G: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BDV: tl.constexpr,
    BS: tl.constexpr, CHUNK: tl.constexpr, SINK: tl.constexpr, VALUES: tl.constexpr, RW: tl.constexpr,
    METRIC: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Join a row's splits: its output, log-sum-exp, dominant key and that key's cost².

    With METRIC, p_metric holds M = W_O·W_Oᵀ of each query head, and a is replaced by a·M with a·M·aᵀ beside it.
    """
    WIDTH: tl.constexpr = BDV if VALUES else 0
    PART: tl.constexpr = ROWS * (WIDTH + 4)
    i_b = (i_bh // H).to(tl.int64)
    i_h = i_bh % H
    i_s = tl.arange(0, BS)
    m_s = i_s < n_splits
    p_part += i_bh.to(tl.int64) * n_splits * PART
    p_rows += i_bh.to(tl.int64) * (ROWS * (RW + (4 if METRIC else 3)))
    p_words = p_rows + ROWS * RW + i_row
    p_state = p_part + ROWS * WIDTH + i_row
    dv = tl.arange(0, BDV)
    if VALUES and BS <= CHUNK:
        # [BS, BDV], in flight before the weights are known
        p_acc = p_part + i_row * BDV
        b_acc = tl.load(p_acc + i_s[:, None] * PART + dv[None, :], mask=m_s[:, None], other=0.0)
    ms = tl.load(p_state + i_s * PART, mask=m_s, other=float("-inf"))
    ls = tl.load(p_state + i_s * PART + ROWS, mask=m_s, other=0.0)
    m = tl.max(ms, 0)
    if SINK:
        # a learned logit is one more key, with value 0
        sink2 = tl.load(p_sink + i_h * G + i_row // W, mask=i_row < G * W, other=0.0).to(tl.float32)
        sink2 = sink2 * 1.4426950408889634
        m = tl.maximum(m, sink2)
    if VALUES:
        tops = tl.load(p_state + i_s * PART + 2 * ROWS, mask=m_s, other=float("-inf"))
        bits = tl.load(p_state + i_s * PART + 3 * ROWS, mask=m_s, other=0.0).to(tl.int32, bitcast=True)
        s_top = tl.max(tops, 0)
        winner = tl.min(tl.where((tops == s_top) & (tops > float("-inf")), i_s, BS), 0)
        top = tl.max(tl.where(i_s == winner, bits, -1), 0)
        top = tl.where(i_row < G * W, top, -1)
        joins = tl.where(i_s == winner, float("-inf"), tops)  # the other splits' dominant keys join the sums
        m = tl.maximum(m, tl.max(joins, 0))
    weight = tl.sum(ls * tl.exp2(ms - finite(m)), 0)
    if SINK:
        weight += tl.exp2(sink2 - finite(m))
    if VALUES:
        weight += tl.sum(tl.exp2(joins - finite(m)), 0)
        m_dv = dv < DV
        p_v += i_h.to(tl.int64) * svh
        if PAGE == 0:
            p_v += i_b * svb
        else:
            p_table += i_b * s_table
        i_top = tl.maximum(top, 0)
        p_top = p_v + key_offset(i_top, page_of(i_top, top >= 0, p_table, PAGE), svb, svn, PAGE)
        v_top = tl.load(p_top + dv, mask=m_dv & (top + tl.zeros([BDV], tl.int32) >= 0), other=0.0).to(tl.float32)
        if BS <= CHUNK:
            i_j = tl.where(joins > float("-inf"), bits, 0)
            p_j = p_v + key_offset(i_j, page_of(i_j, joins > float("-inf"), p_table, PAGE), svb, svn, PAGE)
            b_v = tl.load(p_j[:, None] + dv[None, :], mask=(joins > float("-inf"))[:, None] & m_dv[None, :], other=0.0)
            acc = tl.sum(b_acc * tl.exp2(ms - finite(m))[:, None], 0)
            acc += tl.sum(b_v.to(tl.float32) * tl.exp2(joins - finite(m))[:, None], 0)
        else:
            acc = tl.zeros([BDV], tl.float32)
            for s0 in range(0, n_splits, CHUNK):
                c = s0 + tl.arange(0, CHUNK)
                m_c = c < n_splits
                p_c = p_part + c.to(tl.int64) * PART
                # [CHUNK, BDV]
                b_part = tl.load((p_c + i_row * BDV)[:, None] + dv[None, :], mask=m_c[:, None], other=0.0)
                m_part = tl.load(p_c + ROWS * WIDTH + i_row, mask=m_c, other=float("-inf"))
                s_j = tl.load(p_c + ROWS * WIDTH + 2 * ROWS + i_row, mask=m_c & (c != winner), other=float("-inf"))
                i_j = tl.load(p_c + ROWS * WIDTH + 3 * ROWS + i_row, mask=m_c, other=0.0).to(tl.int32, bitcast=True)
                i_j = tl.where(s_j > float("-inf"), i_j, 0)
                p_j = p_v + key_offset(i_j, page_of(i_j, s_j > float("-inf"), p_table, PAGE), svb, svn, PAGE)
                m_j = (s_j > float("-inf"))[:, None] & m_dv[None, :]
                b_v = tl.load(p_j[:, None] + dv[None, :], mask=m_j, other=0.0)
                acc += tl.sum(b_part * tl.exp2(m_part - finite(m))[:, None], 0)
                acc += tl.sum(b_v.to(tl.float32) * tl.exp2(s_j - finite(m))[:, None], 0)
        rest = acc / tl.where(weight > 0, weight, 1.0)
        m_all = tl.maximum(m, s_top)
        e_top = tl.exp2(s_top - finite(m_all))
        e_rest = weight * tl.exp2(m - finite(m_all))
        z = e_top + e_rest
        z_safe = tl.where(z > 0, z, 1.0)
        apart = rest - v_top
        a = (e_top / z_safe) * v_top + (e_rest / z_safe) * rest
        if METRIC:
            p_m = p_metric + (i_h * G + tl.minimum(i_row // W, G - 1)).to(tl.int64) * (DV * DV)
            a_norm, distance = project_row(a, apart, p_m, p_rows + i_row * BDV, DV, BDV)
            tl.store(p_words + 3 * ROWS, a_norm)
        else:
            distance = tl.sum(apart * apart, 0)
            # after a sum over splits every warp holds a copy of a: stored as a row, by the threads that own row 0
            p_a = p_rows + i_row * BDV + i_s[:, None] * 0 + dv[None, :]
            tl.store(p_a, tl.broadcast_to(a[None, :], [BS, BDV]), mask=(i_s == 0)[:, None])
        tl.store(p_words + ROWS, top.to(tl.float32, bitcast=True))
        tl.store(p_words + 2 * ROWS, (e_top / z_safe) * (e_top / z_safe) * distance)
        m = m_all
        weight = z
    # a row that sees no key, or only fills up a tile, has weights 0 everywhere
    lse2 = tl.where(
        (weight > 0) & (i_row < G * W), finite(m) + tl.log2(tl.where(weight > 0, weight, 1.0)), float("inf")
    )
    tl.store(p_words, lse2)


@triton.jit(do_not_specialize=["n_splits", "s_table", "H"])
def merge_kernel(
    p_v, p_part, p_sink, p_metric, p_rows, p_table,
    n_splits, svb, svh, svn, s_table,
    H, G: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BDV: tl.constexpr,
    BS: tl.constexpr, CHUNK: tl.constexpr, SINK: tl.constexpr, VALUES: tl.constexpr, RW: tl.constexpr,
    METRIC: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid (ROWS, B·H)."""
    merge_row(
        tl.program_id(0), tl.program_id(1), p_v, p_part, p_sink, p_metric, p_rows, p_table,
        n_splits, svb, svh, svn, s_table, H, G, W, DV, ROWS, BDV, BS, CHUNK, SINK, VALUES, RW, METRIC, PAGE,
    )  # fmt: skip
