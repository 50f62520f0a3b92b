"""Compaction in place: kept tokens move within their request's own blocks, destinations overlapping sources."""

from __future__ import annotations

import functools
from collections.abc import Hashable

import triton
import triton.language as tl
from torch import Tensor

from decantkv.kernels.blocks import power_of_two
from decantkv.kernels.launcher import Launch, address, aligned, current_stream, on_device
from decantkv.kernels.primitives import key_offset, page_of

SECTOR = 32  # bytes of a token a program moves: what memory hands over at once
MOST_MOVED = 1024  # tokens a program holds at once


@triton.jit
def move_slice(
    p_x, p_table, p_index, to, n_slots, s_page, s_slot, d0,
    D: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Move the elements d0 to d0 + BE of the tokens in p_index to the slots from `to` on, within one program.

    Token i goes from index[i] to to + i. Both rise with i, so index[i] − (to + i) never falls: first come tokens that
    move to higher slots, then, from some i on, those that move to lower ones. The former go last one first: what a
    tile writes lies at to + i or above for its lowest i, and every token yet to move lies below that. The latter go
    first one first, by the mirrored argument; and neither kind touches what the other reads. Within a tile a barrier
    parts all loads from all stores. Other programs have other elements, heads or requests.
    """
    e = d0 + tl.arange(0, BE)
    n_tiles = tl.cdiv(n_slots, BK)
    for step in range(0, 2 * n_tiles):
        rising = step < n_tiles
        tile = tl.where(rising, n_tiles - 1 - step, step - n_tiles)
        i = tile * BK + tl.arange(0, BK)
        n_from = tl.load(p_index + i, mask=i < n_slots, other=-1)
        n_to = to + i
        moves = (n_from >= 0) & (n_to >= 0) & tl.where(rising, n_from < n_to, n_from > n_to)
        if tl.max(moves.to(tl.int32), 0) > 0:
            m_x = moves[:, None] & (e < D)[None, :]
            # [BK, BE]
            p_from = p_x + key_offset(n_from, page_of(n_from, moves, p_table, PAGE), s_page, s_slot, PAGE)
            b_x = tl.load(p_from[:, None] + e[None, :], mask=m_x)
            p_to = p_x + key_offset(n_to, page_of(n_to, moves, p_table, PAGE), s_page, s_slot, PAGE)
            tl.debug_barrier()
            tl.store(p_to[:, None] + e[None, :], b_x, mask=m_x)


@triton.jit(do_not_specialize=["n_slots", "s_table", "H"])
def compact_paged_kernel(
    p_k, p_v, p_table, p_index, p_first, p_count,
    n_slots, skb, skh, skn, svb, svh, svn, s_table, H,
    D: tl.constexpr, DV: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, PAGE: tl.constexpr,
    PER_ROW: tl.constexpr,
):  # fmt: skip
    """Grid (slices of a key and then of a value, R·H)."""
    SLICES: tl.constexpr = (D + BE - 1) // BE
    i_slice = tl.program_id(0)
    i_rh = tl.program_id(1)
    i_r = (i_rh // H).to(tl.int64)
    i_h = (i_rh % H).to(tl.int64)
    p_table += i_r * s_table
    p_index += i_rh.to(tl.int64) * n_slots
    to = tl.load(p_first + i_r).to(tl.int64) * PAGE
    if PER_ROW:
        filler = n_slots - tl.load(p_count + i_r).to(tl.int32)
        p_index += filler
        n_slots -= filler
    if i_slice < SLICES:
        move_slice(p_k + i_h * skh, p_table, p_index, to, n_slots, skb, skn, i_slice * BE, D, BE, BK, PAGE)
    else:
        d0 = (i_slice - SLICES) * BE
        move_slice(p_v + i_h * svh, p_table, p_index, to, n_slots, svb, svn, d0, DV, BE, BK, PAGE)


def launch_compact(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    index: Tensor,
    first_block: Tensor,
    counts: Tensor | None,
    *,
    most: int = MOST_MOVED,
) -> None:
    """Run the kernel; arguments as in `decantkv.kernels.paged.compact_paged`, already checked."""
    rows, heads, n_slots = index.shape
    if n_slots == 0 or rows == 0:
        return
    dim, v_dim, page = k_cache.shape[3], v_cache.shape[3], k_cache.shape[1]
    strides = tuple(cache.stride(i) for cache in (k_cache, v_cache) for i in (0, 2, 1))
    index = index.contiguous()
    tensors = (k_cache, v_cache, block_table, index, first_block.contiguous(), counts)
    wide = max(1, SECTOR // k_cache.element_size())
    key = (
        k_cache.device, k_cache.dtype, strides, first_block.dtype, None if counts is None else counts.dtype,
        aligned(*tensors),
    )  # fmt: skip
    block = min(most, max(64, power_of_two(n_slots)))
    launch = _compact_launch(key, dim, v_dim, wide, block, page, counts is not None)
    with on_device(k_cache.device):
        launch(
            (-(-dim // wide) + -(-v_dim // wide), rows * heads, 1), current_stream(k_cache.device),
            *(map(address, tensors) if launch.ready else tensors), n_slots, *strides, block_table.stride(0), heads,
        )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _compact_launch(key: Hashable, dim: int, v_dim: int, wide: int, block: int, page: int, per_row: bool) -> Launch:
    constants = {"D": dim, "DV": v_dim, "BE": wide, "BK": block, "PAGE": page, "PER_ROW": per_row}
    return Launch(compact_paged_kernel, constants, warps=max(1, min(8, block // 128)))
