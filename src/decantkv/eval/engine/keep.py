"""What a policy keeps in every layer of a prompt that has been read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from decantkv.allocation import Contest
from decantkv.methods import Method
from decantkv.ranking import FILLER, highest
from decantkv.scoring.window import AttentionWindow
from decantkv.selection import Kept
from decantkv.settings import Settings


def score(windows: Sequence[AttentionWindow], settings: Settings) -> Tensor:
    """[layers, H, N] float32: the method's scores in every layer."""
    return torch.cat([settings.score(window.last(settings.rows)) for window in windows])


def choose(windows: Sequence[AttentionWindow], settings: Settings, scores: Tensor) -> Kept:
    """What is kept of one prompt, its layers as the batch: indices [layers, H, K], counts [layers, H]."""
    layers, rule = len(windows), settings.allocation
    if rule.over_layers:
        return _over_layers(windows, settings, scores)
    if not rule.by_layer and type(settings.method).rank is Method.rank:
        return settings.choose(scores)  # the layers differ in nothing but their scores
    return _stack(
        [
            settings.choose(scores[i : i + 1], win=window.last(settings.rows), layer=(i, layers))
            for i, window in enumerate(windows)
        ]
    )


def _over_layers(windows: Sequence[AttentionWindow], settings: Settings, scores: Tensor) -> Kept:
    """One contest of all layers' heads for the whole model's budget."""
    layers = len(windows)
    orders = [
        settings.order(scores[i : i + 1], win=window.last(settings.rows), layer=(i, layers))
        for i, window in enumerate(windows)
    ]
    heads = scores.shape[1]
    fixed = orders[0].fixed[0]
    contest = Contest([sum((o.n_keep[0] - o.fixed[0]) * heads for o in orders)])
    won: list[Tensor] = []
    for each in orders:
        won = contest.enter(each.priority)
    kept = []
    for each, free in zip(orders, won, strict=True):
        counts = free.to(scores.device) + fixed
        kept.append(Kept(highest(each.priority, counts, int(counts.max())), counts))
    return _stack(kept)


def _stack(kept: Sequence[Kept]) -> Kept:
    """Layers under one another, filled up on the left to the longest."""
    most = max(k.indices.shape[2] for k in kept)
    indices = [F.pad(k.indices, (most - k.indices.shape[2], 0), value=FILLER) for k in kept]
    return Kept(torch.cat(indices), torch.cat([k.counts for k in kept]))
