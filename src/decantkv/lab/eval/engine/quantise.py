"""The honest rival: a full cache in fewer bits, keys per channel and values per token (arXiv 2402.02750's layout)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 64  # tokens of a channel that share a scale, for keys; values share one per token and head


def quantise_keys(keys: Tensor, bits: int) -> Tensor:
    """[B, H, N, D] after a round trip through `bits` per number, with a scale and an offset a channel and 64 tokens."""
    length = keys.shape[2]
    padded = F.pad(keys, (0, 0, 0, -length % GROUP), mode="replicate" if length > 1 else "constant")
    groups = padded.unflatten(2, (-1, GROUP))
    return _round_trip(groups, bits, dim=3).flatten(2, 3)[:, :, :length]


def quantise_values(values: Tensor, bits: int) -> Tensor:
    """[B, H, N, D] after a round trip through `bits` per number, with a scale and an offset a token."""
    return _round_trip(values, bits, dim=3)


def bytes_share(bits: int, head_dim: int) -> float:
    """The cache's size against 16 bits a number, scales and offsets (16 bits each) included."""
    keys = bits / 16 + 2 / GROUP
    values = bits / 16 + 2 / head_dim
    return (keys + values) / 2


def _round_trip(x: Tensor, bits: int, dim: int) -> Tensor:
    numbers = x.float()
    low, high = numbers.amin(dim, keepdim=True), numbers.amax(dim, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(torch.finfo(torch.float32).tiny)
    step, low = step.to(torch.float16).float().clamp_min(1e-7), low.to(torch.float16).float()  # as they are stored
    levels: Tensor = ((numbers - low) / step).round().clamp(0, 2**bits - 1)
    back: Tensor = levels * step + low
    return back.to(x.dtype)
