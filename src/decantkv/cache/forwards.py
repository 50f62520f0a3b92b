"""Forwards that fail: what they began to store is taken back, so that a cache is as it was before them.

Two hooks on a model's decoder see every forward begin and end while an evicting cache for that model is alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from decantkv.cache.chunked_reading import decide, empty, evicting_layers
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.phases import Waiting
from decantkv.cache.rehearsal import note_read
from decantkv.hf.attention_hook import Hold, any_left, lock
from decantkv.hf.masks import padded_turn
from decantkv.hf.model_parts import decoder_of

_BEFORE, _TORN = "_decantkv_before", "_decantkv_torn"  # on a cache: its length when a forward began; layers differ
_watched: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[Hold]] = weakref.WeakKeyDictionary()


class Watch(Hold):
    """Keeps the hooks on one model's decoder; released when closed or collected."""

    def _acquire(self, model: nn.Module) -> None:
        decoder = decoder_of(model)
        with lock:
            _watched.setdefault(decoder, weakref.WeakSet()).add(self)
            if _begin not in decoder._forward_pre_hooks.values():
                decoder.register_forward_pre_hook(_begin, with_kwargs=True)
            if _end not in decoder._forward_hooks.values():
                decoder.register_forward_hook(_end, with_kwargs=True, always_call=True)

    @staticmethod
    def _restore() -> None:
        for decoder, holders in list(_watched.items()):
            if not any_left(holders):
                unhook(decoder, _begin)
                unhook(decoder, _end)
                _watched.pop(decoder, None)


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


def _begin(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
    """Remember how long the cache is.

    Torch's tables of hooks differ for a moment while another thread adds or removes one: then `kwargs` do not come.

    Raises:
        ValueError: the forward before this one left layers of unequal length, or this one cannot be carried out.
    """
    cache = None if kwargs is None else _cache_among(args, kwargs)
    if cache is None or kwargs is None:
        return
    layer = next((layer for layer in cache.layers if isinstance(layer, EvictingLayer)), None)
    before = cache.get_seq_length() if layer is None else layer.logical
    if layer is None and before:
        return
    if layer is not None and kwargs.get("encoder_hidden_states") is not None:
        raise ValueError(
            "encoder_hidden_states: expected none beside an evicting cache, got some, whose keys would be cached as "
            "tokens"
        )
    if _BEFORE in vars(cache):  # its end was never seen, as after Ctrl-C
        interrupted = vars(cache).pop(_BEFORE)
        if len({other.logical for other in cache.layers if isinstance(other, EvictingLayer)}) > 1:
            _undo(cache, interrupted)
            raise ValueError(
                "cache: expected one whose last forward ended, got one that was interrupted; what that forward stored "
                "is taken back: call again"
            )
    if before and vars(cache).get(_TORN):
        raise ValueError(
            "cache: expected layers that hold the same tokens, got one whose last forward failed and could not be "
            "taken back; call reset() and read the prompt again"
        )
    vars(cache).pop(_TORN, None)
    _refuse_padded_turn(cache.layers, kwargs)
    _refuse_hidden_tokens(cache.layers, kwargs.get("attention_mask"))
    if layer is not None:
        _begin_prompt(cache, kwargs)
    vars(cache)[_BEFORE] = before


def _end(decoder: nn.Module, args: tuple[Any, ...], *kwargs_and_output: Any) -> None:
    """Take back what a forward without an output stored."""
    if len(kwargs_and_output) < 2:  # as in `_begin`
        return
    kwargs, output = kwargs_and_output
    cache = _cache_among(args, kwargs)
    before = None if cache is None else vars(cache).pop(_BEFORE, None)
    if cache is None or before is None:
        return
    if output is None:
        _undo(cache, before)
    elif any(layer.chunks == "last" and layer.policy.rehearsal is not None for layer in evicting_layers(cache)):
        decide(cache)


def _begin_prompt(cache: DynamicCache, kwargs: Mapping[str, Any]) -> None:
    """A prompt that will be rehearsed waits, also where it comes in one piece, until its forward is over."""
    layers = evicting_layers(cache)
    begins, rehearsed = layers[0].logical == 0, layers[0].policy.rehearsal is not None
    if begins and rehearsed and layers[0].chunks == "none":
        for layer in layers:
            layer.defer()
            layer.expect_last()
    if layers[0].chunks != "none" and (begins or isinstance(layers[0].phase, Waiting)):
        note_read(cache, kwargs, begins=begins, checked=rehearsed)


def _cache_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> DynamicCache | None:
    return next((x for x in (*kwargs.values(), *args) if isinstance(x, DynamicCache)), None)


def _undo(cache: DynamicCache, before: int) -> None:
    """Every layer as it was at that length; a prompt that was being read is forgotten whole."""
    layers = [layer for layer in cache.layers if isinstance(layer, EvictingLayer)]
    if before == 0 or any(layer.reading for layer in layers):
        for layer in cache.layers:
            empty(layer)
        return
    try:
        for layer in layers:
            layer.forget_new()
            if layer.logical > before:
                layer.crop(before - layer.logical)
        for layer in cache.layers:
            ahead = 0 if isinstance(layer, EvictingLayer) else layer.get_seq_length() - before
            if ahead > 0:
                layer.crop(-ahead)
    except (RuntimeError, ValueError):  # evicted since, or a window that has moved on
        vars(cache)[_TORN] = True


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


def _refuse_padded_turn(layers: Sequence[CacheLayerMixin], kwargs: Mapping[str, Any]) -> None:
    """Raise where answers are evicted and a later turn has pads: rows would be evicted at other times than alone."""
    mask = kwargs.get("attention_mask")
    answering = any(isinstance(x, EvictingLayer) and x.answer is not None and x.answer.evicted for x in layers)
    tokens = next((kwargs[n] for n in ("input_ids", "inputs_embeds") if isinstance(kwargs.get(n), Tensor)), None)
    if not answering or tokens is None or not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] == 1:
        return
    new = mask[:, -tokens.shape[1] :]
    if (new.shape[1] > 1 or not mask.is_cuda) and not bool(torch.all(new != 0)):
        raise padded_turn()
