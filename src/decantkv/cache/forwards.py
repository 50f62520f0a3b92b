"""Forwards that fail: what they began to store is taken back, so that a cache is as it was before them.

Two hooks on a model and on its decoder see every forward begin and end while an evicting cache for it is alive.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from decantkv.cache.chunked_reading import decide, evicting_layers
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.phases import Waiting, Whole
from decantkv.cache.rehearsal import note_read
from decantkv.cache.standing import Standing
from decantkv.hf.attention_hook import Hold, any_left, lock, uncompiled
from decantkv.hf.masks import padded_turn
from decantkv.hf.model_parts import decoder_of

_BEFORE, _TORN = "_decantkv_before", "_decantkv_torn"  # on a cache: where it stood; it cannot go back there
_watched: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Hold]] = weakref.WeakKeyDictionary()
_CALL = nn.Module._call_impl.__code__
_open = (
    threading.local()
)  # caches of the forwards that this thread is in, by module; one whose prompt is to be decided on


class Watch(Hold):
    """Keeps the hooks on one model and its decoder; released when closed or collected."""

    def _acquire(self, model: nn.Module) -> None:
        decoder: nn.Module = decoder_of(model)
        with lock:
            for part in {model, decoder}:
                _watched.setdefault(part, weakref.WeakSet()).add(self)
                inner = part is decoder
                for before in (_begin, _begin_prompt) if inner else (_begin,):
                    if before not in part._forward_pre_hooks.values():
                        part.register_forward_pre_hook(before, with_kwargs=True)
                for after in (_end_prompt, _end) if inner else (_end,):
                    if after not in part._forward_hooks.values():
                        part.register_forward_hook(after, always_call=after is _end)

    @staticmethod
    def _restore() -> None:
        for part, holders in list(_watched.items()):
            if not any_left(holders):
                hooks: tuple[Callable[..., None], ...] = (_begin, _begin_prompt, _end_prompt, _end)
                for hook in hooks:
                    unhook(part, hook)
                _watched.pop(part, None)


def unhook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Take a hook out of a module's hooks, by what it is, since an interrupt may have lost its handle."""
    before, after = module._forward_pre_hooks, module._forward_hooks
    for hooks, marks in (
        (before, (module._forward_pre_hooks_with_kwargs,)),
        (after, (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)),
    ):
        for number in [number for number, other in list(hooks.items()) if other == hook]:
            for mark in marks:
                mark.pop(number, None)
            hooks.pop(number, None)


@uncompiled
def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Remember where the cache stands, unless the forward is part of one that did.

    Torch's tables of hooks differ for a moment while another thread adds or removes one: then `kwargs` do not come.

    Raises:
        ValueError: the forward before this one left its tokens behind, or this one cannot be carried out.
    """
    caches = _caches()
    caches.pop(id(module), None)  # of a forward that was interrupted
    cache = None if kwargs is None else _cache_among(args, kwargs)
    if cache is None or kwargs is None:
        return
    evicts = any(isinstance(layer, EvictingLayer) for layer in cache.layers)
    if not evicts and cache.get_seq_length():
        return
    if evicts and kwargs.get("encoder_hidden_states") is not None:
        raise ValueError(
            "encoder_hidden_states: expected none beside an evicting cache, got some, whose keys would be cached as "
            "tokens"
        )
    standing: Standing | None = vars(cache).get(_BEFORE)
    outer = None if standing is None else standing.module()
    if outer is not None and outer is not module and _is_running(outer):
        return
    if settle(cache):  # the caller may have gone by what the layers said
        raise ValueError(
            "cache: expected one whose last forward ended, got one that was interrupted; what that forward stored "
            "is taken back: call again"
        )
    caches[id(module)] = weakref.ref(cache)
    vars(cache)[_BEFORE] = Standing(cache, module)


@uncompiled
def _begin_prompt(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Look at what a decoder is given by name, as its model may not be.

    A prompt that will be rehearsed waits, also where it comes in one piece, until its forward is over. What comes to a
    prompt that was given up between its chunks is its last.
    """
    _open.prompt = None
    cache = None if kwargs is None else _cache_among(args, kwargs)
    layers = evicting_layers(cache)
    if cache is None or kwargs is None or not layers:
        return
    kwargs = by_name(module, args, kwargs)
    _note_pads(layers, kwargs)
    _refuse_hidden_tokens(cache.layers, kwargs.get("attention_mask"))
    begins, rehearsed = layers[0].logical == 0, layers[0].policy.rehearsal is not None
    waits = isinstance(layers[0].phase, Waiting)
    if layers[0].chunks == "none" and (waits or (begins and rehearsed)):
        for layer in layers:
            layer.defer()
            layer.expect_last()
    if layers[0].chunks != "none" and (begins or waits):
        note_read(cache, kwargs, begins=begins, checked=rehearsed)
    if layers[0].policy.reads_ids and (begins or waits):
        layers[0].cache.note_ids(kwargs.get("input_ids"), begins=begins)
    if rehearsed and any(layer.chunks == "last" for layer in layers):
        _open.prompt = weakref.ref(cache)


def _end_prompt(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Decide what to keep of a prompt that is rehearsed."""
    reference, _open.prompt = getattr(_open, "prompt", None), None
    cache = None if reference is None else reference()
    if cache is not None:
        decide(cache)


@uncompiled
def _end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Take back what a forward without an output stored."""
    reference = _caches().pop(id(module), None)
    cache = None if reference is None else reference()
    if cache is None:
        return
    if output is None:
        _go_back(cache)
    else:
        vars(cache).pop(_BEFORE, None)


def settle(cache: DynamicCache) -> bool:
    """Take back what an interrupted forward stored, for which torch calls no hook; return whether there was anything.

    Not to be called inside a forward.

    Raises:
        ValueError: it cannot be taken back.
    """
    lengths = _lengths(cache) if _BEFORE in vars(cache) else None
    _go_back(cache)
    evicting = [layer for layer in cache.layers if isinstance(layer, EvictingLayer)]
    if vars(cache).get(_TORN) and any(layer.logical for layer in evicting):
        raise ValueError(
            "cache: expected layers that hold the same tokens, got one whose last forward failed and could not be "
            "taken back; call reset() and read the prompt again"
        )
    vars(cache).pop(_TORN, None)
    return lengths is not None and lengths != _lengths(cache)


@contextmanager
def changing(cache: DynamicCache) -> Iterator[None]:
    """Around a change of all layers: interrupted in the midst of it, the cache is refused until it is reset.

    Raises:
        ValueError: the cache is of no use already.
    """
    settle(cache)
    try:
        yield
    except Exception:
        raise
    except BaseException:
        vars(cache)[_TORN] = True
        raise


def by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a forward's arguments by their names, however they were given."""
    return {**dict(zip(inspect.signature(module.forward).parameters, args, strict=False)), **kwargs} if args else kwargs


def _lengths(cache: DynamicCache) -> list[int]:
    counts = [getattr(layer, "get_seq_length", None) for layer in cache.layers]
    return [count() for count in counts if count is not None]


def _go_back(cache: DynamicCache) -> None:
    standing: Standing | None = vars(cache).get(_BEFORE)
    if standing is not None:
        if not standing.restore(cache):
            vars(cache)[_TORN] = True
        vars(cache).pop(_BEFORE, None)


def _caches() -> dict[int, weakref.ref[DynamicCache]]:
    found: dict[int, weakref.ref[DynamicCache]] = vars(_open).setdefault("caches", {})
    return found


def _is_running(module: nn.Module) -> bool:
    """Return whether this thread is inside a forward of the module."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def _cache_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> DynamicCache | None:
    return next((x for x in (*kwargs.values(), *args) if isinstance(x, DynamicCache)), None)


def _refuse_hidden_tokens(layers: Sequence[CacheLayerMixin], mask: Any) -> None:
    """Raise where a caller's 4-D mask hides older tokens from layers that store unequally many: it can fit only one.

    Masks that transformers makes inside the model hide pads there, which layers know.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 4:
        return
    layer = next((other for other in layers if isinstance(other, EvictingLayer)), None)
    if layer is None or not layer.policy.uneven or layer.kept is None:
        return
    later = layer.stored - layer.kept.indices.shape[2] + mask.shape[2]
    older = mask[..., : max(0, mask.shape[3] - later)]
    shown = older if older.dtype == torch.bool else older > torch.finfo(older.dtype).min / 2
    if not bool(shown.all()):
        raise ValueError(
            "attention_mask: expected a 2-D mask of all tokens where an allocation gives layers unequally many, got a "
            "4-D one that hides older tokens"
        )


def _note_pads(layers: Sequence[EvictingLayer], kwargs: Mapping[str, Any]) -> None:
    """Tell stores which tokens of a later turn are pads.

    Raises:
        ValueError: answers are evicted, so that rows would be evicted at other times than alone.
    """
    mask, phases = kwargs.get("attention_mask"), [x.phase for x in layers if isinstance(x.phase, Whole)]
    tokens = next((kwargs[n] for n in ("input_ids", "inputs_embeds") if isinstance(kwargs.get(n), Tensor)), None)
    if not phases or tokens is None or not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    real = mask[:, -tokens.shape[1] :] != 0
    if (mask.is_cuda and real.shape[1] == 1) or bool(real.all()):  # a step on a GPU does not wait for the device
        return
    if any(phase.answer.evicted for phase in phases):
        raise padded_turn()
    for phase in phases:
        phase.store.expect_pads(real)
