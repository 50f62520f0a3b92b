"""‖W_O·v_j‖₁ of every key and query head: products and their absolute sum in one launch, W_O's width never stored."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from decantkv.kernels.blocks import padded_dim
from decantkv.kernels.launcher import on_device
from decantkv.kernels.plan import device_of, precision_of, whole_heads_misfit
from decantkv.kernels.primitives import dot


def unsupported(v: Tensor, w_o: Tensor) -> str | None:
    """Return why the kernel cannot take this input, or None if it can."""
    return whole_heads_misfit("values and W_O", v, w_o)


def blocks(itemsize: int, dim: int) -> tuple[int, int, int]:
    """(keys, columns of W_O, stages) of a program."""
    if itemsize == 4:
        return 32, 16, 1
    return (32, 32, 2) if dim > 128 else (128, 64, 3)


def projected_norm(v: Tensor, w_o: Tensor) -> Tensor:
    """Mean over a KV head's group of ‖W_O·v_j‖₁, each query head with its own slice of W_O.

    Args:
        v: [B, H, N, Dv]; w_o: [HQ, Dv, E]; one dtype. Products are exact, sums in float32.

    Returns:
        [B, H, N] float32.

    Raises:
        ValueError: a dtype or head_dim that the kernel does not take.
    """
    if (reason := unsupported(v, w_o)) is not None:
        raise ValueError(f"v, w_o: {reason}")
    (batch, heads, n_keys, dim), (num_heads, _, width) = v.shape, w_o.shape
    group = num_heads // heads
    keys, columns, stages = blocks(v.dtype.itemsize, dim)
    norms = torch.empty(batch, num_heads, n_keys, dtype=torch.float32, device=v.device)
    with on_device(v.device):
        project_kernel[(triton.cdiv(n_keys, keys), batch * num_heads)](
            v, w_o, norms, n_keys, *v.stride(), *w_o.stride(), num_heads,
            G=group, DV=dim, E=width, BDV=padded_dim(dim), BN=keys, BE=columns,
            PRECISION=precision_of(v.dtype, device_of(v.device)), num_warps=4, num_stages=stages,
        )  # fmt: skip
    return norms.view(batch, heads, group, n_keys).mean(2)


@triton.jit
def project_kernel(
    p_v, p_w, p_norm, n_keys, s_vb, s_vh, s_vn, s_vd, s_wh, s_wd, s_we, num_heads,
    G: tl.constexpr, DV: tl.constexpr, E: tl.constexpr, BDV: tl.constexpr, BN: tl.constexpr, BE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of keys, B·HQ): [B, HQ, N] float32, BE columns of W_O at a time."""
    i_bq = tl.program_id(1)
    i_b, i_q = (i_bq // num_heads).to(tl.int64), i_bq % num_heads
    i_n, i_d = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BDV)
    m_n, m_d = i_n < n_keys, i_d < DV
    p_v += i_b * s_vb + (i_q // G).to(tl.int64) * s_vh
    o_v = i_n.to(tl.int64)[:, None] * s_vn + i_d[None, :] * s_vd
    b_v = tl.load(p_v + o_v, mask=m_n[:, None] & m_d[None, :], other=0.0)  # [BN, BDV]
    p_w += i_q.to(tl.int64) * s_wh
    norm = tl.zeros([BN], tl.float32)
    for e in range(0, E, BE):
        i_e = e + tl.arange(0, BE)
        o_w = i_d[:, None].to(tl.int64) * s_wd + i_e[None, :].to(tl.int64) * s_we
        b_w = tl.load(p_w + o_w, mask=m_d[:, None] & (i_e < E)[None, :], other=0.0)  # [BDV, BE]
        norm += tl.sum(tl.abs(dot(b_v, b_w, PRECISION)), 1)
    tl.store(p_norm + i_bq.to(tl.int64) * n_keys + i_n, norm, mask=m_n)
