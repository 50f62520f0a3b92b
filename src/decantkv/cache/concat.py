"""Evicted caches of several groups of prompts as one batch, so that reading prompts does not limit decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from decantkv.cache import stores
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.phases import KEPT_WHOLE, Evicted, Whole
from decantkv.cache.re_eviction import EvictedAnswer
from decantkv.selection.selector import FILLER, Kept


def join(target: CacheLayerMixin, parts: Sequence[CacheLayerMixin]) -> None:
    """Fill an empty layer with the rows of all parts, in their order; the parts keep theirs.

    Shorter prompts count as padded on the left to the longest, as they would be in one batch.

    Raises:
        ValueError: a part still reads its prompt or has read none, or its rows cannot stand beside the others'.
    """
    if not isinstance(target, EvictingLayer):
        _join_others(target, parts)
        return
    layers = [part for part in parts if isinstance(part, EvictingLayer)]
    phases = [layer.phase for layer in layers if isinstance(layer.phase, Whole)]
    if len(phases) < len(parts):
        raise ValueError("caches: expected caches that have read a prompt to its end, got an empty or waiting one")
    target.logical = max(layer.logical for layer in layers)
    ahead = [target.logical - layer.logical for layer in layers]
    answers = [phase.answer for phase in phases if isinstance(phase.answer, EvictedAnswer)]
    target.hold(
        stores.concat(
            [phase.store for phase in phases], target.policy.bounds.store,
            whole=not any(isinstance(phase, Evicted) for phase in phases), announced=target.until_eviction(),
        ),
        EvictedAnswer.cat(answers, ahead) if len(answers) == len(phases) else KEPT_WHOLE,
        _join_kept(phases, ahead, target.logical) if any(isinstance(phase, Evicted) for phase in phases) else None,
    )  # fmt: skip


def _join_kept(phases: Sequence[Whole], ahead: Sequence[int], logical: int) -> Kept:
    """Return the tokens that each row holds, counted as in the longest prompt.

    Tokens after a prompt count as kept, but for the last that every part has: `crop` may take those back.
    """
    free = min(phase.store.appended for phase in phases)
    indices = []
    for phase, later in zip(phases, ahead, strict=True):
        own = phase.store.later(logical - later)[..., : phase.store.appended - free]
        if isinstance(phase, Evicted):
            own = torch.cat([phase.kept.indices.expand(-1, own.shape[1], -1), own], 2)
        own = own.sort(-1).values
        indices.append(torch.where(own == FILLER, FILLER, own + later))
    counts = [(own != FILLER).sum(-1) for own in indices]
    most, heads = max(x.shape[2] for x in indices), max(x.shape[1] for x in indices)
    padded = [F.pad(x, (most - x.shape[2], 0), value=FILLER).expand(-1, heads, -1) for x in indices]
    return Kept(torch.cat(padded), torch.cat([c.expand(-1, heads) for c in counts]))


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
