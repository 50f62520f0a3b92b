"""Rows without gaps: each head's tokens as a lane, which a step reads without masks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from decantkv.cache.stores.ragged import RaggedStore


class LaneLayer(CacheLayerMixin):
    """One layer's lanes; attention reads them itself (`decantkv.lab.eval.engine.attention`)."""

    is_sliding = False

    def __init__(self, store: RaggedStore) -> None:
        self.store = store
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens behind the others."""
        self.store.append(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens appended; positions are given, not derived."""
        return self.store.appended

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """No mask is built of them."""
        return self.store.appended, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length


def gapless(layers: list[tuple[Tensor, Tensor]], shown: list[Tensor], room: int) -> tuple[list[RaggedStore], Tensor]:
    """Per layer its shown tokens as lanes of one capacity, in the order of their slots; `layers` is emptied.

    Args:
        layers: keys [R, H, S, D] and values [R, H, S, Dv].
        shown: [R, 1 or H, S] bool per layer, or a single entry for all.
        room: free slots at the end of every lane.

    Returns:
        The stores, and the memory of all their lengths, [layers, R, H] int64.
    """
    stores: list[RaggedStore] = []
    slots = lens = None
    lengths = torch.empty(len(layers), *layers[0][0].shape[:2], dtype=torch.long, device=layers[0][0].device)
    layers.reverse()
    while layers:
        keys, values = layers.pop()
        (rows, heads, width), layer = keys.shape[:3], len(stores)
        if slots is None or lens is None or len(shown) > 1:
            here = shown[layer % len(shown)].expand(rows, heads, width).flatten(0, 1)  # [R·H, S]
            lens = here.sum(-1)
            longest = int(lens.max())
            lane = torch.arange(0, rows * heads * width, width, device=keys.device)[:, None]
            first = torch.sort((~here).to(torch.uint8), dim=-1, stable=True).indices  # what is shown, in its order
            slots = first[:, :longest] + lane
        wide = slots.shape[1] + room
        starts = torch.arange(0, rows * heads * wide, wide, device=keys.device)
        moved = [_moved(x.reshape(rows * heads * width, -1), slots, wide) for x in (keys, values)]
        own = lengths[layer].view(-1).copy_(lens)
        stores.append(RaggedStore(moved[0], moved[1], starts, own, batch=rows, room=room))
    return stores, lengths


def _moved(flat: Tensor, slots: Tensor, wide: int) -> Tensor:
    """[R·H·wide, D]: the slots' tokens at the front of every lane."""
    lanes, longest = slots.shape
    moved = flat.new_empty(lanes, wide, flat.shape[1])
    moved[:, :longest] = flat.index_select(0, slots.flatten()).view(lanes, longest, -1)
    return moved.flatten(0, 1)
