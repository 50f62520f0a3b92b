"""Kept tokens inside a Fp8QuantizedLayer of transformers' own: a byte an element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import cache_utils

from decantkv.base.precision import without_autocast
from decantkv.cache.stores.dense import DenseStore


class Fp8Store(DenseStore):
    """transformers' Fp8QuantizedLayer: a byte an element, one scale a tensor, fixed by what the prompt kept.

    Every step reads all of it back to the model's dtype: this saves memory, not time.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Quantise; the originals are not kept."""
        self._layer: Any = cache_utils.Fp8QuantizedLayer()
        with without_autocast(keys.device):  # which knows no fp8
            self._layer.update(keys, values)
        self._begin(keys)

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

    def cut(self, length: int) -> bool:
        """As `Store.cut`."""
        self.each(lambda x: x[:, :, :length])
        return super().cut(length)

    def _overwrite(self, keys: Tensor) -> None:
        values = self.values
        self._layer = cache_utils.Fp8QuantizedLayer()
        with without_autocast(keys.device):
            self._layer.update(keys, values)

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change both quantised tensors; their scales stay."""
        for name in ("_quantized_keys", "_quantized_values"):
            quantised, scale = getattr(self._layer, name)
            setattr(self._layer, name, (change(quantised), scale))

    def buffers(self) -> list[Tensor]:
        """The quantised tensors."""
        return [self._layer._quantized_keys[0], self._layer._quantized_values[0]]
