"""A cache's state when a forward begins, so that one that fails or is interrupted leaves no trace of itself.

Only numbers and references are noted, and nothing that would keep keys or values alive: what a forward appended is cut
off again. What a forward has evicted is gone, so that a cache cannot go back behind an eviction.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from decantkv.cache.chunked_reading import empty, give_up
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.phases import Whole

Return = Callable[[CacheLayerMixin], bool]  # puts a layer back where it stood; False where that is not possible


class Standing:
    """A cache's state when a forward of `module` began."""

    def __init__(self, cache: DynamicCache, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        places = [_evicting(x) if isinstance(x, EvictingLayer) else _other(x) for x in cache.layers]
        self._waits = any(layer.chunks != "none" for layer in cache.layers if isinstance(layer, EvictingLayer))
        held = any(isinstance(place, _Place) for place in places) and None not in places
        self._places = places if held else None

    def restore(self, cache: DynamicCache) -> bool:
        """Restore the state and return whether that was possible; a prompt that was being read is forgotten whole."""
        evicting = [layer for layer in cache.layers if isinstance(layer, EvictingLayer)]
        if not evicting:
            return True
        if not self._waits:  # for chunks that a forward itself made its prompt wait for
            give_up(cache)
        places = self._places
        if places is None or not any(layer.logical for layer in evicting):
            for layer in cache.layers:
                empty(layer)
            return True
        pairs = zip(places, cache.layers, strict=True)
        return all([place is not None and place(layer) for place, layer in pairs])


class _Place(NamedTuple):
    """An evicting layer's: its phase, of which an eviction makes another one, and how far its store is filled."""

    phase: weakref.ref[Whole]
    logical: int
    length: int
    answer: tuple[Any, ...]

    def __call__(self, layer: CacheLayerMixin) -> bool:
        if not isinstance(layer, EvictingLayer) or not isinstance(layer.phase, Whole):
            return False
        layer.postponed, layer.unmasked, layer.noted = False, False, None
        phase = layer.phase
        if phase is not self.phase():
            return False
        phase.store.forget_staged()
        phase.answer.go_back(self.answer)
        if not phase.store.cut(self.length):
            return False
        layer.logical = self.logical
        return True


def _evicting(layer: EvictingLayer) -> _Place | None:
    """None while the layer's prompt is still to come or to be decided on."""
    phase = layer.phase
    if not isinstance(phase, Whole):
        return None
    return _Place(weakref.ref(phase), layer.logical, phase.store.length, phase.answer.standing())


def _other(layer: CacheLayerMixin) -> Return:
    """Of a layer of transformers' own: a window, all tokens, or a state that is written in place."""
    plain = {name: x for name, x in vars(layer).items() if not isinstance(x, (Tensor, dict))}
    states = [(weakref.ref(x), _writes(x)) for x in _states(layer)]
    tensors = {
        name: weakref.ref(x) for name in ("keys", "values") if isinstance(x := getattr(layer, name, None), Tensor)
    }
    length = layer.keys.shape[-2] if tensors else 0

    def go_back(layer: CacheLayerMixin) -> bool:
        now = [(weakref.ref(x), _writes(x)) for x in _states(layer)]
        if now != states:
            return False
        came = getattr(layer, "cumulative_length", 0) - plain.get("cumulative_length", 0)
        for name, reference in tensors.items():
            x: Tensor | None = getattr(layer, name)
            if x is not reference():
                x = None if x is None else _first(x, length, came or x.shape[2] - length)
                if x is None:
                    return False
                setattr(layer, name, x)
        vars(layer).update(plain)
        return True

    return go_back


def _states(layer: CacheLayerMixin) -> Iterator[Tensor]:
    """A linear layer's tensors."""
    for states in vars(layer).values():
        if isinstance(states, dict):
            yield from (x for x in states.values() if isinstance(x, Tensor))


def _writes(x: Tensor) -> float:
    """Return the number of writes to a tensor; NaN if torch does not count them, as in inference mode."""
    return math.nan if x.is_inference() else x._version


def _first(x: Tensor, length: int, came: int) -> Tensor | None:
    """Return the `length` tokens of [B, H, N, D] that were there before `came` ones, or None if they are gone.

    A window that has moved on is a view of all that it was cut from.
    """
    slots = x.stride(1) // x.stride(2) if x.stride(2) else 0
    if slots == length + came and x.untyped_storage().nbytes() == x.shape[0] * x.stride(0) * x.element_size():
        x = x.as_strided((*x.shape[:2], slots, x.shape[3]), x.stride(), 0)
    return x[:, :, :length] if x.shape[2] == length + came else None
