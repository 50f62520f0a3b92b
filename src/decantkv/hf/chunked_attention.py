"""Attention of a prompt's chunk to all stored tokens, without an N×N mask."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from decantkv.base.precision import alike
from decantkv.hf.sdpa import cudnn, flash, fused_choice

LEAST_PART = 1024  # keys, or new tokens, for which cuDNN's faster attention is worth its planning


def attend_chunk(
    query: Tensor, keys: Tensor, values: Tensor, *, held: Sequence[int], scale: float
) -> tuple[Tensor, Tensor | None]:
    """Return the causal attention of the last q of N stored tokens, and the log of its softmax denominators.

    Args:
        query: [B, HQ, q, D]; keys: [B, H, N, D]; values: [B, H, N, Dv].
        held: real tokens that each row stores, the chunk's included; older slots, on the left, are hidden.

    Returns:
        [B, HQ, q, Dv]: by fused attention if no row hides a slot, otherwise with a mask; and [B, HQ, q] float32, or
        None if they cost extra.
    """
    query, keys, values = alike(query, keys, values)
    new, kv_len = query.shape[2], keys.shape[2]
    if set(held) == {kv_len}:
        if LEAST_PART <= new < kv_len and _cudnn_attends(query, keys[:, :, -new:], values[:, :, -new:], scale=scale):
            return _in_parts(query, keys, values, scale=scale)
        bias = causal_lower_right(new, kv_len)
        return scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale, enable_gqa=True), None
    key = torch.arange(kv_len, device=keys.device)
    row = torch.arange(kv_len - new, kv_len, device=keys.device)
    first = kv_len - torch.tensor(held, device=keys.device)
    # a pad among the new tokens sees itself, so that its row is finite; nobody reads what comes of it
    seen = (key <= row[:, None]) & ((key >= first[:, None, None]) | (key == row[:, None]))
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None], scale=scale), None


def _cudnn_attends(query: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> bool:
    """Return whether torch would compute a prompt's causal attention by cuDNN, its fastest backend on Hopper."""
    if not query.is_cuda or query.shape[3] != values.shape[3]:
        return False
    return fused_choice(query, keys, values, scale=scale) == SDPBackend.CUDNN_ATTENTION.value


def _in_parts(query: Tensor, keys: Tensor, values: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Attend causally to the chunk's own tokens and fully to parts of the older ones, and join the results.

    cuDNN's causal rule needs as many queries as keys. Torch's alternative, flash attention aligned to the lower right,
    takes twice as long on an H200. cuDNN plans each new shape for about 0.1 s, so the parts have few sizes.
    """
    new, kv_len = query.shape[2], keys.shape[2]
    out, lse = cudnn(query, keys[:, :, -new:], values[:, :, -new:], causal=True, scale=scale)
    total, lse = out.float(), lse[:, :, :new, None]
    for start, stop in older_parts(kv_len - new):
        attend = cudnn if stop - start >= LEAST_PART else flash
        out, more = attend(query, keys[:, :, start:stop], values[:, :, start:stop], causal=False, scale=scale)
        more = more[:, :, :new, None]
        total.lerp_(out.float(), torch.sigmoid(more - lse))
        lse = torch.logaddexp(lse, more)
    return total.to(query.dtype), lse[..., 0]


def older_parts(length: int) -> list[tuple[int, int]]:
    """Cut `length` keys into powers of two, largest first, and a rest below LEAST_PART."""
    parts, start = [], 0
    while length - start >= LEAST_PART:
        stop = start + (1 << ((length - start).bit_length() - 1))
        parts.append((start, stop))
        start = stop
    return [*parts, (start, length)] if start < length else parts
