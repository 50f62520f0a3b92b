"""Selection under tensor parallelism: at most one collective per layer.

Each of P processes holds H of a layer's P·H key-value heads, in order of rank. A choice head by head exchanges nothing.
One set for all heads takes an all-reduce of the scores' sum. Heads that compete gather one another's candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from decantkv.selection.topk import wins


@dataclass(frozen=True)
class Peers:
    """The tensor-parallel group of one model.

    Attributes:
        group: the process group of torch.distributed.
        size: P, the number of processes.
        rank: the number of this process.
    """

    group: Any
    size: int
    rank: int

    @classmethod
    def of(cls, model: Any) -> Peers | None:
        """Return the group of a transformers model, or None if one process holds all heads.

        Raises:
            ValueError: the model is split over processes, but it names no group of them.
        """
        size = getattr(model, "_tp_size", None) or 1
        if size == 1:
            return None
        mesh = getattr(model, "_device_mesh", None)
        if mesh is None:
            raise ValueError(f"model: expected a device mesh beside a model spread over {size} processes, got none")
        names = mesh.mesh_dim_names or ()
        part = mesh["tp"] if "tp" in names and mesh.ndim > 1 else mesh
        return cls(part.get_group(), size, part.get_local_rank())

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        return self  # a group is a connection, not a value

    def own(self, counts: Tensor) -> Tensor:
        """Return this process's heads, [B, H] of [B, P·H]."""
        return counts.chunk(self.size, 1)[self.rank]


def mean_over_heads(scores: Tensor, peers: Peers | None = None) -> Tensor:
    """Return [B, 1, N], the mean of [B, H, N] over the heads of all processes: one all-reduce of 8·B·N bytes.

    Float64 makes the sum independent of its order, so that any number of processes chooses the same tokens.
    """
    total = scores.sum(1, keepdim=True, dtype=torch.float64)
    heads = scores.shape[1]
    if peers is not None:
        dist.all_reduce(total, group=peers.group)
        heads *= peers.size
    return (total / heads).to(scores.dtype)


def wins_of_rows(priority: Tensor, totals: list[int], peers: Peers | None = None) -> Tensor:
    """Return how many of a layer's `totals[b]` highest keys each head holds, over the heads of all processes.

    Each process sends its own t = min(totals, H·N) highest keys, head by head, and their number per head. That is one
    all-gather of 4·B·(t + H) bytes per process for float32 priorities. No choice can need more. See `topk.wins`.

    Args:
        priority: [B, H, N], −inf at keys that take no part.

    Returns:
        [B, P·H] int64, P = 1 without peers; rows sum to `totals`.
    """
    if peers is None:
        if len(set(totals)) == 1:
            return wins(priority, totals[0])
        return torch.stack([wins(row, total) for row, total in zip(priority, totals, strict=True)])
    heads, kv_len = priority.shape[1:]
    sizes = [min(total, heads * kv_len) for total in totals]
    width = max(sizes)
    sent = priority.new_zeros(len(totals), width + heads)
    for row, size in enumerate(sizes):
        _pack(priority[row], size, sent[row, : size + heads])
    received = sent.new_empty(peers.size * len(totals), width + heads)
    dist.all_gather_into_tensor(received, sent, group=peers.group)
    counts = []
    for row, (size, total) in enumerate(zip(sizes, totals, strict=True)):
        parts = received.view(peers.size, len(totals), -1)[:, row, : size + heads]
        lanes = torch.cat([_unpack(part, heads, min(size, kv_len)) for part in parts])
        counts.append(wins(lanes, total))
    return torch.stack(counts)


def _pack(priority: Tensor, size: int, into: Tensor) -> None:
    """Return the `size` highest of [H, N] head by head, followed by each head's number of them."""
    heads = priority.shape[0]
    held = wins(priority, size)
    falling = priority.sort(-1, descending=True).values[:, :size]
    place = torch.arange(falling.shape[1], device=priority.device)
    slot = torch.where(place < held[:, None], (held.cumsum(0) - held)[:, None] + place, size)
    packed = priority.new_empty(size + 1).scatter_(0, slot.flatten(), falling.flatten())
    into[:size] = packed[:size]
    into[size : size + heads] = held.to(into.dtype)  # whole numbers below 2^24


def _unpack(part: Tensor, heads: int, width: int) -> Tensor:
    """Return [H, width] from what `_pack` returned, filled up with −inf after each head's own."""
    size = part.shape[0] - heads
    held = part[size:].long()
    place = torch.arange(width, device=part.device)
    slot = (held.cumsum(0) - held)[:, None] + place
    if size == 0:
        return part.new_empty(heads, 0)
    return part[:size][slot.clamp_max(size - 1)].masked_fill(place >= held[:, None], -torch.inf)
