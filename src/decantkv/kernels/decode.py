"""Attention of a few new tokens over ragged storage: split along keys, one launch, lengths instead of masks.

A program takes one chunk of one lane, so long lanes simply get more programs. The last program of a lane to finish
joins the lane's parts in their fixed order, so that results repeat bit for bit whoever is last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from decantkv.kernels.blocks import Blocks, Device, padded_dim, power_of_two
from decantkv.kernels.launcher import on_device
from decantkv.kernels.plan import MAX_DIM, device_of, precision_of
from decantkv.kernels.primitives import dot, finite, logit_factors, to_logits2

JOIN = 8  # parts that are read at once when a lane's are joined
MAX_ROWS = 64  # query rows a program holds; more are taken by further programs


class Splits(NamedTuple):
    """Which chunk of which lane each program takes.

    Attributes:
        lane, place, start: [W] int32, int32, int64: each program's lane, which of the lane's chunks it takes, and the
            slot where that chunk starts.
        chunk: keys a program takes; most: the most programs a lane has.
        counter: [B·H·row tiles] int32 zeros; the kernel leaves zeros behind.
    """

    lane: Tensor
    place: Tensor
    start: Tensor
    chunk: int
    most: int
    counter: Tensor


def unsupported(q: Tensor, keys: Tensor, values: Tensor) -> str | None:
    """Return why the kernel cannot take this input, or None if it can."""
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not q.dtype == keys.dtype == values.dtype:
        return f"one of bf16, fp16 and fp32 throughout is needed, got {q.dtype}, {keys.dtype}, {values.dtype}"
    if max(keys.shape[1], values.shape[1]) > MAX_DIM:
        return f"head_dim above {MAX_DIM}"
    return None


def plan(starts: Tensor, capacities: Tensor, *, chunk: int | None = None) -> Splits:
    """Cut lanes into chunks; reads the capacities on the host, so once per layout and not per token.

    Args:
        starts, capacities: [B·H] int64, each lane's first slot, and the most keys it can hold.
        chunk: keys a program takes; None chooses by the total and the device.
    """
    device, lanes = capacities.device, capacities.shape[0]
    if chunk is None:
        chunk = keys_per_program(int(capacities.sum()), device_of(device))
    number = (capacities + chunk - 1).div(chunk, rounding_mode="floor").clamp_min(1)
    lane = torch.arange(lanes, device=device).repeat_interleave(number)
    place = torch.arange(lane.shape[0], device=device) - (number.cumsum(0) - number)[lane]
    counter = torch.zeros(lanes, dtype=torch.int32, device=device)
    return Splits(lane.int(), place.int(), starts[lane] + place * chunk, chunk, int(number.max()), counter)


def keys_per_program(total: int, device: Device) -> int:
    """Return how finely lanes are cut, by the keys there are for each multiprocessor.

    Few keys: as many programs as it takes to occupy the device once. More: long programs, of which two share a
    multiprocessor for one wave. Many: shorter ones again, so that the last wave is levelled out.
    """
    each = total // device.processors
    if each <= 1024:
        return min(512, max(128, power_of_two(each)))
    return 2048 if each <= 8192 else 1024


def decode_blocks(rows: int, dim: int, v_dim: int, itemsize: int, chunk: int, device: Device) -> Blocks:
    """Block sizes: deep enough to hide memory's latency, within what shared memory holds.

    A short chunk runs alone on its multiprocessor and takes twice the keys per step.
    """
    key_bytes = (padded_dim(dim) + padded_dim(v_dim)) * itemsize
    keys, stages = (32, 2) if itemsize == 4 or max(dim, v_dim) > 128 else (64, 3)
    if chunk <= 512 and keys == 64 and rows <= 16:
        keys = 128
    if device.backend == "hip":
        stages = min(stages, 2)
    while rows * padded_dim(dim) * itemsize + stages * keys * key_bytes > device.shared_bytes and keys > 16:
        stages, keys = (stages - 1, keys) if stages > 2 else (stages, keys // 2)
    warps = 8 if rows >= 64 and device.backend == "cuda" else 4  # four hold too few registers for so many rows
    return Blocks(rows, keys, warps, stages)


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    lens: Tensor,
    splits: Splits,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention over ragged storage; see `decantkv.cache.stores.ragged.RaggedStore.attend`.

    Args:
        q: [B, HQ, T, D]; keys: [S, D]; values: [S, Dv]; lens: [B·H] int64; all but q contiguous.

    Returns:
        [B, HQ, T, Dv] in q's dtype.
    """
    lanes, (batch, num_heads, new, dim), v_dim = lens.shape[0], q.shape, values.shape[1]
    group = batch * num_heads // lanes
    rows = group * new
    block = min(MAX_ROWS, max(16, power_of_two(rows)))
    tiles = triton.cdiv(rows, block)
    counter = splits.counter
    if tiles > 1:
        counter = torch.zeros(lanes * tiles, dtype=torch.int32, device=q.device)
    programs = splits.lane.shape[0]
    q = q if q.stride(3) == 1 else q.contiguous()
    out = torch.empty(batch, num_heads, new, v_dim, dtype=q.dtype, device=q.device)
    part = torch.empty(programs, tiles * block, v_dim, dtype=torch.float32, device=q.device)
    state = torch.empty(programs, 2, tiles * block, dtype=torch.float32, device=q.device)
    factor, cap2 = logit_factors(scale, softcap)
    device = device_of(q.device)
    cut = decode_blocks(block, dim, v_dim, keys.element_size(), splits.chunk, device)
    with on_device(q.device):
        decode_kernel[(programs, tiles)](
            q, keys, values, out, part, state, sink_logits, lens, splits.lane, splits.place, splits.start, counter,
            factor, cap2, splits.chunk, *q.stride()[:3], lanes // batch,
            G=group, T=new, JOIN=JOIN, TILES=tiles, D=dim, DV=v_dim, BD=padded_dim(dim), BDV=padded_dim(v_dim),
            BM=block, BN=cut.keys, CAPPED=softcap is not None, SINK=sink_logits is not None,
            PRECISION=precision_of(q.dtype, device), num_warps=cut.warps, num_stages=cut.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


@triton.jit
def decode_kernel(
    p_q, p_k, p_v, p_out, p_part, p_state, p_sink, p_lens, p_lane, p_place, p_start, p_counter,
    factor, cap2, chunk, s_qb, s_qh, s_qt, heads,
    G: tl.constexpr, T: tl.constexpr, JOIN: tl.constexpr, TILES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BD: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAPPED: tl.constexpr, SINK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (chunks of lanes, row tiles). Rows of a lane are member·T + t; row t sees T − 1 − t keys fewer."""
    i_work, i_tile = tl.program_id(0), tl.program_id(1)
    i_lane = tl.load(p_lane + i_work)
    i_chunk = tl.load(p_place + i_work)
    start = tl.load(p_start + i_work)
    n_keys = tl.load(p_lens + i_lane).to(tl.int32)
    low = i_chunk * chunk
    if (low < n_keys) | (i_chunk == 0):
        start -= low
        high = tl.minimum(low + chunk, n_keys)
        i_row = i_tile * BM + tl.arange(0, BM)
        i_member, i_new = i_row // T, i_row % T
        m_row = i_row < G * T
        i_d, i_dv = tl.arange(0, BD), tl.arange(0, BDV)
        m_d, m_dv = i_d < D, i_dv < DV
        i_batch, i_head = i_lane // heads, i_lane % heads
        o_q = i_batch.to(tl.int64) * s_qb + (i_head * G + i_member).to(tl.int64) * s_qh + i_new.to(tl.int64) * s_qt
        b_q = tl.load(p_q + o_q[:, None] + i_d[None, :], mask=m_row[:, None] & m_d[None, :], other=0.0)  # [BM, BD]
        seen = n_keys - (T - 1) + i_new  # [BM] keys each row sees
        b_m = tl.full([BM], float("-inf"), tl.float32)
        b_l = tl.zeros([BM], tl.float32)
        b_acc = tl.zeros([BM, BDV], tl.float32)
        for o_n in range(low, high, BN):
            i_n = o_n + tl.arange(0, BN)
            m_n = i_n < high
            o_slot = (start + i_n)[:, None]
            b_k = tl.load(p_k + o_slot * D + i_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0.0)  # [BN, BD]
            b_s = to_logits2(dot(b_q, tl.trans(b_k), PRECISION), factor, cap2, CAPPED)  # [BM, BN]
            b_s = tl.where(m_n[None, :] & (i_n[None, :] < seen[:, None]), b_s, float("-inf"))
            b_new = tl.maximum(b_m, tl.max(b_s, 1))
            b_e = tl.exp2(b_s - finite(b_new)[:, None])
            b_decay = tl.exp2(b_m - finite(b_new))
            b_v = tl.load(p_v + o_slot * DV + i_dv[None, :], mask=m_n[:, None] & m_dv[None, :], other=0.0)  # [BN, BDV]
            b_acc = b_acc * b_decay[:, None] + dot(b_e.to(b_v.dtype), b_v, PRECISION)
            b_l = b_l * b_decay + tl.sum(b_e, 1)
            b_m = b_new
        o_row = i_work.to(tl.int64) * (TILES * BM) + i_row
        o_state = i_work.to(tl.int64) * (2 * TILES * BM) + i_row
        tl.store(p_part + o_row[:, None] * DV + i_dv[None, :], b_acc, mask=m_row[:, None] & m_dv[None, :])
        tl.store(p_state + o_state, b_m, mask=m_row)
        tl.store(p_state + o_state + TILES * BM, b_l, mask=m_row)
        number = tl.maximum(tl.cdiv(n_keys, chunk), 1)
        tl.debug_barrier()  # every thread's part is written before the count says so
        done = tl.atomic_add(p_counter + i_lane * TILES + i_tile, 1, sem="acq_rel", scope="gpu")
        if done == number - 1:
            tl.store(p_counter + i_lane * TILES + i_tile, 0)
            b_m = tl.full([BM], float("-inf"), tl.float32)
            b_l = tl.zeros([BM], tl.float32)
            if SINK:
                b_m = tl.load(p_sink + i_head * G + i_member, mask=m_row, other=0.0).to(tl.float32) * 1.4426950408889634
                b_l += 1.0
            b_acc = tl.zeros([BM, BDV], tl.float32)
            for o_part in range(0, number, JOIN):
                for i in tl.static_range(JOIN):  # loads that do not wait for each other
                    i_from = (i_work - i_chunk + o_part + i).to(tl.int64)
                    m_part = m_row & (tl.zeros([BM], tl.int32) + o_part + i < number)
                    o_row = i_from * (TILES * BM) + i_row
                    o_state = i_from * (2 * TILES * BM) + i_row
                    b_m2 = tl.load(p_state + o_state, mask=m_part, other=float("-inf"), cache_modifier=".cg")
                    b_l2 = tl.load(p_state + o_state + TILES * BM, mask=m_part, other=0.0, cache_modifier=".cg")
                    b_acc2 = tl.load(
                        p_part + o_row[:, None] * DV + i_dv[None, :], mask=m_part[:, None] & m_dv[None, :], other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    b_new = tl.maximum(b_m, b_m2)
                    b_old, b_add = tl.exp2(b_m - finite(b_new)), tl.exp2(b_m2 - finite(b_new))
                    b_acc = b_acc * b_old[:, None] + b_acc2 * b_add[:, None]
                    b_l = b_l * b_old + b_l2 * b_add
                    b_m = b_new
            b_out = b_acc / tl.where(b_l > 0, b_l, 1.0)[:, None]
            o_out = ((i_batch * heads + i_head).to(tl.int64) * G + i_member) * T + i_new
            tl.store(
                p_out + o_out[:, None] * DV + i_dv[None, :], b_out.to(p_out.dtype.element_ty),
                mask=m_row[:, None] & m_dv[None, :],
            )  # fmt: skip
