"""Kept tokens inside a StaticLayer of transformers' own, which takes its room at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from transformers import cache_utils

from decantkv.base.precision import alike, writable
from decantkv.cache.stores.dense import ROOM, DenseStore


class StaticStore(DenseStore):
    """transformers' StaticLayer: slots for kept and new tokens, taken at once and never more."""

    def __init__(self, keys: Tensor, values: Tensor, *, announced: int = 0) -> None:
        """Copy into a layer with room for `announced` new tokens, or for `ROOM` if their number is unknown."""
        with torch.device(keys.device):  # where it counts, whatever the default device
            self._layer: Any = cache_utils.StaticLayer(keys.shape[2] + (announced or ROOM))
            self._layer.update(*alike(keys, values))  # until transformers 5 both tensors take the keys' dtype
        self._begin(keys)

    @classmethod
    def make(cls, keys: Tensor, values: Tensor, *, announced: int) -> Self:
        """As `DenseStore.make`."""
        return cls(keys, values, announced=announced)

    @property
    def keys(self) -> Tensor:
        """[B, H, length, D], a view."""
        keys: Tensor = self._layer.keys
        return keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """[B, H, length, Dv], a view."""
        values: Tensor = self._layer.values
        return values[:, :, : self.length]

    @property
    def capacity(self) -> int:
        """Slots in memory."""
        return int(self._layer.max_cache_len)

    def update(self, keys: Tensor, values: Tensor, *, reserve: int = 0) -> tuple[Tensor, Tensor]:
        """Write in place.

        Raises:
            ValueError: the layer is full.
        """
        if self.length + keys.shape[2] > self.capacity:
            raise ValueError(
                f"store: expected at most {self.capacity} kept and new tokens in this static layer, got "
                f"{self.length + keys.shape[2]}; use 'plain', which grows"
            )
        self._layer.keys = writable(self._layer.keys, keys)
        self._layer.values = writable(self._layer.values, values)
        end = self.length + keys.shape[2]  # where the layer itself would write depends on transformers' version
        self._layer.keys[:, :, self.length : end] = keys
        self._layer.values[:, :, self.length : end] = values
        self.length = end
        return self.keys, self.values

    def _overwrite(self, keys: Tensor) -> None:
        self._layer.keys[:, :, : self.length] = keys

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change both tensors, free slots included."""
        self._layer.keys, self._layer.values = change(self._layer.keys), change(self._layer.values)

    def buffers(self) -> list[Tensor]:
        """Both tensors, free slots included."""
        return [self._layer.keys, self._layer.values]
