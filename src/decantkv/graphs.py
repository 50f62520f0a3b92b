"""A decoding step as a CUDA graph: recorded once the cache has taken room, replayed for every token until it is full.

A step of a model's forward costs its kernels a few milliseconds and Python tens of them. Here the forward runs once
under capture, with ids and positions in tensors that stay; afterwards only those are written and the graph replayed.
Lengths live on the device and move inside the graph; what Python counts is counted beside it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from decantkv.ragged_layers import RaggedLayer

Forward = Callable[..., Any]
_FOLLOWED = frozenset({"input_ids", "position_ids", "attention_mask", "cache", "past_key_values", "cache_position"})


class StepGraphs:
    """The steps of one generation; falls back to the plain forward for whatever a graph cannot hold.

    Attributes:
        replayed: steps that came from a graph.
    """

    def __init__(self, layers: Sequence[CacheLayerMixin]) -> None:
        self._layers = list(layers)
        self._step: _Step | None = None
        self._warm = False
        self.broken = False
        self.replayed = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> StepGraphs:
        return StepGraphs([])  # a copy's tensors lie elsewhere; it decodes without graphs

    def forward(self, original: Forward, kwargs: dict[str, Any]) -> Any:
        """The model's forward, from the graph where this call is a step like those before it."""
        if not self._fits(kwargs):
            self._step, self._warm = None, False
            return original(**kwargs)
        stores = [layer.lanes for layer in self._layers if isinstance(layer, RaggedLayer) and layer.lanes is not None]
        place = (kwargs["input_ids"].shape, *(store.keys.data_ptr() for store in stores))
        if not self._warm or min(store.room for store in stores) < 1:
            self._step, self._warm = None, True  # the first step takes room and compiles; a full cache grows
            return original(**kwargs)
        if self._step is None or self._step.place != place:
            self._step = self._record(original, kwargs, place)
            if self._step is None:
                return original(**kwargs)
            self._step.graph.replay()
        else:
            self._step.replay(kwargs)
            self._count(1)
        self.replayed += 1
        return self._step.output()

    def _fits(self, kwargs: dict[str, Any]) -> bool:
        ids, position = kwargs.get("input_ids"), kwargs.get("position_ids")
        if self.broken or not isinstance(ids, Tensor) or not isinstance(position, Tensor) or not ids.is_cuda:
            return False
        if ids.shape[1] != 1 or position.shape != ids.shape or torch.is_grad_enabled() or not self._layers:
            return False
        if any(isinstance(x, Tensor) for name, x in kwargs.items() if name not in _FOLLOWED):
            return False
        if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
            return False
        return all(
            isinstance(layer, RaggedLayer)
            and layer.frame is None  # an answer that is evicted wants every step's queries
            and layer.lanes is not None
            and layer.lanes.keys.device == ids.device
            for layer in self._layers
        )

    def _record(self, original: Forward, kwargs: dict[str, Any], place: tuple[Any, ...]) -> _Step | None:
        """Capture one step; None, and never again, where the model does something a graph cannot hold."""
        ids, position = kwargs["input_ids"].clone(), kwargs["position_ids"].clone()
        plain = {name: x for name, x in kwargs.items() if not isinstance(x, Tensor)}
        graph = torch.cuda.CUDAGraph()
        before = [_numbers(layer) for layer in self._layers]
        torch.cuda.synchronize(ids.device)
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = original(**plain, input_ids=ids, position_ids=position)
        except (RuntimeError, ValueError) as error:
            for layer, numbers in zip(self._layers, before, strict=True):
                _restore(layer, numbers)
            self.broken = True
            reason = str(error).strip().splitlines()[0]
            warnings.warn(f"decoding goes on without a CUDA graph: {reason}", stacklevel=2)
            return None
        return _Step(graph, ids, position, out, place)

    def _count(self, new: int) -> None:
        for layer in self._layers:
            if isinstance(layer, RaggedLayer) and layer.lanes is not None:
                layer.logical += new
                layer.lanes.room -= new
                layer.lanes.appended += new


class _Step:
    """One captured forward with its inputs and output."""

    def __init__(self, graph: Any, ids: Tensor, position: Tensor, out: Any, place: tuple[Any, ...]) -> None:
        self.graph, self.place = graph, place
        self._ids, self._position, self._out = ids, position, out

    def replay(self, kwargs: dict[str, Any]) -> None:
        self._ids.copy_(kwargs["input_ids"])
        self._position.copy_(kwargs["position_ids"])
        self.graph.replay()

    def output(self) -> Any:
        """What the forward returned, with logits that the next step leaves alone."""
        out = copy.copy(self._out)
        out["logits"] = self._out.logits.clone()
        return out


def _numbers(layer: CacheLayerMixin) -> tuple[int, int, int]:
    lanes = layer.lanes if isinstance(layer, RaggedLayer) else None
    return (0, 0, 0) if lanes is None or not isinstance(layer, RaggedLayer) else (
        layer.logical, lanes.room, lanes.appended
    )  # fmt: skip


def _restore(layer: CacheLayerMixin, numbers: tuple[int, int, int]) -> None:
    if isinstance(layer, RaggedLayer) and layer.lanes is not None:
        layer.logical, layer.lanes.room, layer.lanes.appended = numbers
        layer.forget_new()
