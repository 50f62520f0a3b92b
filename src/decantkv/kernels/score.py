"""Kernel B: one pass over the keys turns the rows' log-sum-exp and output into a score per key.

Keys are the rows of both dots, so a score is a row sum. In one-pass mode the rows' output and log-sum-exp come from
the model, and each row's dominant key (p over ½) is left out and paid for afterwards: while the tile is on the chip
the kernel also sums every other key's weight and weighted value, which is what that key's cost is made of.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decantkv.kernels.primitives import dot, normal_or_zero, to_logits2

PERTURBATION = 0  # DropKV's cost [p/(1−p)·‖a−v‖]²
MASS = 1  # SnapKV's weight p
_MASS = tl.constexpr(MASS)
_DOMINANT = tl.constexpr(0.518)  # one pass: at most one key a row weighs more, whatever the rounding


@triton.jit
def weights(b_k, b_q, lse2, scale, cap2, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """p [BN, BM] of a tile of keys for a tile of rows; 0 where lse2 is +inf, before any mask."""
    return tl.exp2(to_logits2(dot(b_k, tl.trans(b_q), PRECISION), scale, cap2, CAPPED) - lse2[None, :])


@triton.jit
def perturbations(p, b_v, a_hi, a_lo, a_norm, A_PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """[p/(1−p)·‖a−v‖]² [BN, BM], of use where p is no more than about 0.9: dominant keys are paid for apart."""
    wide = b_v.to(tl.float32)
    v_norm = tl.sum(wide * wide, 1)
    cross = dot(b_v, tl.trans(a_hi), PRECISION)
    if A_PARTS == 2:
        cross += dot(b_v, tl.trans(a_lo), PRECISION)
    distance = tl.maximum(a_norm[None, :] + v_norm[:, None] - 2.0 * cross, 0.0)
    odds = p / (1.0 - p)
    return odds * (odds * distance)  # this order neither overflows nor underflows before the result does


@triton.jit
def load_rows(
    i_tile, i_bh,
    p_q, p_out, p_lse, p_rows,
    n_keys, sqb, sqh, sqw, sob, soh, sow,
    H, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    QUANTITY: tl.constexpr, ONE_PASS: tl.constexpr, A_PARTS: tl.constexpr,
):  # fmt: skip
    """What a tile of rows brings: q, last key seen, lse2, the output in parts, ‖a‖², dominant key, its cost²."""
    WIDTH: tl.constexpr = 0 if QUANTITY == _MASS else BDV
    i_b = (i_bh // H).to(tl.int64)
    r = i_tile * BM + tl.arange(0, BM)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    m_row = r < G * W
    head = ((i_bh % H) * G + r // W).to(tl.int64)
    # [BM, BD]
    p_qr = p_q + i_b * sqb + head * sqh + (r % W).to(tl.int64) * sqw
    b_q = tl.load(p_qr[:, None] + d[None, :], mask=m_row[:, None] & (d < D)[None, :], other=0.0)
    last_seen = tl.where(m_row, n_keys - W + r % W, -1)
    p_rows += i_bh.to(tl.int64) * (ROWS * (WIDTH + 3))
    if ONE_PASS:
        lse = tl.load(p_lse + i_bh.to(tl.int64) * (G * W) + r, mask=m_row, other=float("inf"))
        lse2 = lse.to(tl.float32) * 1.4426950408889634
        lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)  # a row that sees no key has weights 0
    else:
        lse2 = tl.load(p_rows + ROWS * WIDTH + r)
    a_hi, a_lo = b_q, b_q
    a_norm = tl.zeros([BM], tl.float32)
    top = tl.full([BM], -1, tl.int32)
    top_cost = a_norm
    if QUANTITY != _MASS:
        # [BM, BDV]
        if ONE_PASS:
            p_a = p_out + i_b * sob + head * soh + (r % W).to(tl.int64) * sow
            a_hi = tl.load(p_a[:, None] + dv[None, :], mask=m_row[:, None] & (dv < DV)[None, :], other=0.0)
            a_lo = a_hi
        else:
            a = tl.load(p_rows + r[:, None] * BDV + dv[None, :])
            a_hi = a.to(b_q.dtype)
            a_lo = (a - a_hi.to(tl.float32)).to(b_q.dtype)
            top = tl.load(p_rows + ROWS * WIDTH + ROWS + r).to(tl.int32, bitcast=True)
            top_cost = tl.load(p_rows + ROWS * WIDTH + 2 * ROWS + r)
        used = a_hi.to(tl.float32)
        if A_PARTS == 2:
            used += a_lo.to(tl.float32)
        a_norm = tl.sum(used * used, 1)
    return b_q, last_seen, lse2, a_hi, a_lo, a_norm, top, top_cost


@triton.jit
def score_split(
    i_split, i_bh,
    p_q, p_k, p_v, p_out, p_lse, p_rows, p_score, p_part, p_start,
    n_keys, keys_per_split, n_splits, scale, cap2,
    sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, sob, soh, sow,
    H, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    PADDED: tl.constexpr, CAPPED: tl.constexpr, QUANTITY: tl.constexpr, MAX: tl.constexpr,
    ONE_PASS: tl.constexpr, A_PARTS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of one split, last tile first: kernel A has just left the ends of its splits in L2."""
    SINGLE: tl.constexpr = ROWS == BM
    RESCUE: tl.constexpr = ONE_PASS and QUANTITY != _MASS
    i_b = (i_bh // H).to(tl.int64)
    i_h = i_bh % H
    j = tl.arange(0, BN)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    lo = i_split * keys_per_split
    hi = tl.minimum(lo + keys_per_split, n_keys)
    start = 0
    if PADDED:
        start = tl.load(p_start + i_b).to(tl.int32)
    p_k += i_b * skb + i_h.to(tl.int64) * skh
    p_v += i_b * svb + i_h.to(tl.int64) * svh
    p_score += i_bh.to(tl.int64) * n_keys
    o_k = j[:, None] * skn + d[None, :]
    o_v = j[:, None] * svn + dv[None, :]
    if SINGLE:
        b_q, last_seen, lse2, a_hi, a_lo, a_norm, top, top_cost = load_rows(
            0, i_bh, p_q, p_out, p_lse, p_rows, n_keys, sqb, sqh, sqw, sob, soh, sow,
            H, G, W, D, DV, ROWS, BM, BD, BDV, QUANTITY, ONE_PASS, A_PARTS,
        )  # fmt: skip
    if RESCUE:
        acc = tl.zeros([BDV, BM], tl.float32)
        mass = tl.zeros([BN, BM], tl.float32)
        hot = tl.full([BN, BM], -1, tl.int32)

    n_tiles = tl.cdiv(tl.maximum(hi - lo, 0), BN)
    for t in range(0, n_tiles):
        n0 = lo + (n_tiles - 1 - t) * BN
        n = n0 + j
        m_n = n < hi
        m_real = m_n & (n >= start)
        # [BN, BD], [BN, BDV]
        b_k = tl.load(p_k + n0.to(tl.int64) * skn + o_k, mask=m_n[:, None] & (d < D)[None, :], other=0.0)
        b_v = b_k
        if QUANTITY != _MASS:
            b_v = tl.load(p_v + n0.to(tl.int64) * svn + o_v, mask=m_n[:, None] & (dv < DV)[None, :], other=0.0)
        if SINGLE:
            p = weights(b_k, b_q, lse2, scale, cap2, CAPPED, PRECISION)
            p = tl.where((n[:, None] <= last_seen[None, :]) & m_real[:, None], p, 0.0)
            if QUANTITY == _MASS:
                cost = tl.minimum(p, 1.0)
            elif ONE_PASS:
                hot = tl.where(p > _DOMINANT, n[:, None], hot)
                p = tl.where(p > _DOMINANT, 0.0, p)
                cost = perturbations(p, b_v, a_hi, a_lo, a_norm, A_PARTS, PRECISION)
                if PARTS == 2:
                    b_p = p.to(b_v.dtype)
                    acc += dot(tl.trans(b_v), b_p, PRECISION)
                    mass += b_p.to(tl.float32)
                else:
                    acc += dot(tl.trans(b_v.to(tl.float32)), p, PRECISION)
                    mass += p
            else:
                cost = perturbations(p, b_v, a_hi, a_lo, a_norm, A_PARTS, PRECISION)
                cost = tl.where(n[:, None] == top[None, :], top_cost[None, :], cost)
            total = tl.max(cost, 1) if MAX else tl.sum(cost, 1)
        else:
            total = tl.zeros([BN], tl.float32)
            for i_tile in range(0, ROWS // BM):
                q_t, last_t, lse2_t, hi_t, lo_t, norm_t, top_t, top_cost_t = load_rows(
                    i_tile, i_bh, p_q, p_out, p_lse, p_rows, n_keys, sqb, sqh, sqw, sob, soh, sow,
                    H, G, W, D, DV, ROWS, BM, BD, BDV, QUANTITY, ONE_PASS, A_PARTS,
                )  # fmt: skip
                p = weights(b_k, q_t, lse2_t, scale, cap2, CAPPED, PRECISION)
                p = tl.where((n[:, None] <= last_t[None, :]) & m_real[:, None], p, 0.0)
                if QUANTITY == _MASS:
                    cost = tl.minimum(p, 1.0)
                else:
                    cost = perturbations(p, b_v, hi_t, lo_t, norm_t, A_PARTS, PRECISION)
                    cost = tl.where(n[:, None] == top_t[None, :], top_cost_t[None, :], cost)
                if MAX:
                    total = tl.maximum(total, tl.max(cost, 1))
                else:
                    total += tl.sum(cost, 1)
        if not MAX:
            total = total / G
        tl.store(p_score + n, normal_or_zero(total), mask=m_n)

    if RESCUE:
        r = tl.arange(0, BM)
        p_part += (i_bh * n_splits + i_split).to(tl.int64) * (ROWS * (BDV + 2))
        tl.store(p_part + r[:, None] * BDV + dv[None, :], tl.trans(acc))
        tl.store(p_part + ROWS * BDV + r, tl.sum(mass, 0))
        tl.store(p_part + ROWS * BDV + ROWS + r, tl.max(hot, 0).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["n_keys", "keys_per_split", "n_splits", "H"])
def score_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_rows, p_score, p_part, p_start,
    n_keys, keys_per_split, n_splits, scale, cap2,
    sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, sob, soh, sow,
    H, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    PADDED: tl.constexpr, CAPPED: tl.constexpr, QUANTITY: tl.constexpr, MAX: tl.constexpr,
    ONE_PASS: tl.constexpr, A_PARTS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (splits, B·H). Every score [B·H, N] is written, pads and unseen keys as 0."""
    score_split(
        tl.program_id(0), tl.program_id(1),
        p_q, p_k, p_v, p_out, p_lse, p_rows, p_score, p_part, p_start,
        n_keys, keys_per_split, n_splits, scale, cap2,
        sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, sob, soh, sow,
        H, G, W, D, DV, ROWS, BM, BN, BD, BDV, PADDED, CAPPED, QUANTITY, MAX, ONE_PASS, A_PARTS, PARTS, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n_splits", "H"])
def dominant_cost_kernel(
    p_v, p_part, p_lse, p_sink, p_cost,
    n_splits, svb, svh, svn,
    H, G: tl.constexpr, W: tl.constexpr, DV: tl.constexpr, ROWS: tl.constexpr, BDV: tl.constexpr,
    BS: tl.constexpr, CHUNK: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """One-pass mode, grid (ROWS, B·H): a row's dominant key and its cost² from the sums over all others."""
    PART: tl.constexpr = ROWS * (BDV + 2)
    i_row = tl.program_id(0)
    i_bh = tl.program_id(1)
    i_h = i_bh % H
    i_s = tl.arange(0, BS)
    m_s = i_s < n_splits
    dv = tl.arange(0, BDV)
    p_part += i_bh.to(tl.int64) * n_splits * PART
    p_state = p_part + ROWS * BDV + i_row + i_s * PART
    top = tl.max(tl.load(p_state + ROWS, mask=m_s, other=-1.0).to(tl.int32, bitcast=True), 0)
    p_cost += i_bh.to(tl.int64) * (2 * ROWS) + i_row
    tl.store(p_cost, top.to(tl.float32, bitcast=True))
    if top >= 0:
        mass = tl.sum(tl.load(p_state, mask=m_s, other=0.0), 0)
        if SINK:
            lse = tl.load(p_lse + i_bh.to(tl.int64) * (G * W) + i_row).to(tl.float32)
            mass += tl.exp2((tl.load(p_sink + i_h * G + i_row // W).to(tl.float32) - lse) * 1.4426950408889634)
        acc = tl.zeros([BDV], tl.float32)
        for s0 in range(0, n_splits, CHUNK):
            c = s0 + tl.arange(0, CHUNK)
            p_c = p_part + c.to(tl.int64) * PART + i_row * BDV
            acc += tl.sum(tl.load(p_c[:, None] + dv[None, :], mask=(c < n_splits)[:, None], other=0.0), 0)
        p_top_v = p_v + (i_bh // H).to(tl.int64) * svb + i_h.to(tl.int64) * svh + top.to(tl.int64) * svn
        v_top = tl.load(p_top_v + dv, mask=dv < DV, other=0.0).to(tl.float32)
        apart = acc / tl.where(mass > 0, mass, 1.0) - v_top
        p = 1.0 - mass
        tl.store(p_cost + ROWS, p * p * tl.sum(apart * apart, 0))


@triton.jit(do_not_specialize=["n_keys"])
def add_dominant_kernel(
    p_score, p_cost, n_keys, G: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr, MAX: tl.constexpr
):
    """One-pass mode, grid (B·H): give dominant keys their cost; rows that share a key are summed in a fixed order."""
    i_bh = tl.program_id(0).to(tl.int64)
    r = tl.arange(0, BM)
    p_cost += i_bh * (2 * ROWS)
    top = tl.load(p_cost + r, mask=r < ROWS, other=-1.0).to(tl.int32, bitcast=True)
    on = top >= 0
    cost = tl.load(p_cost + ROWS + r, mask=on, other=0.0)
    # [BM, BM]
    same = (top[:, None] == top[None, :]) & on[None, :]
    first = on & (tl.min(tl.where(same, r[None, :], BM), 1) == r)
    p_key = p_score + i_bh * n_keys + tl.where(on, top, 0)
    here = tl.load(p_key, mask=first, other=0.0)
    if MAX:
        total = tl.maximum(here, tl.max(tl.where(same, cost[None, :], 0.0), 1))
    else:
        total = here + tl.sum(tl.where(same, cost[None, :], 0.0), 1) / G
    tl.store(p_key, normal_or_zero(total), mask=first)
