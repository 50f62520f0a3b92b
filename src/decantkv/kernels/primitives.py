"""What the kernels share: a dot that is right in every dtype and under the interpreter, and the logits.

Names inside kernels: p_ pointer, i_ program or element index, o_ offset, m_ mask, b_ block in registers. Logits and
log-sum-exps are in base 2 there ("2" in the name), natural everywhere else.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

# Triton's interpreter computes bf16 dots wrongly: there both sides are widened first
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_WIDEN = tl.constexpr(INTERPRETED)

LOG2E = 1.4426950408889634
TINY = 1.1754943508222875e-38  # float32's smallest normal number
_TINY = tl.constexpr(TINY)


def logit_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """(scale, cap2) as `to_logits2` takes them."""
    return (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a [M, K] · b [K, N] accumulated in float32; PRECISION concerns float32 operands only."""
    if _WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def inverse(x, PRECISION: tl.constexpr):
    """1/x to float32's last digit; no care for subnormal numbers, which costs four instructions elsewhere."""
    if PRECISION == "ieee":  # not an NVIDIA GPU
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def finished(acc, PRECISION: tl.constexpr):
    """The sums of a dot that has ended.

    Triton leaves a loop's last dot running until its next turn. Where a branch of that turn changes the sums, ptxas
    then makes every dot of the loop wait for the one before.
    """
    if PRECISION == "ieee":  # not an NVIDIA GPU
        return acc
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def to_logits2(products, scale, cap2, CAPPED: tl.constexpr):
    """Base-2 logits from q·k: scale carries log2 e, or 1/softcap when CAPPED; cap2 = softcap · log2 e."""
    x = products * scale
    if CAPPED:
        e = tl.exp2(-2.8853900817779268 * tl.abs(x))  # tanh|x| = (1 − e^−2|x|)/(1 + e^−2|x|), e in (0, 1]
        tanh = (1.0 - e) / (1.0 + e)
        x = cap2 * tl.where(x < 0, -tanh, tanh)
    return x


@triton.jit
def keys_of(p_lengths, i_b, n_keys, PAGE: tl.constexpr):
    """Return how many keys a batch row has: all, or with pages as many as the row says."""
    if PAGE == 0:
        return n_keys
    else:
        return tl.load(p_lengths + i_b).to(tl.int32)


@triton.jit
def page_of(n, inside, p_table, PAGE: tl.constexpr):
    """The page each key lies in, from its row's table; of no meaning without pages (PAGE 0, else keys per page)."""
    if PAGE == 0:
        return n
    else:
        return tl.load(p_table + n // PAGE, mask=inside, other=0).to(tl.int64)


@triton.jit
def key_offset(n, page, s_page, s_key, PAGE: tl.constexpr):
    """Return where the keys n start, in elements from key 0 of their head: strides apart, or in their pages."""
    if PAGE == 0:
        return n.to(tl.int64) * s_key
    else:
        return page * s_page + (n % PAGE).to(tl.int64) * s_key


@triton.jit
def finite(x):
    """−inf becomes 0, so that differences of maxima over nothing are no NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def normal_or_zero(x):
    """Scores smaller than float32's smallest normal number are 0 in every implementation."""
    return tl.where(tl.abs(x) < _TINY, 0.0, x)


@triton.jit
def per_row(x, ROWS_FIRST: tl.constexpr):
    """One number per row, shaped to go with [BM, …] or, without ROWS_FIRST, […, BM]."""
    return x[:, None] if ROWS_FIRST else x[None, :]


@triton.jit
def per_column(x, ROWS_FIRST: tl.constexpr):
    """One number per key, or per dimension of a value, shaped to go with [BM, …] or, without ROWS_FIRST, […, BM]."""
    return x[None, :] if ROWS_FIRST else x[:, None]


@triton.jit
def value_sums(acc, b_v, e, ROWS_FIRST: tl.constexpr, PRECISION: tl.constexpr):
    """The accumulator plus Σ over keys of weights e [BN, BM] times v [BN, BDV]; e is [BM, BN] with ROWS_FIRST."""
    if ROWS_FIRST:
        return acc + dot(e, b_v, PRECISION)
    else:
        return acc + dot(tl.trans(b_v), e, PRECISION)


@triton.jit
def weighted_sum(acc, b_v, e, ROWS_FIRST: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """The accumulator plus Σ over a tile's keys of their float32 weights e times v, as `value_sums`."""
    if PARTS == 2:
        # bf16 weights as two parts: 16 bits of weight at the price of one more dot. The first is cut, not rounded: a
        # conversion back to float32 takes as long as an exponential.
        e_hi = (e.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        acc = value_sums(acc, b_v, e_hi.to(b_v.dtype), ROWS_FIRST, PRECISION)
        return value_sums(acc, b_v, (e - e_hi).to(b_v.dtype), ROWS_FIRST, PRECISION)
    else:
        # float16 weights would lose a flat row's tail to underflow; tf32 holds float16 values exactly
        return value_sums(acc, b_v.to(tl.float32), e, ROWS_FIRST, PRECISION)
