"""Run tokens over a prompt that was read but not yet evicted, score its keys by their queries, and forget them.

The prompt's layers wait, as for the last chunk of a prompt. Every passage is one forward of the decoder over the full
cache, at the positions that follow the prompt; afterwards each layer goes back to the prompt's length, and layers that
are not evicted get back what they held.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from decantkv.base.precision import without_autocast
from decantkv.cache.call_window import window_of
from decantkv.cache.eviction import Eviction
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.phases import Waiting
from decantkv.hf import attention_hook
from decantkv.hf.attention_hook import AttentionCall, UnsupportedModelError
from decantkv.hf.masks import PromptMask
from decantkv.hf.model_parts import cache_argument, decoder_of
from decantkv.scoring.rehearsal import Rehearsal

_READ = "_decantkv_read"  # on a cache that waits: the prompt that was read into it


@dataclass(frozen=True)
class Read:
    """A prompt as its forwards were given it, chunk by chunk.

    Attributes:
        ids: [B, N] token ids; None where a forward was given embeddings alone.
        mask: [B, N], 0 at pads; None where none are.
    """

    ids: Tensor | None
    mask: Tensor | None

    @functools.cached_property
    def pads(self) -> tuple[int, ...] | None:
        """Pads of each row, on the left; None where there are none."""
        hidden = None if self.mask is None else (self.mask == 0).sum(-1)
        return None if hidden is None or not bool(hidden.any()) else tuple(hidden.tolist())


def note_read(cache: DynamicCache, kwargs: Mapping[str, Any], *, begins: bool, checked: bool) -> None:
    """Remember the token ids and the mask of a forward that reads a prompt, or a chunk of it.

    Args:
        begins: it is the first; checked: a rehearsal will follow.

    Raises:
        ValueError: the forward's mask or positions are of a kind that the rehearsal could not continue.
    """
    mask, ids = kwargs.get("attention_mask"), kwargs.get("input_ids")
    if checked and isinstance(mask, Tensor) and mask.dim() != 2:
        raise ValueError("attention_mask: expected a 2-D mask, or none, beside rehearsal, got another kind")
    positions = kwargs.get("position_ids")
    if checked and isinstance(positions, Tensor) and positions.dim() != 2:
        raise ValueError(
            "rehearsal: expected a prompt whose tokens have one position each, got several, as images have"
        )
    before: Read | None = None if begins else vars(cache).get(_READ)
    if before is not None:
        known = before.ids is not None and ids is not None
        ids = torch.cat([before.ids, ids], 1) if known else None  # type: ignore[list-item]  # known says so
    vars(cache)[_READ] = Read(ids, mask if isinstance(mask, Tensor) else None)


def forget_read(cache: DynamicCache) -> None:
    """Hold nothing of a prompt that was decided on."""
    vars(cache).pop(_READ, None)


@torch.no_grad()
def rehearse_prompt(cache: DynamicCache, rehearsal: Rehearsal) -> None:
    """Score a waiting prompt by the queries of all the rehearsal's passages.

    Raises:
        ValueError: the prompt came as embeddings, so that its tokens cannot be run again.
    """
    read: Read | None = vars(cache).get(_READ)
    layers = waiting_layers(cache)
    length = layers[0].logical
    if read is None or read.ids is None or read.ids.shape[1] != length:
        raise ValueError("rehearsal: expected a prompt that came as input_ids, got embeddings")
    ids = read.ids
    keys = [layer.keys for layer in layers if layer.keys is not None] if rehearsal.anchors else []
    mean = not _policy(layers[0]).settings.method.takes_largest
    for tokens, weights in rehearsal.passages(ids, keys, read.pads, mean=mean):
        run_over(cache, tokens, read, weights)


def rehearse(cache: DynamicCache, ids: Tensor) -> None:
    """Run tokens [B, m] over a prompt that waits; see `EvictingCache.rehearse`."""
    run_over(cache, ids, vars(cache).get(_READ) or Read(None, None))


@torch.no_grad()
def run_over(cache: DynamicCache, ids: Tensor, read: Read, weights: Tensor | None = None) -> None:
    """Run tokens over a waiting prompt, add what their queries make of its keys to each layer's scores, forget them.

    An error, or an interrupt, leaves the cache as it was before, the scores of earlier passages included.

    Args:
        ids: [B, m] token ids, pads on the left.
        weights: [B, m] how much each token's queries count, 0 at pads; None: 1 each.
    """
    layers = waiting_layers(cache)
    model = layers[0].cache.owner()
    if not isinstance(model, nn.Module):
        raise RuntimeError("the cache's model is gone")
    decoder, length = decoder_of(model), layers[0].logical
    kwargs: dict[str, Any] = {"input_ids": ids, "use_cache": True, cache_argument(decoder): cache}
    if read.mask is not None and read.pads is not None:
        real = torch.ones_like(ids) if weights is None else (weights > 0).long()
        kwargs["attention_mask"] = mask = torch.cat([read.mask.long(), real], 1)
        if "position_ids" in inspect.signature(decoder.forward).parameters:
            kwargs["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    passage = _Passage(length, kwargs.get("attention_mask"), weights)
    before = [layer.rehearsed() for layer in layers]
    with _others_restored(cache), _listened(layers, passage, own=passage.seen is None):
        try:
            decoder.forward(**kwargs)
            if passage.heard < len(layers):
                raise UnsupportedModelError("rehearsal: expected an attention call in every layer, got none in some")
        except BaseException:
            attention_hook.forget()
            for layer, scores in zip(layers, before, strict=True):
                layer.note_rehearsed(scores)
            raise


def waiting_layers(cache: DynamicCache) -> list[EvictingLayer]:
    """The cache's layers that wait with a prompt that was read.

    Raises:
        ValueError: there is no such prompt.
    """
    layers = [layer for layer in cache.layers if isinstance(layer, EvictingLayer)]
    if not layers or any(not isinstance(layer.phase, Waiting) for layer in layers):
        raise ValueError(
            "rehearsal: expected a cache that holds a whole prompt, which it does while deferred(cache) is open, got "
            "one that is empty or was evicted"
        )
    return layers


def _policy(layer: EvictingLayer) -> Eviction:
    """The layer's policy, whose settings score a passage."""
    if not isinstance(layer.policy, Eviction):
        raise ValueError("rehearsal: expected a cache that evicts, got one that keeps everything")
    return layer.policy


class _Passage:
    """Takes each layer's attention call of one forward over a waiting prompt."""

    def __init__(self, length: int, mask: Tensor | None, weights: Tensor | None) -> None:
        """`length` of the prompt; `mask` [B, length + m], 0 at pads, or None; `weights` [B, m], or None."""
        self.length, self.heard = length, 0
        self.weights = None if weights is None else weights[:, None]
        self.seen = None if mask is None else _visible(mask != 0, length)

    def __call__(self, layer: EvictingLayer, call: AttentionCall, hints: tuple[Tensor, ...]) -> None:
        """Add the costs of the prompt's keys for this call's queries to the layer's scores."""
        if not call.causal:
            raise UnsupportedModelError(
                f"rehearsal: expected causal attention, got {call.attention_class}, whose tokens see later ones"
            )
        policy, before = _policy(layer), layer.rehearsed()
        with policy.recorder.stopwatch.measure("rehearsal", call.key.device), without_autocast(call.key.device):
            scores = self._score(layer, policy, call, hints)[..., : self.length]
            if before:
                scores = policy.settings.method.add(before[0], scores)
            layer.note_rehearsed((scores.contiguous(),))
        self.heard += 1

    def _score(self, layer: EvictingLayer, policy: Eviction, call: AttentionCall, hints: tuple[Tensor, ...]) -> Tensor:
        device, settings = call.key.device, policy.settings
        seen = PromptMask(None, None if self.seen is None else self.seen.to(device))
        window = window_of(
            call, seen, call.query.shape[2], layer.layer_idx, needs=settings.method.needs, rotate=policy.rotate,
            hints=(hints[0], hints[1]) if hints else None,
        )  # fmt: skip
        if self.weights is not None:
            window = dataclasses.replace(window, row_weights=self.weights.to(device))
        return settings.score(window)


def _visible(shown: Tensor, length: int) -> Tensor:
    """[B, 1, m, N] bool: which of the N tokens, [B, N] bool shown or pads, each one behind the first `length` sees.

    A pad sees itself, so that its row is finite.
    """
    place = torch.arange(shown.shape[1], device=shown.device)
    causal, itself = place <= place[length:, None], place == place[length:, None]
    return (shown[:, None, None] & causal) | itself


@contextmanager
def _listened(layers: Sequence[EvictingLayer], passage: _Passage, *, own: bool) -> Iterator[None]:
    """While open, attention calls go to the passage; afterwards the layers hold the prompt alone.

    Args:
        own: whether layers that attend by themselves go on so: they know of pads on the left alone.
    """
    try:
        for layer in layers:
            layer.rehearse(passage, own=own)
        yield
    finally:
        for layer in layers:
            layer.go_back(passage.length)


@contextmanager
def _others_restored(cache: DynamicCache) -> Iterator[None]:
    """While open, layers that are not evicted may change; afterwards they hold what they held."""
    others = [layer for layer in cache.layers if not isinstance(layer, EvictingLayer)]
    before = [_copied(layer) for layer in others]
    try:
        yield
    finally:
        for layer, attributes in zip(others, before, strict=True):
            vars(layer).clear()
            vars(layer).update(attributes)


def _copied(layer: CacheLayerMixin) -> dict[str, Any]:
    """The layer's attributes; tensors that it may write in place as copies."""
    if isinstance(layer, DynamicLayer):  # windows included: these make new tensors
        return dict(vars(layer))
    return {name: copy.deepcopy(value) for name, value in vars(layer).items()}
