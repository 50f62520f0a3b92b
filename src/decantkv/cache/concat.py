"""Evicted caches of several groups of prompts as one batch, so that reading prompts does not limit decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from decantkv.cache.evicting_layer import EvictingLayer
from decantkv.cache.layer import PromptLayer
from decantkv.cache.ragged_layer import RaggedLayer
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.selection.selector import FILLER, Kept


def join(target: CacheLayerMixin, parts: Sequence[CacheLayerMixin]) -> None:
    """Fill an empty layer with the rows of all parts, in their order; the parts keep theirs.

    Shorter prompts count as padded on the left to the longest, as they would be in one batch.

    Raises:
        ValueError: a part still reads its prompt or has read none, or its rows cannot stand beside the others'.
    """
    if not isinstance(target, PromptLayer):
        _join_others(target, parts)
        return
    layers = [part for part in parts if isinstance(part, PromptLayer)]
    if len(layers) < len(parts) or any(part.prompt is not None or part.logical == 0 for part in layers):
        raise ValueError("caches: expected caches that have read a prompt to its end, got an empty or waiting one")
    target.logical = max(part.logical for part in layers)
    ragged = [part for part in layers if isinstance(part, RaggedLayer)]
    if any(part.lanes is not None for part in ragged) and isinstance(target, RaggedLayer):
        evicted = any(part.kept is not None for part in layers)
        target.lanes = RaggedStore.cat([_lanes(part) for part in ragged], appended=None if evicted else target.logical)
    else:
        _join_stores(target, layers)
    if any(part.kept is not None for part in layers):
        target.kept = _join_kept(layers, target.logical)
    if isinstance(target, EvictingLayer):
        _join_answers(target, [part for part in layers if isinstance(part, EvictingLayer)])


def _join_stores(target: PromptLayer, parts: Sequence[PromptLayer]) -> None:
    most = max(part.stored for part in parts)

    def left(x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, most - x.shape[2], 0))

    stores = [part.store for part in parts if part.store is not None]
    target.fill(torch.cat([left(store.keys) for store in stores]), torch.cat([left(store.values) for store in stores]))
    held = [_held(part) for part in parts]
    heads = max(x.shape[1] for x in held)
    valid = torch.cat([F.pad(x, (most - x.shape[2], 0)).expand(-1, heads, -1) for x in held])
    target.valid = None if bool(valid.all()) else valid


def _held(part: PromptLayer) -> Tensor:
    """[B, 1 or H, stored] bool: which slots hold a token."""
    store = part.store
    if store is None:
        raise ValueError("caches: expected caches that store tokens, got an empty one")
    shown = torch.ones(store.keys.shape[0], 1, store.length, dtype=torch.bool, device=store.keys.device)
    if part.valid is None:
        return shown
    rest = shown[:, :, part.valid.shape[2] :].expand(-1, part.valid.shape[1], -1)
    return torch.cat([part.valid, rest], 2)


def _lanes(part: RaggedLayer) -> RaggedStore:
    """The part's tokens in ragged storage, also where its prompt fitted the budget and was kept dense."""
    if part.lanes is not None:
        return part.lanes
    held, store = _held(part), part.store
    if store is None:
        raise ValueError("caches: expected caches that store tokens, got an empty one")
    heads = store.keys.shape[1]
    place = torch.arange(held.shape[2], device=held.device)
    indices = torch.where(held, place, FILLER).sort(-1).values.expand(-1, heads, -1)
    lanes = RaggedStore.from_kept(store.keys, store.values, Kept(indices, held.sum(-1).expand(-1, heads)))
    if part.kept is None:  # every token came after the last eviction
        lanes.appended, lanes.real = store.length, held[:, 0]
    return lanes


def _join_kept(parts: Sequence[PromptLayer], logical: int) -> Kept:
    """What each row holds, counted as in the longest prompt.

    Tokens after a prompt count as kept, but for the last that every part has: `crop` may take those back.
    """
    free = min(part.after_eviction() for part in parts)
    indices = []
    for part in parts:
        own = _answered(part)[..., : part.after_eviction() - free]
        own = own if part.kept is None else torch.cat([part.kept.indices.expand(-1, own.shape[1], -1), own], 2)
        own = own.sort(-1).values
        indices.append(torch.where(own == FILLER, FILLER, own + logical - part.logical))
    counts = [(own != FILLER).sum(-1) for own in indices]
    most, heads = max(x.shape[2] for x in indices), max(x.shape[1] for x in indices)
    padded = [F.pad(x, (most - x.shape[2], 0), value=FILLER).expand(-1, heads, -1) for x in indices]
    return Kept(torch.cat(padded), torch.cat([c.expand(-1, heads) for c in counts]))


def _answered(part: PromptLayer) -> Tensor:
    """[B, H, n] positions of the n columns after the part's last eviction, FILLER for those that are pads."""
    number, keys = part.after_eviction(), part.keys
    if keys is None:
        raise ValueError("caches: expected caches that store tokens, got an empty one")
    place = torch.arange(part.logical - number, part.logical, device=keys.device)
    if isinstance(part, RaggedLayer) and part.lanes is not None:
        shown, heads = part.lanes.columns()[:, None], part.lanes.heads
    else:
        shown, heads = _held(part)[:, :, part.stored - number :], keys.shape[1]
    return torch.where(shown, place, FILLER).expand(-1, heads, -1)


def _join_answers(target: EvictingLayer, parts: Sequence[EvictingLayer]) -> None:
    """What evictions of the answer need to know: where prompts lie, and the last queries that all parts have."""
    frames = [(part.frame, target.logical - part.logical) for part in parts if part.frame is not None]
    if len(frames) < len(parts):
        return
    target.frame = torch.cat([frame + torch.tensor([ahead, ahead, 0], device="cpu") for frame, ahead in frames])
    recent = [torch.cat(part.recent, 2) for part in parts]
    rows = min(query.shape[2] for query in recent)
    target.recent = [torch.cat([query[:, :, query.shape[2] - rows :] for query in recent])]
    target.renewed = target.logical - max(part.logical - part.renewed for part in parts)


def _join_others(target: CacheLayerMixin, parts: Sequence[CacheLayerMixin]) -> None:
    """Layers that are not evicted: rows stand beside each other where they hold the same positions."""
    lengths = {getattr(part, "cumulative_length", part.get_seq_length()) for part in parts}
    keys, values = [getattr(part, "keys", None) for part in parts], [getattr(part, "values", None) for part in parts]
    held = [x for x in keys if isinstance(x, Tensor)]
    if len(lengths) > 1 or len(held) < len(parts) or len({x.shape[1:] for x in held}) > 1:
        raise ValueError(
            f"caches: expected prompts of one padded length where {type(target).__name__} keeps positions of its own, "
            f"got {sorted(lengths)}"
        )
    target.update(torch.cat(held), torch.cat([x for x in values if isinstance(x, Tensor)]))
    if hasattr(target, "cumulative_length"):
        target.cumulative_length = lengths.pop()
