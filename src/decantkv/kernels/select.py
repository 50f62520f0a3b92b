"""Selection and compaction: pool, an exact radix select of several programs per row, one gather for K and V.

Scores are mapped to unsigned integers of the same order, so that a threshold is found digit by digit from histograms
and ties fall to the lowest index. Always-kept keys map to the largest integer, pads to 0, below any score. NaN and
infinities become what `ranking.bounded` makes of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from decantkv.base.selection_numbers import BOUND, FILLER

NO_POOL, MAX_POOL, AVG_POOL = 0, 1, 2
_MAX_POOL = tl.constexpr(MAX_POOL)
_AVG_POOL = tl.constexpr(AVG_POOL)
_FILLER = tl.constexpr(FILLER)
_LIMIT = tl.constexpr(3.4028234663852886e38 / BOUND)
DIGIT_BINS = 256  # a histogram's cost grows with its bins: four digits of 8 bits beat three of 11
_BINS = tl.constexpr(DIGIT_BINS)


@triton.jit
def bounded(x, PARTS: tl.constexpr):
    """Scores as finite numbers, NaN as the lowest; PARTS of them add up without an overflow."""
    LIMIT: tl.constexpr = _LIMIT / PARTS
    return tl.where(x == x, tl.minimum(tl.maximum(x, -LIMIT), LIMIT), -LIMIT)


@triton.jit
def pooled_order(n, i_row, i_b, p_score, p_forced, start, n_keys, pool_stop, head, tail,
                 POOL: tl.constexpr, KERNEL: tl.constexpr, FORCED: tl.constexpr):  # fmt: skip
    """The pooled scores of keys n [BN] as uint32 of the same order."""
    p_score += i_row.to(tl.int64) * n_keys
    PARTS: tl.constexpr = KERNEL if POOL == _AVG_POOL else 1
    x = bounded(tl.load(p_score + n, mask=(n >= start) & (n < n_keys), other=0.0), PARTS)
    if POOL != 0:
        pooled = tl.full(x.shape, float("-inf") if POOL == _MAX_POOL else 0.0, tl.float32)
        for o in tl.static_range(KERNEL):
            i = n + (o - KERNEL // 2)
            inside = (i >= start) & (i < pool_stop)
            if POOL == _MAX_POOL:
                pooled = tl.maximum(pooled, tl.load(p_score + i, mask=inside, other=float("-inf")))
            else:
                pooled += bounded(tl.load(p_score + i, mask=inside, other=0.0), PARTS)
        if POOL == _AVG_POOL:
            pooled = tl.div_rn(pooled, tl.full(x.shape, KERNEL, tl.float32))
        else:
            pooled = bounded(pooled, PARTS)  # the maximum is never NaN beside a number
        x = tl.where(n < pool_stop, pooled, x)
    # adding 0 makes −0 and +0 tie
    bits = (x + 0.0).to(tl.uint32, bitcast=True)
    order = tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    keep = (n < start + head) | (n >= n_keys - tail)
    if FORCED:
        keep = keep | (tl.load(p_forced + i_b.to(tl.int64) * n_keys + n, mask=n < n_keys, other=0) != 0)
    order = tl.where(keep, 0xFFFFFFFF, order)
    return tl.where((n >= start) & (n < n_keys), order, 0).to(tl.uint32)


@triton.jit
def find_digit(histogram, bins, need):
    """(digit of the need-th largest element, how many of that digit's elements are needed)."""
    at_least = tl.cumsum(histogram, 0, reverse=True)
    digit = tl.max(tl.where(at_least >= need, bins, 0), 0)
    above = tl.sum(tl.where(bins > digit, histogram, 0), 0)
    return digit, need - above


@triton.jit
def row_need(i_row, p_need, need, start, n_keys, PER_ROW: tl.constexpr):
    """Return how many keys a row keeps, never more than it has."""
    if PER_ROW:
        need = tl.load(p_need + i_row).to(tl.int32)
    return tl.minimum(need, n_keys - start)


@triton.jit(do_not_specialize=["n_keys", "need", "n_slots", "pool_stop", "head", "tail", "H"])
def select_row_kernel(
    p_score, p_forced, p_start, p_need, p_index,
    n_keys, need, n_slots, pool_stop, head, tail, H,
    POOL: tl.constexpr, KERNEL: tl.constexpr, FORCED: tl.constexpr, PADDED: tl.constexpr, PER_ROW: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    """Short rows, grid (B·H): a row stays in one program's registers."""
    i_row = tl.program_id(0)
    i_b = i_row // H
    start = 0
    if PADDED:
        start = tl.load(p_start + i_b).to(tl.int32)
    need = row_need(i_row, p_need, need, start, n_keys, PER_ROW)
    n = tl.arange(0, BN)
    order = pooled_order(n, i_row, i_b, p_score, p_forced, start, n_keys, pool_stop, head, tail, POOL, KERNEL, FORCED)
    bins = tl.arange(0, 256)
    missing = need
    threshold = tl.zeros([1], tl.uint32)
    alive = n < n_keys
    for i_digit in tl.static_range(4):
        digits = ((order >> (24 - 8 * i_digit)) & 255).to(tl.int32)
        digit, missing = find_digit(tl.histogram(digits, 256, mask=alive), bins, missing)
        threshold = (threshold << 8) | digit.to(tl.uint32)
        alive = alive & (digits == digit)
    equal = alive.to(tl.int32)
    taken = (order > threshold) | (alive & (tl.cumsum(equal, 0) <= missing))
    taken = taken & (n < n_keys)
    slot = tl.cumsum(taken.to(tl.int32), 0) - 1 + n_slots - need
    p_index += i_row.to(tl.int64) * n_slots
    tl.store(p_index + slot, n.to(tl.int64), mask=taken)
    tl.store(p_index + n, tl.full([BN], _FILLER, tl.int64), mask=n < n_slots - need)


@triton.jit(do_not_specialize=["n_keys", "pool_stop", "head", "tail", "H"])
def order_kernel(
    p_score, p_forced, p_start, p_order, p_bins,
    n_keys, pool_stop, head, tail, H,
    POOL: tl.constexpr, KERNEL: tl.constexpr, FORCED: tl.constexpr, PADDED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Long rows, grid (chunks, B·H): pool, write the ordered integers, count the first digit."""
    i_row = tl.program_id(1)
    i_b = i_row // H
    start = 0
    if PADDED:
        start = tl.load(p_start + i_b).to(tl.int32)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    order = pooled_order(n, i_row, i_b, p_score, p_forced, start, n_keys, pool_stop, head, tail, POOL, KERNEL, FORCED)
    real = (n >= start) & (n < n_keys)
    tl.store(p_order + i_row.to(tl.int64) * n_keys + n, order.to(tl.int32, bitcast=True), mask=n < n_keys)
    count_digits((order >> 24).to(tl.int32), real, p_bins + i_row.to(tl.int64) * (4 * _BINS))


@triton.jit
def count_digits(digits, mask, p_bins):
    """Add a block's digits to a row's histogram; integer additions come out the same in any order."""
    bins = tl.arange(0, _BINS)
    counted = tl.histogram(digits, _BINS, mask=mask)
    tl.atomic_add(p_bins + bins, counted, mask=counted > 0, sem="relaxed")


@triton.jit
def threshold_so_far(i_row, p_bins, need, DIGITS: tl.constexpr):
    """(the first digits of the threshold as one integer, how many elements that share them are needed)."""
    bins = tl.arange(0, _BINS)
    prefix = tl.zeros([1], tl.uint32)
    for i_digit in tl.static_range(DIGITS):
        histogram = tl.load(p_bins + i_row.to(tl.int64) * (4 * _BINS) + i_digit * _BINS + bins)
        digit, need = find_digit(histogram, bins, need)
        prefix = (prefix << 8) | digit.to(tl.uint32)
    return prefix, need


@triton.jit(do_not_specialize=["n_keys", "need", "H"])
def digit_kernel(p_order, p_bins, p_start, p_need, n_keys, need, H,
                 PADDED: tl.constexpr, PER_ROW: tl.constexpr, DIGIT: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Grid (chunks, B·H): count digit 1, 2 or 3 of the keys that share the earlier ones."""
    i_row = tl.program_id(1)
    start = 0
    if PADDED:
        start = tl.load(p_start + i_row // H).to(tl.int32)
    need = row_need(i_row, p_need, need, start, n_keys, PER_ROW)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    order = tl.load(p_order + i_row.to(tl.int64) * n_keys + n, mask=n < n_keys, other=0).to(tl.uint32, bitcast=True)
    prefix, _ = threshold_so_far(i_row, p_bins, need, DIGIT)
    real = (n >= start) & (n < n_keys)
    p_bins += i_row.to(tl.int64) * (4 * _BINS) + DIGIT * _BINS
    alive = real & ((order >> (32 - 8 * DIGIT)) == prefix)
    digits = (order >> (24 - 8 * DIGIT)) & 255
    if tl.max(alive.to(tl.int32), 0) > 0:
        count_digits(digits.to(tl.int32), alive, p_bins)


@triton.jit(do_not_specialize=["n_keys", "need", "n_chunks", "H"])
def count_kernel(p_order, p_bins, p_start, p_need, p_count, n_keys, need, n_chunks, H,
                 PADDED: tl.constexpr, PER_ROW: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Grid (chunks, B·H): how many keys of a chunk lie above the threshold and on it; and the threshold itself."""
    i_chunk = tl.program_id(0)
    i_row = tl.program_id(1)
    start = 0
    if PADDED:
        start = tl.load(p_start + i_row // H).to(tl.int32)
    need = row_need(i_row, p_need, need, start, n_keys, PER_ROW)
    n = i_chunk * BN + tl.arange(0, BN)
    order = tl.load(p_order + i_row.to(tl.int64) * n_keys + n, mask=n < n_keys, other=0).to(tl.uint32, bitcast=True)
    threshold, missing = threshold_so_far(i_row, p_bins, need, 4)
    p_count += i_row.to(tl.int64) * (2 * n_chunks + 2)
    tl.store(p_count + i_chunk, tl.sum((order > threshold).to(tl.int32), 0))
    tl.store(p_count + n_chunks + i_chunk, tl.sum((order == threshold).to(tl.int32), 0))
    if i_chunk == 0:
        one = tl.arange(0, 1)
        tl.store(p_count + 2 * n_chunks + one, threshold.to(tl.int32, bitcast=True))
        tl.store(p_count + 2 * n_chunks + 1, missing)


@triton.jit(do_not_specialize=["n_keys", "need", "n_chunks", "n_slots", "H"])
def compact_kernel(p_order, p_start, p_need, p_count, p_index, n_keys, need, n_chunks, n_slots, H,
                   PADDED: tl.constexpr, PER_ROW: tl.constexpr, BC: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """Grid (chunks, B·H): write the taken indices in order, filler on the left."""
    i_chunk = tl.program_id(0)
    i_row = tl.program_id(1)
    start = 0
    if PADDED:
        start = tl.load(p_start + i_row // H).to(tl.int32)
    need = row_need(i_row, p_need, need, start, n_keys, PER_ROW)
    p_count += i_row.to(tl.int64) * (2 * n_chunks + 2)
    c = tl.arange(0, BC)
    before = c < i_chunk
    above = tl.sum(tl.load(p_count + c, mask=before, other=0), 0)
    equal_before = tl.sum(tl.load(p_count + n_chunks + c, mask=before, other=0), 0)
    threshold = tl.load(p_count + 2 * n_chunks + tl.arange(0, 1)).to(tl.uint32, bitcast=True)
    missing = tl.load(p_count + 2 * n_chunks + 1)
    n = i_chunk * BN + tl.arange(0, BN)
    order = tl.load(p_order + i_row.to(tl.int64) * n_keys + n, mask=n < n_keys, other=0).to(tl.uint32, bitcast=True)
    equal = (order == threshold) & (n < n_keys)
    taken = (order > threshold) | (equal & (equal_before + tl.cumsum(equal.to(tl.int32), 0) <= missing))
    slot = tl.cumsum(taken.to(tl.int32), 0) - 1 + above + tl.minimum(equal_before, missing) + n_slots - need
    p_index += i_row.to(tl.int64) * n_slots
    tl.store(p_index + slot, n.to(tl.int64), mask=taken & (n < n_keys))
    if i_chunk == 0:
        for s0 in range(0, n_slots - need, BN):
            s = s0 + tl.arange(0, BN)
            tl.store(p_index + s, tl.full([BN], _FILLER, tl.int64), mask=s < n_slots - need)


@triton.jit(do_not_specialize=["n_slots", "H"])
def gather_kernel(
    p_k, p_v, p_index, p_k_kept, p_v_kept, n_slots, H,
    skb, skh, skn, svb, svh, svn, kkb, kkh, kkn, vkb, vkh, vkn,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (slot blocks, B·H): copy the kept rows of K and V, filler as zeros."""
    i_bh = tl.program_id(1)
    i_b = (i_bh // H).to(tl.int64)
    i_h = (i_bh % H).to(tl.int64)
    s = tl.program_id(0) * BK + tl.arange(0, BK)
    m_s = s < n_slots
    n = tl.load(p_index + i_bh.to(tl.int64) * n_slots + s, mask=m_s, other=-1)
    m_n = n >= 0
    d = tl.arange(0, BD)
    dv = tl.arange(0, BDV)
    # [BK, BD], [BK, BDV]
    p_from = p_k + i_b * skb + i_h * skh + n * skn
    b_k = tl.load(p_from[:, None] + d[None, :], mask=m_n[:, None] & (d < D)[None, :], other=0.0)
    p_from = p_v + i_b * svb + i_h * svh + n * svn
    b_v = tl.load(p_from[:, None] + dv[None, :], mask=m_n[:, None] & (dv < DV)[None, :], other=0.0)
    p_to = p_k_kept + i_b * kkb + i_h * kkh + s.to(tl.int64) * kkn
    tl.store(p_to[:, None] + d[None, :], b_k, mask=m_s[:, None] & (d < D)[None, :])
    p_to = p_v_kept + i_b * vkb + i_h * vkh + s.to(tl.int64) * vkn
    tl.store(p_to[:, None] + dv[None, :], b_v, mask=m_s[:, None] & (dv < DV)[None, :])
