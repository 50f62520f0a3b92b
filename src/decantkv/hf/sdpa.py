"""Run the attention op that torch would pick, and also return its softmax denominators, at no extra cost."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from decantkv.base.precision import alike

MAX_DIM = 256


def attend_with_lse(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> tuple[Tensor, Tensor] | str:
    """Return causal attention of a whole prompt by the same op that `scaled_dot_product_attention` would pick.

    Args:
        query: [B, HQ, N, D]; key: [B, H, N, D]; value: [B, H, N, D]; no pads.

    Returns:
        The output [B, HQ, N, D] in the query's dtype and the natural log of the denominators [B, HQ, N] float32; or
        why there are none.
    """
    query, key, value = alike(query, key, value)
    length, dim = query.shape[2:]
    if key.shape[2] != length:
        return f"{length} new tokens beside {key.shape[2] - length} older ones"
    if value.shape[3] != dim or dim > MAX_DIM:
        return f"heads of {dim} and {value.shape[3]} dimensions, which torch's fused attention does not take"
    if query.is_cuda and dim % 8:
        return f"head_dim {dim}, which torch pads to a multiple of 8"
    chosen = fused_choice(query, key, value, scale=scale)
    ops = torch.ops.aten
    if chosen == SDPBackend.FLASH_ATTENTION.value:
        if query.is_cuda:
            made = flash(query, key, value, causal=True, scale=scale)
        elif query.device.type == "cpu":
            made = ops._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)
        else:
            return f"the device is {query.device.type}, where torch's attention was not tried"
    elif chosen == SDPBackend.CUDNN_ATTENTION.value:
        made = cudnn(query, key, value, causal=True, scale=scale)
    elif chosen == SDPBackend.EFFICIENT_ATTENTION.value and key.shape[1] == query.shape[1]:
        made = ops._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, True, scale=scale)
    else:
        return f"torch's attention of choice here is {SDPBackend(chosen).name.lower()}, which gives no denominators"
    out, lse = made[0], made[1]
    if lse.shape[:2] != query.shape[:2] or lse.shape[2] < length or lse.dtype != torch.float32:
        return f"torch's attention gave denominators as {lse.dtype} {list(lse.shape)}"
    return out, lse[..., :length]  # the memory-efficient op rounds the rows up


def fused_choice(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> int:
    """Return the backend, as a number of `SDPBackend`, that torch would pick for a prompt's causal attention."""
    gqa = key.shape[1] != query.shape[1]
    return int(torch._fused_sdp_choice(query, key, value, None, 0.0, True, scale=scale, enable_gqa=gqa))


def flash(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Run torch's flash attention on CUDA: the output, and the log of the denominators [B, HQ, q or more] float32."""
    made = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return made[0], made[1]


def cudnn(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Run cuDNN's attention, with the same results; causal means that query i sees keys 0 to i."""
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    made = op(query, key, value, None, True, 0.0, causal, False, scale=scale)
    return made[0], made[1].squeeze(-1) if made[1].dim() == 4 else made[1]  # a column, where it is one
