"""A decoding step as a CUDA graph: recorded once the cache has taken room, replayed for every token until it is full.

A step of a model's forward costs its kernels a few milliseconds and Python tens of them. Here the forward runs once
under capture, with ids and positions in tensors that stay; afterwards only those are written and the graph replayed.
Lengths live on the device and move inside the graph; what Python counts is counted beside it.

A step is rehearsed before it is recorded, with every wait of the host an error, and a graph is trusted only after two
of its steps gave what the plain forward gives: logits, new keys and lengths. In the recorded step norms, rotary
embeddings and linear layers take fewer launches (`fused`).
"""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from decantkv.cache.layer import EvictingLayer, LayerMark
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.decode.fused_ops import Standin, in_place
from decantkv.hf.attention_hook import CallTerms

Forward = Callable[..., Any]
_FOLLOWED = frozenset({"input_ids", "position_ids", "attention_mask", "cache", "past_key_values", "cache_position"})


CHECKED = 2  # steps: a graph that holds a length fast is right once


@dataclass
class Trust:
    """Results of checking the graphs of one run's model.

    Attributes:
        checked: steps that were compared and agreed.
        broken: why graphs are no longer used, or None.
        replayed: number of steps that came from a graph.
        left: reason → number of steps on a GPU that a graph cannot hold.
        standins: replacement ops of a recorded step; None: not looked for yet.
    """

    checked: int = 0
    broken: str | None = None
    replayed: int = 0
    left: dict[str, int] = field(default_factory=dict)
    standins: Sequence[Standin] | None = None

    def give_up(self, reason: str) -> None:
        """Decode without graphs from now on, and say so."""
        self.broken = reason
        warnings.warn(f"decoding goes on without a CUDA graph: {reason}", stacklevel=2)


class StepGraphs:
    """The steps of one generation; falls back to the plain forward for whatever a graph cannot hold."""

    def __init__(
        self,
        layers: Sequence[CacheLayerMixin],
        trust: Trust,
        refused: str | None = None,
        find: Callable[[], Sequence[Standin]] = tuple,
    ) -> None:
        """`refused`: why this model's steps are not recorded, or None; `find` looks for stand-ins."""
        self._layers, self._trust, self._refused, self._find = list(layers), trust, refused, find
        self._step: _Step | None = None
        self._warm = False
        self._calls: dict[int, CallTerms] = {}  # each layer's last, for its scale and module

    def forget(self) -> None:
        """The cache was emptied: give back the recorded step and its memory."""
        self._step, self._warm = None, False
        self._calls.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> StepGraphs:
        return StepGraphs([], self._trust, "the cache is a copy")  # its tensors lie elsewhere

    def forward(self, original: Forward, kwargs: dict[str, Any]) -> Any:
        """The model's forward, from the graph where this call is a step like those before it.

        Answers are evicted after it, never inside a graph.
        """
        layers = [layer for layer in self._layers if isinstance(layer, EvictingLayer)]
        for layer in layers:
            layer.postponed = True
        try:
            out = self._forward(original, kwargs)
        finally:
            for layer in layers:
                layer.postponed = False
                if layer.noted is not None:
                    self._calls[layer.layer_idx], layer.noted = layer.noted, None
        for layer in layers:
            if layer.policy.due(layer):
                layer.policy.renew(layer, self._calls[layer.layer_idx])
        return out

    def _forward(self, original: Forward, kwargs: dict[str, Any]) -> Any:
        misfit = self._misfit(kwargs)
        if misfit is not None:
            if misfit:
                self._trust.left[misfit] = self._trust.left.get(misfit, 0) + 1
            self._step, self._warm = None, False
            return original(**kwargs)
        stores = [store for _, store in self._attending()]
        place = (kwargs["input_ids"].shape, *(store.keys.data_ptr() for store in stores))
        if not self._warm or min(store.room for store in stores) < 1:
            self._step, self._warm = None, True  # the first step takes room and compiles; a full cache grows
            return original(**kwargs)
        if self._step is not None and self._step.place != place:
            self._step, self._refused = None, "rows move about, as beams do"  # every step would be recorded anew
            return original(**kwargs)
        expected, before = None, None
        if self._trust.standins is None:
            self._trust.standins = self._find()
        if self._trust.checked < CHECKED:
            before = self._snapshot()
            if self._step is None and not self._rehearse(original, kwargs, before):
                return original(**kwargs)
            expected = self._state(original(**kwargs).logits)
            self._restore(before)
        if self._step is None:
            self._step = self._record(original, kwargs, place)
            if self._step is None:
                return original(**kwargs)
            stores[0].changing = True  # the device counts for itself: an interrupt here leaves both counts apart
            self._step.graph.replay()
        else:
            stores[0].changing = True
            self._step.replay(kwargs)
            self._count(1)
        stores[0].changing = False
        out = self._step.output(kwargs)
        if expected is not None and before is not None:
            if not _agree(expected, self._state(out.logits)):
                self._differs()
                self._restore(before)
                return original(**kwargs)
            self._trust.checked += 1
        self._trust.replayed += 1
        return out

    def _differs(self) -> None:
        """A recorded step is not the model's: once without stand-ins, then without graphs."""
        self._step = None
        if not self._trust.standins:
            self._trust.give_up("its step differs from the model's own forward")
            return
        names = ", ".join(sorted({standin.name for standin in self._trust.standins}))
        warnings.warn(f"decoding goes on without stand-ins for {names}: a step with them differs", stacklevel=2)
        self._trust.standins, self._trust.checked = (), 0

    def _state(self, logits: Tensor) -> list[Tensor]:
        """Return what two steps must agree in: logits, then each layer's lengths, newest keys and newest values."""
        return [logits.clone(), *(x for _, store in self._attending() for x in store.newest())]

    def _attending(self) -> list[tuple[EvictingLayer, RaggedStore]]:
        """The layers that attend for themselves, with their stores."""
        layers = [layer for layer in self._layers if isinstance(layer, EvictingLayer)]
        return [(layer, layer.store) for layer in layers if isinstance(layer.store, RaggedStore)]

    def _snapshot(self) -> list[LayerMark]:
        """Return the state of every layer, to which a wrong step is taken back."""
        return [layer.mark() for layer, _ in self._attending()]

    def _restore(self, snapshot: Sequence[LayerMark]) -> None:
        for (layer, _), mark in zip(self._attending(), snapshot, strict=True):
            layer.back_to(mark)

    def _misfit(self, kwargs: dict[str, Any]) -> str | None:
        """Return None if the forward can be captured; otherwise the reason, or '' if it need not be reported."""
        ids, position = kwargs.get("input_ids"), kwargs.get("position_ids")
        if not isinstance(ids, Tensor) or not on_gpu(ids) or ids.shape[1] != 1 or self._trust.broken:
            return ""
        if self._refused is not None:
            return self._refused
        if not isinstance(position, Tensor) or position.shape != ids.shape:
            return "positions are not one number a token"
        if torch.is_grad_enabled():
            return "gradients are on"
        others = [name for name, x in kwargs.items() if isinstance(x, Tensor) and name not in _FOLLOWED]
        if others:
            return f"the forward takes {', '.join(others)}"
        if kwargs.get("output_attentions") or kwargs.get("output_hidden_states"):
            return "attentions or hidden states are wanted"
        for layer in self._layers:
            if not isinstance(layer, EvictingLayer) or not isinstance(layer.store, RaggedStore):
                return "some layers do not attend for themselves"
            if layer.store.keys.device != ids.device:
                return "the layers are on several devices"
            if layer.answer is not None and not layer.answer.steady:
                return "fewer queries were seen than a window holds"
        return None

    def _bare(self, original: Forward, kwargs: dict[str, Any], ids: Tensor, position: Tensor) -> Any:
        """Run the forward of one real token per row, which needs no mask."""
        plain = {name: x for name, x in kwargs.items() if not isinstance(x, Tensor)}
        layers = [layer for layer, _ in self._attending()]
        for layer in layers:
            layer.unmasked = True
        try:
            with in_place(self._trust.standins or ()):
                return original(**plain, input_ids=ids, position_ids=position)
        finally:
            for layer in layers:
                layer.unmasked = False

    def _rehearse(self, original: Forward, kwargs: dict[str, Any], before: Sequence[LayerMark]) -> bool:
        """Return whether a step runs without the host waiting for the device.

        A capture that fails half-way leaves the device's random numbers and pools in doubt; this finds out before.
        """
        ids, position = _written(kwargs["input_ids"]), _written(kwargs["position_ids"])
        try:
            with _rehearsing(ids.device):
                self._bare(original, kwargs, ids, position)
        except (RuntimeError, ValueError) as error:
            self._trust.give_up(_first_line(error))
            return False
        finally:
            self._restore(before)
        return True

    def _record(self, original: Forward, kwargs: dict[str, Any], place: tuple[Any, ...]) -> _Step | None:
        """Capture one step; return None, and never try again, if the model does something that a graph cannot hold."""
        ids, position = _written(kwargs["input_ids"]), _written(kwargs["position_ids"])
        before = self._snapshot()
        try:
            with capturing(ids.device) as graph:
                out = self._bare(original, kwargs, ids, position)
        except (RuntimeError, ValueError) as error:
            self._restore(before)
            self._trust.give_up(_first_line(error))
            return None
        except BaseException:
            self._restore(before)
            raise
        return _Step(graph, ids, position, out, place)

    def _count(self, new: int) -> None:
        for layer, _ in self._attending():
            layer.count(new)


class _Step:
    """One captured forward with its inputs and output."""

    def __init__(self, graph: Any, ids: Tensor, position: Tensor, out: Any, place: tuple[Any, ...]) -> None:
        self.graph, self.place = graph, place
        self._ids, self._position, self._out = ids, position, copy.copy(out)
        self._caches = [name for name, x in out.items() if isinstance(x, Cache)]
        for name in self._caches:  # it holds this step: the two would keep each other, and their memory, alive
            self._out[name] = None

    def replay(self, kwargs: dict[str, Any]) -> None:
        self._ids.copy_(kwargs["input_ids"])
        self._position.copy_(kwargs["position_ids"])
        self.graph.replay()

    def output(self, kwargs: dict[str, Any]) -> Any:
        """Return the forward's output for the cache in `kwargs`, with logits that the next step does not overwrite."""
        out = copy.copy(self._out)
        out["logits"] = self._out.logits.clone()
        for name in self._caches:
            out[name] = next(x for x in kwargs.values() if isinstance(x, Cache))
        return out


def _written(x: Tensor) -> Tensor:
    """A copy that may be written outside of inference mode too."""
    with torch.inference_mode(False):
        return x.clone()


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which a device's steps are captured: one for all, as cuBLAS keeps a workspace for each it meets."""
    return torch.cuda.Stream(device)


@contextmanager
def _rehearsing(device: torch.device) -> Iterator[None]:
    """On the stream that will capture, with every wait of the host for the device an error."""
    side, current, mode = capture_stream(device), torch.cuda.current_stream(device), torch.cuda.get_sync_debug_mode()
    side.wait_stream(current)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        current.wait_stream(side)


@contextmanager
def capturing(device: torch.device) -> Iterator[Any]:
    """A CUDA graph of what happens inside; nothing does yet."""
    graph, collecting = torch.cuda.CUDAGraph(), gc.isenabled()
    torch.cuda.synchronize(device)
    gc.disable()  # what a collection frees, it may free by calls that no capture allows
    try:
        with torch.cuda.graph(graph, stream=capture_stream(device), capture_error_mode="thread_local"):
            yield graph
    finally:
        if collecting:
            gc.enable()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def on_gpu(x: Tensor) -> bool:
    """Return whether a tensor is on a device that has graphs."""
    return x.is_cuda


def _agree(expected: Sequence[Tensor], got: Sequence[Tensor]) -> bool:
    """Return whether two steps are equal up to rounding, row by row; whole numbers must be equal.

    A rounding that falls the other way in a first layer becomes 1.5 % of a row's norm in bfloat16 after 32 layers with
    random weights, however few they were: hence eight units in the last place.
    """
    for x, y in zip(expected, got, strict=True):
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return False
            continue
        allowed = max(1e-4, 8 * torch.finfo(x.dtype).eps)
        wide, apart = x.double().flatten(1), (x.double() - y.double()).flatten(1)
        if not bool((apart.norm(dim=1) <= allowed * wide.norm(dim=1)).all()):  # NaN included
            return False
    return True
