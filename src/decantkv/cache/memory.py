"""The bytes of a prompt's cache: by what CUDA's allocator gave while the prompt was read, else by live storages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from decantkv.cache.layer import EvictingLayer
from decantkv.cache.report import Memory, Report, storage_bytes


class Weighing:
    """One prompt, from before its first forward until its cache holds what was kept."""

    def __init__(self, module: nn.Module, recorded: int) -> None:
        """`recorded`: how many layers' evictions were on record before this prompt."""
        self.recorded = recorded
        self._devices = _counting_devices(module)
        self._held = self._allocated()

    def _allocated(self) -> int:
        return sum(torch.cuda.memory_allocated(device) for device in self._devices)

    def _counted(self, found: Iterable[Any]) -> list[Tensor]:
        return [x for x in found if isinstance(x, Tensor) and x.device in self._devices]

    def close(self, cache: DynamicCache, full: int, output: Any) -> Memory:
        """The weight before and after.

        Args:
            cache: with everything decided.
            full: bytes of the evicting layers' full keys and values, as each layer held them in turn.
            output: what the forward returned, which is no part of the cache.

        Returns:
            On CUDA what the allocator gave since, without `output` and without layers that do not evict; workspaces
            that the first prompt of a process takes for good count as kept.
        """
        stores = [layer.store for layer in cache.layers if isinstance(layer, EvictingLayer)]
        room = sum(storage_bytes(store.buffers()) - store.nbytes() for store in stores if store is not None)
        if not self._devices:
            return Memory(full, held_bytes(cache) - room, "storages", room)
        left_alone = [layer for layer in cache.layers if not isinstance(layer, EvictingLayer)]
        others = storage_bytes(self._counted(x for layer in left_alone for x in vars(layer).values()))
        grown = self._allocated() - self._held - others - storage_bytes(self._counted(_tensors(output)))
        return Memory(full, grown - room, "allocator", room)


def _counting_devices(module: nn.Module) -> set[torch.device]:
    """Return the CUDA devices of the module, on which an allocator counts."""
    return {p.device for p in module.parameters() if p.is_cuda}


def held_bytes(cache: DynamicCache) -> int:
    """Bytes of what the evicting layers hold, by distinct storages."""
    return storage_bytes([x for layer in cache.layers if isinstance(layer, EvictingLayer) for x in layer.tensors()])


def weighed(report: Report, cache: DynamicCache) -> Report:
    """The report with what the cache holds now beyond its prompt's kept tokens."""
    if not report.layers:
        return report
    memory = report.memory or Memory(report.bytes_before, report.bytes_after, "storages")
    room = max(0, held_bytes(cache) - (memory.after if memory.by == "storages" else report.bytes_after))
    return dataclasses.replace(report, memory=dataclasses.replace(memory, room=room))


def undecided(cache: DynamicCache) -> bool:
    """Return whether a prompt is still being read into the cache."""
    return any(isinstance(layer, EvictingLayer) and layer.reading for layer in cache.layers)


def _tensors(output: Any) -> Iterator[Tensor]:
    """The tensors of a model's output, those of its cache left out."""
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        yield from _tensors(tuple(output.values()))
    elif isinstance(output, Iterable) and not isinstance(output, str | DynamicCache):
        for part in output:
            yield from _tensors(part)
