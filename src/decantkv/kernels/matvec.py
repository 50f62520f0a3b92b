"""A linear layer of one token, which costs the time its weights take to be read: no barrier between two reads.

A warp reads 512 bytes of a row at once, 16 a lane, and keeps a sum per lane and element; only at the end are sums added
across lanes, and across the warps that share a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decantkv.kernels.launcher import on_device

AT_ONCE = tl.constexpr(4)  # tiles whose reads are issued before the first is used


class Tile(NamedTuple):
    """Rows and elements of each that a program reads at once, and its warps."""

    rows: int
    elements: int
    warps: int


def tile_of(inner: int, itemsize: int) -> Tile:
    """Return how a weight is cut, by the length of its rows: the fastest on an H200 of eleven cuts and six shapes.

    Eight warps share a row and read all of it at once; of a longer one a single warp reads four tiles at once.
    """
    of_a_warp = 512 // itemsize
    return Tile(1, 8 * of_a_warp, 8) if inner <= 32 * of_a_warp else Tile(1, of_a_warp, 1)


def gated_tile(inner: int, itemsize: int) -> Tile:
    """Return how two weights are cut; a row that eight warps do not divide evenly is left to one."""
    tile = tile_of(inner, itemsize)
    return tile if inner % tile.elements == 0 else Tile(1, 512 // itemsize, 1)


def matvec(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: Tile | None = None) -> Tensor:
    """weight · x + bias, summed in float32 and rounded once.

    Args:
        x: [..., K], one token: all other dimensions are 1. weight: [N, K]; bias: [N]. Contiguous, one dtype (bf16,
            fp16 or fp32), one device.
        tile: how the weight is cut; None: by its shape.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ValueError: a shape, dtype or layout that does not fit.
    """
    rows, inner = weight.shape
    _check(x, weight)
    _check_bias(x, weight, bias)
    (out,) = _launch(matvec_kernel, x, (weight, bias), [rows], tile or tile_of(inner, x.dtype.itemsize))
    return out


def three(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """`matvec` with three weights in one launch: where one has few rows, the others' keep the memory busy.

    Args:
        x: [..., K], one token. weights: three [N_i, K]; biases: three [N_i], or None for all.

    Returns:
        Three [..., N_i].

    Raises:
        ValueError: a shape, dtype or layout that does not fit.
    """
    if len(weights) != 3 or len(biases) != 3 or len({bias is None for bias in biases}) != 1:
        raise ValueError(f"weights, biases: expected three, and all biases or none, got {len(weights)} and {biases}")
    for weight, bias in zip(weights, biases, strict=True):
        _check(x, weight)
        _check_bias(x, weight, bias)
    inner, sizes = weights[0].shape[1], [weight.shape[0] for weight in weights]
    one, two, other = _launch(three_kernel, x, (*weights, *biases), sizes, tile_of(inner, x.dtype.itemsize))
    return one, two, other


def gated(x: Tensor, gate: Tensor, up: Tensor, *, tile: Tile | None = None) -> Tensor:
    """silu(gate · x) · (up · x), rounded where torch rounds: both products, the silu, the result.

    Args:
        x: [..., K], one token. gate, up: [N, K]; as in `matvec`.
        tile: how each weight is cut; None: by its shape.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ValueError: a shape, dtype or layout that does not fit.
    """
    rows, inner = gate.shape
    _check(x, gate)
    _check(x, up)
    if up.shape != gate.shape:
        raise ValueError(f"up: expected gate's shape {list(gate.shape)}, got {list(up.shape)}")
    (out,) = _launch(gated_kernel, x, (gate, up), [rows], tile or gated_tile(inner, x.dtype.itemsize))
    return out


def _launch(kernel: Any, x: Tensor, read: Sequence[Tensor | None], sizes: Sequence[int], tile: Tile) -> list[Tensor]:
    """Outputs [..., size], a program for each block of their rows."""
    outs = [torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device) for size in sizes]
    with on_device(x.device):
        kernel[(sum(triton.cdiv(size, tile.rows) for size in sizes),)](
            x, *read, *outs, *sizes, K=x.shape[-1], BN=tile.rows, BK=tile.elements,
            num_warps=tile.warps, num_stages=1,
        )  # fmt: skip
    return outs


def _check(x: Tensor, weight: Tensor) -> None:
    if x.shape[-1:] != weight.shape[1:] or x.numel() != weight.shape[1]:
        raise ValueError(f"x: expected one token of {weight.shape[1]} elements, got {list(x.shape)}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(f"x: expected {weight.dtype} on {weight.device}, got {x.dtype} on {x.device}")
    if not (x.is_contiguous() and weight.is_contiguous()):
        raise ValueError("x, weight: expected contiguous tensors, got other strides")


def _check_bias(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    rows = weight.shape[0]
    if bias is not None and (bias.shape != (rows,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias: expected contiguous {x.dtype} [{rows}], got {bias.dtype} {list(bias.shape)}")


@triton.jit
def matvec_kernel(
    p_x, p_weight, p_bias, p_out, n, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows,)."""
    block(p_x, p_weight, p_bias, p_out, tl.program_id(0), n, K, BN, BK)


@triton.jit
def three_kernel(
    p_x, p_weight0, p_weight1, p_weight2, p_bias0, p_bias1, p_bias2, p_out0, p_out1, p_out2, n0, n1, n2,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows of one weight after the other,)."""
    i_block = tl.program_id(0)
    blocks0, blocks1 = tl.cdiv(n0, BN), tl.cdiv(n1, BN)
    if i_block < blocks0:
        block(p_x, p_weight0, p_bias0, p_out0, i_block, n0, K, BN, BK)
    elif i_block < blocks0 + blocks1:
        block(p_x, p_weight1, p_bias1, p_out1, i_block - blocks0, n1, K, BN, BK)
    else:
        block(p_x, p_weight2, p_bias2, p_out2, i_block - blocks0 - blocks1, n2, K, BN, BK)


@triton.jit
def block(p_x, p_weight, p_bias, p_out, i_block, n, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """BN rows of weight · x + bias."""
    i_n, i_k = i_block * BN + tl.arange(0, BN), tl.arange(0, BK)
    # x is read by the pointers of a whole tile: a lane then has it where it has the weights, with no exchange
    p_tile = p_x + tl.zeros([BN, 1], tl.int32) + i_k[None, :]
    p_rows = p_weight + row_offsets(i_n, n, K) + i_k[None, :]
    WHOLE: tl.constexpr = K // (AT_ONCE * BK) * (AT_ONCE * BK)
    b_sums = add_rest(tl.zeros([BN, BK], tl.float32), p_rows, p_tile, i_k, WHOLE, K, BK)
    for k in range(0, WHOLE, AT_ONCE * BK):
        b_0, b_1, b_2, b_3 = four(p_rows + k, BK)
        b_sums = add_four(b_sums, b_0, b_1, b_2, b_3, p_tile + k, BK)
    b_out = tl.sum(b_sums, 1)
    if p_bias is not None:
        b_out += tl.load(p_bias + i_n, mask=i_n < n, other=0.0).to(tl.float32)
    tl.store(p_out + i_n, b_out.to(p_out.dtype.element_ty), mask=i_n < n)


@triton.jit
def gated_kernel(
    p_x, p_gate, p_up, p_out, n, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows,)."""
    i_n, i_k = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BK)
    p_tile = p_x + tl.zeros([BN, 1], tl.int32) + i_k[None, :]
    o_rows = row_offsets(i_n, n, K) + i_k[None, :]
    WHOLE: tl.constexpr = K // (AT_ONCE * BK) * (AT_ONCE * BK)
    b_gate = add_rest(tl.zeros([BN, BK], tl.float32), p_gate + o_rows, p_tile, i_k, WHOLE, K, BK)
    b_up = add_rest(tl.zeros([BN, BK], tl.float32), p_up + o_rows, p_tile, i_k, WHOLE, K, BK)
    for k in range(0, WHOLE, AT_ONCE * BK):
        b_0, b_1, b_2, b_3 = four(p_gate + o_rows + k, BK)
        b_4, b_5, b_6, b_7 = four(p_up + o_rows + k, BK)
        b_gate = add_four(b_gate, b_0, b_1, b_2, b_3, p_tile + k, BK)
        b_up = add_four(b_up, b_4, b_5, b_6, b_7, p_tile + k, BK)
    dtype = p_out.dtype.element_ty
    b_v = tl.sum(b_gate, 1).to(dtype).to(tl.float32)
    b_silu = (b_v / (1.0 + tl.exp(-b_v))).to(dtype).to(tl.float32)
    b_out = b_silu * tl.sum(b_up, 1).to(dtype).to(tl.float32)
    tl.store(p_out + i_n, b_out.to(dtype), mask=i_n < n)


@triton.jit
def row_offsets(i_n, n, K: tl.constexpr):
    """[BN, 1]; rows past the last read it again and are not stored. A head of 2³¹ elements needs 64 bits."""
    return tl.minimum(i_n, n - 1).to(tl.int64)[:, None] * K


@triton.jit
def four(p_rows, BK: tl.constexpr):
    """Four tiles, read once and not kept in the cache."""
    return (
        tl.load(p_rows, eviction_policy="evict_first"),
        tl.load(p_rows + BK, eviction_policy="evict_first"),
        tl.load(p_rows + 2 * BK, eviction_policy="evict_first"),
        tl.load(p_rows + 3 * BK, eviction_policy="evict_first"),
    )


@triton.jit
def add_four(b_sums, b_0, b_1, b_2, b_3, p_tile, BK: tl.constexpr):
    """Four tiles times their part of x."""
    b_sums += b_0.to(tl.float32) * tl.load(p_tile).to(tl.float32)
    b_sums += b_1.to(tl.float32) * tl.load(p_tile + BK).to(tl.float32)
    b_sums += b_2.to(tl.float32) * tl.load(p_tile + 2 * BK).to(tl.float32)
    b_sums += b_3.to(tl.float32) * tl.load(p_tile + 3 * BK).to(tl.float32)
    return b_sums


@triton.jit
def add_rest(b_sums, p_rows, p_tile, i_k, WHOLE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """What is left of a row behind its last four tiles; only its very end needs a mask. First: fewer registers live."""
    for k in tl.static_range(WHOLE, K, BK):
        if k + BK <= K:
            b_weight = tl.load(p_rows + k, eviction_policy="evict_first")
            b_x = tl.load(p_tile + k)
        else:
            m_k = (i_k < K - k)[None, :]
            b_weight = tl.load(p_rows + k, mask=m_k, other=0.0, eviction_policy="evict_first")
            b_x = tl.load(p_tile + k, mask=m_k, other=0.0)
        b_sums += b_weight.to(tl.float32) * b_x.to(tl.float32)
    return b_sums
