"""What a decoding step does besides attending, in one launch each: write new tokens, turn queries and keys, norms.

Every product is rounded where a model's own code rounds it (no fused multiply-add), so that a recorded step gives the
model's own numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decantkv.kernels.blocks import padded_dim
from decantkv.kernels.launcher import on_device

MOST_TOKENS = 16  # that one program writes, one after the other


def append(keys: Tensor, values: Tensor, stored: tuple[Tensor, Tensor], starts: Tensor, lens: Tensor) -> None:
    """Write new tokens behind each lane's own, in place, and count them.

    Args:
        keys: [B, H, T, D]; values: [B, H, T, Dv]; in the dtype of what is stored.
        stored: keys [S, D] and values [S, Dv], contiguous.
        starts, lens: [B·H] int64; a lane has room for T tokens from slot starts + lens on.
    """
    lanes, (_, heads, new, dim), v_dim = lens.shape[0], keys.shape, values.shape[3]
    keys, values = (x if x.stride(3) == 1 else x.contiguous() for x in (keys, values))
    with on_device(keys.device):
        append_kernel[(lanes,)](
            keys, values, *stored, starts, lens, *keys.stride()[:3], *values.stride()[:3], heads,
            T=new, D=dim, DV=v_dim, BD=padded_dim(dim), BDV=padded_dim(v_dim), num_warps=1,
        )  # fmt: skip


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """RoPE as Llama's models apply it: x·cos + (−x₂, x₁)·sin, where x₁ and x₂ are the halves of x.

    Args:
        q: [B, HQ, T, D]; k: [B, H, T, D]; cos, sin: [B or 1, T, D]; one dtype.

    Returns:
        Both turned, contiguous.
    """
    (batch, num_heads, new, dim), heads = q.shape, k.shape[1]
    q, k, cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, cos, sin))
    out_q, out_k = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    (s_cb, s_ct), (s_sb, s_st) = ((0 if x.shape[0] == 1 else x.stride(0), x.stride(1)) for x in (cos, sin))
    with on_device(q.device):
        rotate_kernel[(batch * new, num_heads + heads)](
            q, k, out_q, out_k, cos, sin, *q.stride()[:3], *k.stride()[:3], s_cb, s_ct, s_sb, s_st,
            new, num_heads, heads,
            HALF=dim // 2, BH=triton.next_power_of_2(dim // 2), num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out_q, out_k


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm as Llama's models apply it: weight · (x · rsqrt(mean x² + eps)), the bracket rounded to x's dtype.

    Args:
        x: [..., D]; weight: [D]; one dtype.

    Returns:
        x's shape, contiguous.
    """
    rows, dim = x.reshape(-1, x.shape[-1]), x.shape[-1]
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    with on_device(x.device):
        norm_kernel[(rows.shape[0],)](
            rows, weight, out, rows.stride(0), eps,
            D=dim, BD=triton.next_power_of_2(dim), num_warps=8 if dim > 2048 else 4 if dim > 512 else 1,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


@triton.jit
def append_kernel(
    p_k, p_v, p_keys, p_values, p_starts, p_lens, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, heads,
    T: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr,
):  # fmt: skip
    """Grid (lanes,): a lane's length is read and moved by its own program alone."""
    i_lane = tl.program_id(0)
    i_batch, i_head = (i_lane // heads).to(tl.int64), (i_lane % heads).to(tl.int64)
    i_d, i_dv = tl.arange(0, BD), tl.arange(0, BDV)
    m_d, m_dv = i_d < D, i_dv < DV
    length = tl.load(p_lens + i_lane)
    slot = tl.load(p_starts + i_lane) + length
    for i in tl.static_range(T):
        b_k = tl.load(p_k + i_batch * s_kb + i_head * s_kh + i * s_kt + i_d, mask=m_d)
        tl.store(p_keys + (slot + i) * D + i_d, b_k, mask=m_d)
        b_v = tl.load(p_v + i_batch * s_vb + i_head * s_vh + i * s_vt + i_dv, mask=m_dv)
        tl.store(p_values + (slot + i) * DV + i_dv, b_v, mask=m_dv)
    tl.debug_barrier()  # the length moves after every thread has read it
    tl.store(p_lens + i_lane, length + T)


@triton.jit
def rotate_kernel(
    p_q, p_k, p_out_q, p_out_k, p_cos, p_sin, s_qb, s_qh, s_qt, s_kb, s_kh, s_kt, s_cb, s_ct, s_sb, s_st,
    new, num_heads, heads, HALF: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    """Grid (batch rows × tokens, query heads and then KV heads)."""
    i_row, i_head = tl.program_id(0), tl.program_id(1)
    i_batch, i_new = (i_row // new).to(tl.int64), (i_row % new).to(tl.int64)
    i_d = tl.arange(0, BH)
    m_d = i_d < HALF
    if i_head < num_heads:
        p_x = p_q + i_batch * s_qb + i_head * s_qh + i_new * s_qt
        p_y = p_out_q + ((i_batch * num_heads + i_head) * new + i_new) * (2 * HALF)
    else:
        p_x = p_k + i_batch * s_kb + (i_head - num_heads) * s_kh + i_new * s_kt
        p_y = p_out_k + ((i_batch * heads + i_head - num_heads) * new + i_new) * (2 * HALF)
    o_cos, o_sin = i_batch * s_cb + i_new * s_ct + i_d, i_batch * s_sb + i_new * s_st + i_d
    b_1, b_2 = tl.load(p_x + i_d, mask=m_d), tl.load(p_x + HALF + i_d, mask=m_d)
    b_y1 = times(b_1, tl.load(p_cos + o_cos, mask=m_d)) - times(b_2, tl.load(p_sin + o_sin, mask=m_d))
    b_y2 = times(b_2, tl.load(p_cos + o_cos + HALF, mask=m_d)) + times(b_1, tl.load(p_sin + o_sin + HALF, mask=m_d))
    tl.store(p_y + i_d, b_y1.to(p_y.dtype.element_ty), mask=m_d)
    tl.store(p_y + HALF + i_d, b_y2.to(p_y.dtype.element_ty), mask=m_d)


@triton.jit
def norm_kernel(p_x, p_weight, p_out, s_x, eps, D: tl.constexpr, BD: tl.constexpr):
    """Grid (rows,)."""
    i_row, i_d = tl.program_id(0).to(tl.int64), tl.arange(0, BD)
    m_d = i_d < D
    b_x = tl.load(p_x + i_row * s_x + i_d, mask=m_d, other=0.0)
    b_wide = b_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_wide * b_wide) / D + eps)
    b_y = times(tl.load(p_weight + i_d, mask=m_d, other=0.0), (b_wide * scale).to(b_x.dtype))
    tl.store(p_out + i_row * D + i_d, b_y.to(p_out.dtype.element_ty), mask=m_d)


@triton.jit
def times(b_x, b_y):
    """The product as torch rounds it, in float32."""
    return (b_x.to(tl.float32) * b_y.to(tl.float32)).to(b_x.dtype).to(tl.float32)
