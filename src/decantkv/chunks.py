"""Attention of a prompt's chunk to what is stored before it, without a mask of everything by everything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention


def attend_chunk(query: Tensor, keys: Tensor, values: Tensor, *, held: Sequence[int], scale: float) -> Tensor:
    """Causal attention of the last q of N stored tokens.

    Args:
        query: [B, HQ, q, D]; keys: [B, H, N, D]; values: [B, H, N, Dv].
        held: real tokens each row stores, the chunk's included; what is left of them is hidden.

    Returns:
        [B, HQ, q, Dv]. Where no row has anything to hide this is one flash-attention call; else a mask is built.
    """
    new, kv_len = query.shape[2], keys.shape[2]
    if set(held) == {kv_len}:
        bias = causal_lower_right(new, kv_len)
        return scaled_dot_product_attention(query, keys, values, attn_mask=bias, scale=scale, enable_gqa=True)
    key = torch.arange(kv_len, device=keys.device)
    row = torch.arange(kv_len - new, kv_len, device=keys.device)
    first = kv_len - torch.tensor(held, device=keys.device)
    # a pad among the new tokens sees itself, so that its row is finite; nobody reads what comes of it
    seen = (key <= row[:, None]) & ((key >= first[:, None, None]) | (key == row[:, None]))
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return scaled_dot_product_attention(query, keys, values, attn_mask=seen[:, None], scale=scale)
