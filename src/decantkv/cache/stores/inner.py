"""Kept tokens inside a cache layer of transformers' own: quantised to fp8, or static."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import cache_utils

from decantkv.base.precision import alike, without_autocast, writable
from decantkv.cache.stores.dense import ROOM, SlackStore

Inner = Literal["plain", "fp8", "static"]


def make_store(keys: Tensor, values: Tensor, kind: Inner, *, announced: int) -> SlackStore:
    """A store of keys [B, H, K, D] and values [B, H, K, Dv] in the wanted kind of memory.

    Args:
        announced: new tokens to come, for stores that never grow; 0 where nobody said how many.
    """
    if kind == "fp8":
        return Fp8Store(keys, values)
    if kind == "static":
        return StaticStore(keys, values, announced=announced)
    return SlackStore(keys, values)


def check_inner(kind: Inner) -> None:
    """Raise ValueError where this transformers has no such layer."""
    if kind == "fp8" and not hasattr(cache_utils, "Fp8QuantizedLayer"):
        raise ValueError(
            f"store: expected 'plain' or 'static' with transformers {transformers.__version__}, which has no "
            "Fp8QuantizedLayer, got 'fp8'"
        )


class Fp8Store(SlackStore):
    """transformers' Fp8QuantizedLayer: a byte an element, one scale a tensor, fixed by what the prompt kept.

    Every step reads all of it back to the model's dtype: this saves memory, not time.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Quantise; the originals are not kept."""
        self._layer: Any = cache_utils.Fp8QuantizedLayer()
        with without_autocast(keys.device):  # which knows no fp8
            self._layer.update(keys, values)
        self.length = keys.shape[2]

    @property
    def keys(self) -> Tensor:
        """[B, H, length, D], dequantised."""
        keys: Tensor = self._layer._dequantize(self._layer._quantized_keys)
        return keys

    @property
    def values(self) -> Tensor:
        """[B, H, length, Dv], dequantised."""
        values: Tensor = self._layer._dequantize(self._layer._quantized_values)
        return values

    @property
    def capacity(self) -> int:
        """Slots in memory."""
        return self.length

    def update(self, keys: Tensor, values: Tensor, *, reserve: int = 0) -> tuple[Tensor, Tensor]:
        """Append; what exceeds the prompt's largest element is clipped, since e4m3 has no infinity and gives NaN."""
        limits = [
            float(scale) * self._layer.fp8_max
            for _, scale in (self._layer._quantized_keys, self._layer._quantized_values)
        ]
        with without_autocast(keys.device):
            new: tuple[Tensor, Tensor] = self._layer.update(
                keys.clamp(-limits[0], limits[0]), values.clamp(-limits[1], limits[1])
            )
        self.length += keys.shape[2]
        return new

    def crop(self, number: int) -> None:
        """Forget the newest `number` tokens."""
        self.each(lambda x: x[:, :, : self.length - number])
        self.length -= number

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change both quantised tensors; their scales stay."""
        for name in ("_quantized_keys", "_quantized_values"):
            quantised, scale = getattr(self._layer, name)
            setattr(self._layer, name, (change(quantised), scale))

    def buffers(self) -> list[Tensor]:
        """The quantised tensors."""
        return [self._layer._quantized_keys[0], self._layer._quantized_values[0]]


class StaticStore(SlackStore):
    """transformers' StaticLayer: slots for kept and new tokens, taken at once and never more."""

    def __init__(self, keys: Tensor, values: Tensor, *, announced: int) -> None:
        """Copy into a layer with room for all new tokens that were announced, or a step's worth where none were."""
        with torch.device(keys.device):  # where it counts, whatever the default device
            self._layer: Any = cache_utils.StaticLayer(keys.shape[2] + (announced or ROOM))
            self._layer.update(*alike(keys, values))  # until transformers 5 both tensors take the keys' dtype
        self.length = keys.shape[2]

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

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change both tensors, free slots included."""
        self._layer.keys, self._layer.values = change(self._layer.keys), change(self._layer.values)

    def buffers(self) -> list[Tensor]:
        """Both tensors, free slots included."""
        return [self._layer.keys, self._layer.values]
