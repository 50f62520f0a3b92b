"""Kernel B: one pass over the keys turns the rows' log-sum-exp and output into a score per key.

Keys are the rows of both dots, so a score is a row sum. Every quantity is this kernel with another last step.

In one-pass mode the rows' output and log-sum-exp come from
the model, and each row's dominant key (p over ½) is left out and paid for afterwards: while the tile is on the chip
the kernel also sums every other key's weight and weighted value, which is what that key's cost is made of.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decantkv.kernels.primitives import dot, inverse, key_offset, keys_of, normal_or_zero, page_of, to_logits2

PERTURBATION = 0  # DropKV's cost [p/(1−p)·‖a−v‖]²
MASS = 1  # SnapKV's weight p
ALIGNMENT = 2  # AnDPro's p·⟨v, a⟩/‖a‖
PULL = 3  # AnDPro's p̃·⟨v, u⟩, u = Σ p̃ v as `pull` makes it
OUTPUT_PERTURBATION = 4  # [p/(1−p)·‖(a−v)·W_O‖]²
NO_POOL, MAX_POOL, AVG_POOL = 0, 1, 2  # of each row's weights, along the keys before the window
_PERTURBATION = tl.constexpr(PERTURBATION)
_MASS = tl.constexpr(MASS)
_ALIGNMENT = tl.constexpr(ALIGNMENT)
_PULL = tl.constexpr(PULL)
_OUTPUT = tl.constexpr(OUTPUT_PERTURBATION)
_NO_POOL = tl.constexpr(NO_POOL)
_MAX_POOL = tl.constexpr(MAX_POOL)
_DOMINANT = tl.constexpr(0.518)  # one pass: at most one key per row weighs more, whatever the rounding


@triton.jit
def weights(b_k, b_q, lse2, scale, cap2, CAPPED: tl.constexpr, PRECISION: tl.constexpr):
    """p [BN, BM] of a tile of keys for a tile of rows; 0 where lse2 is +inf, before any mask."""
    return tl.exp2(to_logits2(dot(b_k, tl.trans(b_q), PRECISION), scale, cap2, CAPPED) - lse2[None, :])


@triton.jit
def pooled_weights(
    n, p_k, p_table, start, n_keys, b_q, last_seen, lse2, scale, cap2, skb, skn,
    W: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    POOL: tl.constexpr, KERNEL: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """p [BN, BM] of the keys n, each row's pooled over KERNEL keys before the window; the window's as they are.

    A neighbour's weight is computed anew for every key it is near: its tile is in L1 or L2, its row of p nowhere.
    """
    d = tl.arange(0, BD)
    edge = n_keys - W
    pooled = tl.zeros([BN, BM], tl.float32)
    for o in range(0, KERNEL):
        i = tl.where(n < edge, n + o - KERNEL // 2, n)  # a key of the window is its own neighbour
        inside = (i >= start) & (i < tl.where(n < edge, edge, n_keys))
        # [BN, BD]
        p_i = p_k + key_offset(i, page_of(i, inside, p_table, PAGE), skb, skn, PAGE)[:, None] + d[None, :]
        b_k = tl.load(p_i, mask=inside[:, None] & (d < D)[None, :], other=0.0)
        p = weights(b_k, b_q, lse2, scale, cap2, CAPPED, PRECISION)
        p = tl.where(inside[:, None] & (i[:, None] <= last_seen[None, :]), p, 0.0)
        pooled = tl.maximum(pooled, p) if POOL == _MAX_POOL else pooled + p
    if POOL != _MAX_POOL:
        pooled = pooled / KERNEL
    return pooled


@triton.jit
def cross_products(b_v, a_hi, a_lo, A_PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """⟨v, a⟩ [BN, BM] for a in parts."""
    cross = dot(b_v, tl.trans(a_hi), PRECISION)
    if A_PARTS == 2:
        cross += dot(b_v, tl.trans(a_lo), PRECISION)
    return cross


@triton.jit
def perturbations(p, v_norm, cross, a_norm, PRECISION: tl.constexpr):
    """[p/(1−p)·‖a−v‖]² [BN, BM], of use where p is no more than about 0.9: dominant keys are paid for apart."""
    distance = tl.maximum(a_norm[None, :] + v_norm - 2.0 * cross, 0.0)
    odds = p * inverse(1.0 - p, PRECISION)
    return odds * (odds * distance)  # this order neither overflows nor underflows before the result does


@triton.jit
def squared_norms(b_v):
    """‖v‖² [BN, 1]."""
    wide = b_v.to(tl.float32)
    return tl.sum(wide * wide, 1)[:, None]


@triton.jit
def projected_norms(
    n, m_n, i_tile, i_bh, p_norm, n_keys,
    G: tl.constexpr, W: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """v·M·vᵀ [BN, BM] with M of each row's query head, as `weigh` made them."""
    head = i_bh * G + tl.minimum((i_tile * BM + tl.arange(0, BM)) // W, G - 1)
    p_head = p_norm + head.to(tl.int64)[None, :] * n_keys + n[:, None]
    return tl.load(p_head, mask=m_n[:, None] & (head >= 0)[None, :], other=0.0)


@triton.jit
def costs(
    n, p, b_v, m_n, i_tile, i_bh, p_norm, n_keys, last_seen, a_hi, a_lo, a_norm,
    G: tl.constexpr, W: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
    QUANTITY: tl.constexpr, MAX: tl.constexpr, A_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return what each row [BM] adds to each key's score [BN], from the weights p."""
    if QUANTITY == _MASS:
        return tl.minimum(p, 1.0)
    elif QUANTITY == _ALIGNMENT or QUANTITY == _PULL:  # noqa: SIM109 - Triton knows no membership test
        along = p * cross_products(b_v, a_hi, a_lo, A_PARTS, PRECISION)
        if MAX:  # rows that fill up a tile must not win over negative ones
            along = tl.where((last_seen >= 0)[None, :], along, float("-inf"))
        return along
    else:
        if QUANTITY == _OUTPUT:
            v_norm = projected_norms(n, m_n, i_tile, i_bh, p_norm, n_keys, G, W, BN, BM)
        else:
            v_norm = squared_norms(b_v)
        return perturbations(p, v_norm, cross_products(b_v, a_hi, a_lo, A_PARTS, PRECISION), a_norm, PRECISION)


@triton.jit
def visible(n, p, last_seen, m_real, top):
    """The weights p, 0 where a row does not see a key, and at its dominant key, whose cost is known."""
    return tl.where((n[:, None] <= last_seen[None, :]) & m_real[:, None] & (n[:, None] != top[None, :]), p, 0.0)


@triton.jit
def with_top(total, n, top, top_cost, MAX: tl.constexpr):
    """The keys' totals [BN] joined with the costs of the rows' dominant keys."""
    cost = tl.where(n[:, None] == top[None, :], top_cost[None, :], 0.0)
    return tl.maximum(total, tl.max(cost, 1)) if MAX else total + tl.sum(cost, 1)


@triton.jit
def load_rows(
    i_tile, i_bh,
    p_q, p_out, p_lse, p_rows,
    n_keys, sqb, sqh, sqw, sob, soh, sow,
    H, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, RW: tl.constexpr,
    QUANTITY: tl.constexpr, ONE_PASS: tl.constexpr, A_PARTS: tl.constexpr,
):  # fmt: skip
    """Return what a tile of rows brings: q, last key seen, lse2, the output in parts, ‖a‖², dominant key, its cost².

    The output is a/‖a‖ for ALIGNMENT, u for PULL; for OUTPUT_PERTURBATION it is a·M, and ‖a‖² is a·M·aᵀ.
    """
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
    p_rows += i_bh.to(tl.int64) * (ROWS * (RW + (4 if QUANTITY == _OUTPUT else 3)))
    if ONE_PASS:
        lse = tl.load(p_lse + i_bh.to(tl.int64) * (G * W) + r, mask=m_row, other=float("inf"))
        lse2 = lse.to(tl.float32) * 1.4426950408889634
        lse2 = tl.where(lse2 == float("-inf"), float("inf"), lse2)  # a row that sees no key has weights 0
    else:
        lse2 = tl.load(p_rows + ROWS * RW + r)
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
            if QUANTITY == _ALIGNMENT:
                norm = tl.sqrt(tl.sum(a * a, 1))
                a = a / tl.where(norm > 0, norm, 1.0)[:, None]
            a_hi = a.to(b_q.dtype)
            a_lo = (a - a_hi.to(tl.float32)).to(b_q.dtype)
            if QUANTITY != _ALIGNMENT and QUANTITY != _PULL:
                top = tl.load(p_rows + ROWS * RW + ROWS + r).to(tl.int32, bitcast=True)
                top_cost = tl.load(p_rows + ROWS * RW + 2 * ROWS + r)
        if QUANTITY == _OUTPUT:
            a_norm = tl.load(p_rows + ROWS * RW + 3 * ROWS + r)
        else:
            used = a_hi.to(tl.float32)
            if A_PARTS == 2:
                used += a_lo.to(tl.float32)
            a_norm = tl.sum(used * used, 1)
    return b_q, last_seen, lse2, a_hi, a_lo, a_norm, top, top_cost


@triton.jit
def score_split(
    i_split, i_tile, i_bh,
    p_q, p_k, p_v, p_out, p_lse, p_rows, p_score, p_part, p_start, p_table, p_lengths, p_norm, p_unit,
    n_keys, keys_per_split, n_splits, scale, cap2,
    sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, sob, soh, sow, s_table,
    H, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    RW: tl.constexpr, PADDED: tl.constexpr, CAPPED: tl.constexpr, QUANTITY: tl.constexpr,
    MAX: tl.constexpr, POOL: tl.constexpr, KERNEL: tl.constexpr, ONE_PASS: tl.constexpr, A_PARTS: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Scores of one split, last tile first: kernel A has just left the ends of its splits in L2.

    With APART the program has one of the row tiles, and what it writes is its part of the sums (or maxima).
    """
    SINGLE: tl.constexpr = (ROWS == BM) | APART
    RESCUE: tl.constexpr = ONE_PASS and QUANTITY != _MASS
    HAS_TOP: tl.constexpr = ((QUANTITY == _PERTURBATION) | (QUANTITY == _OUTPUT)) and not ONE_PASS
    SIGNED: tl.constexpr = (QUANTITY == _ALIGNMENT) | (QUANTITY == _PULL)
    i_b = (i_bh // H).to(tl.int64)
    i_h = i_bh % H
    j = tl.arange(0, BN)
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    lo = i_split * keys_per_split
    n_row = keys_of(p_lengths, i_b, n_keys, PAGE)
    hi = tl.minimum(lo + keys_per_split, n_row)
    start = 0
    if PADDED:
        start = tl.load(p_start + i_b).to(tl.int32)
    p_k += i_h.to(tl.int64) * skh
    p_v += i_h.to(tl.int64) * svh
    if PAGE == 0:
        p_k += i_b * skb
        p_v += i_b * svb
    else:
        p_table += i_b * s_table
    i_score = i_bh
    if APART:
        i_score += i_tile * tl.num_programs(1)
    p_score += i_score.to(tl.int64) * n_keys
    o_k = j[:, None] * skn + d[None, :]
    o_v = j[:, None] * svn + dv[None, :]
    if SINGLE:
        b_q, last_seen, lse2, a_hi, a_lo, a_norm, top, top_cost = load_rows(
            i_tile, i_bh, p_q, p_out, p_lse, p_rows, n_row, sqb, sqh, sqw, sob, soh, sow,
            H, G, W, D, DV, ROWS, BM, BD, BDV, RW, QUANTITY, ONE_PASS, A_PARTS,
        )  # fmt: skip
        mine = (top >= lo) & (top < hi)
        first_top, last_top = tl.min(tl.where(mine, top, hi), 0), tl.max(tl.where(mine, top, -1), 0)
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
        ragged = (n0 + BN > n_row - W + 1) | (n0 < start)  # some row does not see some key
        near_top = False
        if SINGLE and HAS_TOP:
            near_top = (n0 <= last_top) & (n0 + BN > first_top)
        # [BN, BD], [BN, BDV]
        if PAGE == 0:
            p_kn = p_k + n0.to(tl.int64) * skn + o_k
            p_vn = p_v + n0.to(tl.int64) * svn + o_v
        else:
            page = page_of(n, m_n, p_table, PAGE)
            p_kn = p_k + key_offset(n, page, skb, skn, PAGE)[:, None] + d[None, :]
            p_vn = p_v + key_offset(n, page, svb, svn, PAGE)[:, None] + dv[None, :]
        b_k = o_k
        if POOL == _NO_POOL:
            b_k = tl.load(p_kn, mask=m_n[:, None] & (d < D)[None, :], other=0.0)
        b_v = b_k
        if QUANTITY != _MASS:
            b_v = tl.load(p_vn, mask=m_n[:, None] & (dv < DV)[None, :], other=0.0)
        if SINGLE:
            if POOL == _NO_POOL:
                p = weights(b_k, b_q, lse2, scale, cap2, CAPPED, PRECISION)
                if ragged | near_top:
                    p = visible(n, p, last_seen, m_real, top)
            else:
                p = pooled_weights(
                    n, p_k, p_table, start, n_row, b_q, last_seen, lse2, scale, cap2, skb, skn,
                    W, D, BN, BM, BD, POOL, KERNEL, CAPPED, PRECISION, PAGE,
                )  # fmt: skip
                p = tl.where(m_real[:, None], p, 0.0)
            if RESCUE:
                hot = tl.where(p > _DOMINANT, n[:, None], hot)
                p = tl.where(p > _DOMINANT, 0.0, p)
                cross = cross_products(b_v, a_hi, a_lo, A_PARTS, PRECISION)
                cost = perturbations(p, squared_norms(b_v), cross, a_norm, PRECISION)
                if PARTS == 2:
                    b_p = p.to(b_v.dtype)
                    acc += dot(tl.trans(b_v), b_p, PRECISION)
                    mass += b_p.to(tl.float32)
                else:
                    acc += dot(tl.trans(b_v.to(tl.float32)), p, PRECISION)
                    mass += p
            else:
                cost = costs(
                    n, p, b_v, m_n, i_tile, i_bh, p_norm, n_keys, last_seen, a_hi, a_lo, a_norm,
                    G, W, BN, BM, QUANTITY, MAX, A_PARTS, PRECISION,
                )  # fmt: skip
            total = tl.max(cost, 1) if MAX else tl.sum(cost, 1)
            if near_top:
                total = with_top(total, n, top, top_cost, MAX)
        else:
            total = tl.full([BN], float("-inf") if MAX and SIGNED else 0.0, tl.float32)
            for i_part in range(0, ROWS // BM):
                q_t, last_t, lse2_t, hi_t, lo_t, norm_t, top_t, top_cost_t = load_rows(
                    i_part, i_bh, p_q, p_out, p_lse, p_rows, n_row, sqb, sqh, sqw, sob, soh, sow,
                    H, G, W, D, DV, ROWS, BM, BD, BDV, RW, QUANTITY, ONE_PASS, A_PARTS,
                )  # fmt: skip
                if POOL == _NO_POOL:
                    p = weights(b_k, q_t, lse2_t, scale, cap2, CAPPED, PRECISION)
                    p = visible(n, p, last_t, m_real, top_t)
                else:
                    p = pooled_weights(
                        n, p_k, p_table, start, n_row, q_t, last_t, lse2_t, scale, cap2, skb, skn,
                        W, D, BN, BM, BD, POOL, KERNEL, CAPPED, PRECISION, PAGE,
                    )  # fmt: skip
                    p = tl.where(m_real[:, None], p, 0.0)
                cost = costs(
                    n, p, b_v, m_n, i_part, i_bh, p_norm, n_keys, last_t, hi_t, lo_t, norm_t,
                    G, W, BN, BM, QUANTITY, MAX, A_PARTS, PRECISION,
                )  # fmt: skip
                if MAX:
                    total = tl.maximum(total, tl.max(cost, 1))
                else:
                    total += tl.sum(cost, 1)
                if HAS_TOP:
                    total = with_top(total, n, top_t, top_cost_t, MAX)
        if QUANTITY == _OUTPUT:
            total *= tl.load(p_unit + i_h)  # what M is held relative to
        if not APART:
            total = normal_or_zero(total if MAX else total / G)
        tl.store(p_score + n, total, mask=m_n)

    if PAGE != 0:  # behind a row's end nothing may be chosen
        for n0 in range(tl.maximum(lo, n_row), tl.minimum(lo + keys_per_split, n_keys), BN):
            tl.store(p_score + n0 + j, tl.full([BN], float("-inf"), tl.float32), mask=n0 + j < n_keys)
    if RESCUE:
        r = tl.arange(0, BM)
        p_part += (i_bh * n_splits + i_split).to(tl.int64) * (ROWS * (BDV + 2))
        tl.store(p_part + r[:, None] * BDV + dv[None, :], tl.trans(acc))
        tl.store(p_part + ROWS * BDV + r, tl.sum(mass, 0))
        tl.store(p_part + ROWS * BDV + ROWS + r, tl.max(hot, 0).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["n_keys", "keys_per_split", "n_splits", "s_table", "H"])
def score_kernel(
    p_q, p_k, p_v, p_out, p_lse, p_rows, p_score, p_part, p_start, p_table, p_lengths, p_norm, p_unit,
    n_keys, keys_per_split, n_splits, scale, cap2,
    sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, sob, soh, sow, s_table,
    H, G: tl.constexpr, W: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
    RW: tl.constexpr, PADDED: tl.constexpr, CAPPED: tl.constexpr, QUANTITY: tl.constexpr,
    MAX: tl.constexpr, POOL: tl.constexpr, KERNEL: tl.constexpr, ONE_PASS: tl.constexpr, A_PARTS: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr, PAGE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """Grid (splits, B·H). Every score [B·H, N] is written, pads and unseen keys as 0.

    With APART, grid (splits · row tiles, B·H): [row tiles, B·H, N], for `join_tiles_kernel`.
    """
    TILES: tl.constexpr = ROWS // BM if APART else 1
    score_split(
        tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(1),
        p_q, p_k, p_v, p_out, p_lse, p_rows, p_score, p_part, p_start, p_table, p_lengths, p_norm, p_unit,
        n_keys, keys_per_split, n_splits, scale, cap2,
        sqb, sqh, sqw, skb, skh, skn, svb, svh, svn, sob, soh, sow, s_table,
        H, G, W, D, DV, ROWS, BM, BN, BD, BDV, RW, PADDED, CAPPED, QUANTITY, MAX, POOL, KERNEL,
        ONE_PASS, A_PARTS, PARTS, PRECISION, PAGE, APART,
    )  # fmt: skip


@triton.jit(do_not_specialize=["words"])
def join_tiles_kernel(
    p_part, p_score, words, TILES: tl.constexpr, G: tl.constexpr, MAX: tl.constexpr, BN: tl.constexpr
):
    """Grid (blocks of words): what the row tiles found for each of `words` scores, joined."""
    i = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = i < words
    total = tl.load(p_part + i, mask=inside, other=0.0)
    for tile in range(1, TILES):
        part = tl.load(p_part + words.to(tl.int64) * tile + i, mask=inside, other=0.0)
        total = tl.maximum(total, part) if MAX else total + part
    if not MAX:
        total = total / G
    tl.store(p_score + i, normal_or_zero(total), mask=inside)


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
