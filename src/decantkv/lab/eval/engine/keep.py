"""What a policy keeps in every layer of a prompt that has been read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decantkv.lab.eval.engine.prompt import Windows
from decantkv.methods import Method
from decantkv.methods.andpro import AnDPro, AnDProChunks
from decantkv.methods.critical import CriticalKV
from decantkv.methods.defensive import DefensiveKV
from decantkv.methods.dropkv import DropKV
from decantkv.methods.h2o import H2O
from decantkv.methods.keydiff import KeyDiff
from decantkv.methods.knorm import KNorm
from decantkv.methods.position import Sliding
from decantkv.methods.snapkv import SnapKV
from decantkv.methods.tova import TOVA
from decantkv.scoring.window import AttentionWindow
from decantkv.selection.selector import Kept, select_layers
from decantkv.selection.topk import FILLER
from decantkv.settings import Settings

# What these compute of a batch row depends on its queries, keys and values, on nothing that belongs to a layer, and
# not on how a method selects. A method that overrides one of them is none of them.
_SCORES: frozenset[object] = frozenset(
    {
        DropKV.score,
        SnapKV.score,
        CriticalKV.base_score,
        DefensiveKV.base_score,
        AnDPro.score,
        AnDProChunks.score,
        H2O.score,
        KNorm.score,
        KeyDiff.score,
        TOVA.score,
        Sliding.score,
    }
)
_RANKS: frozenset[object] = frozenset({Method.rank, CriticalKV.rank, DefensiveKV.rank})
_SELECTION = ("pool", "kernel_size", "pool_scope", "sinks")
TOGETHER_BYTES = 2**30  # float32 keys of the layers that are scored as one batch


def score(windows: Sequence[AttentionWindow], settings: Settings) -> Tensor:
    """[layers, H, N] float32: the method's scores in every layer."""
    if settings.rehearsal is not None and isinstance(windows, Windows):
        rehearsed = windows.rehearsed(settings)
        if not settings.rehearsal.window:
            return rehearsed
        own = score(windows, dataclasses.replace(settings, rehearsal=None))
        return settings.beside(rehearsed, own, windows[0].last(settings.rows).window)
    together = windows.together if isinstance(windows, Windows) else None
    own = _own_score(settings.method)
    parts = windows if together is None or own is None else _parts(together)
    scores = torch.cat([settings.score(window.last(settings.rows)) for window in parts])
    if own is H2O.score and isinstance(windows, Windows):
        windows.carried.column_mass = scores
    return scores


def score_key(settings: Settings) -> tuple[object, ...]:
    """Settings with equal keys have equal scores: those that differ in how they select alone share one computation."""
    method, own = settings.method, _own_score(settings.method)
    if own is None:
        return method, settings.impl, settings.rehearsal
    return (
        own,
        settings.impl,
        settings.rehearsal,
        *((f.name, getattr(method, f.name)) for f in fields(method) if f.name not in _SELECTION),
    )


def _own_score(method: Method) -> Any:
    """The function behind the method's scores where layers can be its batch rows, else None."""
    kind = type(method)
    own = kind.score if kind.base_score is Method.base_score else kind.base_score
    behind_projection = own is DropKV.score and "W_O" in method.needs
    return None if own not in _SCORES or behind_projection else own


def _parts(together: AttentionWindow) -> Iterator[AttentionWindow]:
    """As many layers at once as their keys' copies in float32 allow."""
    number = max(1, TOGETHER_BYTES // (4 * together.k[0].numel()))
    for at in range(0, together.batch, number):
        here = slice(at, at + number)
        queries, mass = (x if x is None else x[here] for x in (together.queries, together.column_mass))
        q, k, v = (x[here] for x in (together.q, together.k, together.v))
        known = together.denominators
        known = known if known is None else known._replace(lse=known.lse[here])
        yield replace(together, q=q, k=k, v=v, queries=queries, denominators=known, column_mass=mass)


def choose(windows: Sequence[AttentionWindow], settings: Settings, scores: Tensor) -> Kept:
    """Return what is kept of one prompt, its layers as the batch: indices [layers, H, K], counts [layers, H]."""
    layers, rule, rank = len(windows), settings.allocation, type(settings.method).rank
    if rule.over_layers:
        orders = [
            settings.order(scores[i : i + 1], win=window.last(settings.rows), layer=(i, layers))
            for i, window in enumerate(windows)
        ]
        return _stack(select_layers(orders))
    if not rule.by_layer and rank is Method.rank:
        return settings.choose(scores)  # the layers differ in nothing but their scores
    if not rule.by_layer and rank in _RANKS and isinstance(windows, Windows) and windows.with_norms is not None:
        return settings.choose(scores, win=windows.with_norms.last(settings.rows))
    return _stack(
        [
            settings.choose(scores[i : i + 1], win=window.last(settings.rows), layer=(i, layers))
            for i, window in enumerate(windows)
        ]
    )


def _stack(kept: Sequence[Kept]) -> Kept:
    """Layers under one another, filled up on the left to the longest."""
    most = max(k.indices.shape[2] for k in kept)
    indices = [F.pad(k.indices, (most - k.indices.shape[2], 0), value=FILLER) for k in kept]
    return Kept(torch.cat(indices), torch.cat([k.counts for k in kept]))
