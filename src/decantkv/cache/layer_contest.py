"""One budget over all layers of a cache: each enters when it was read; later ones may win what earlier ones kept."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decantkv.cache.phases import Evicted
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.selection.allocation import Contest
from decantkv.selection.selector import Kept, Order
from decantkv.selection.topk import FILLER, highest

if TYPE_CHECKING:
    from decantkv.cache.layer import EvictingLayer


class LayerContest:
    """Each layer enters when its prompt has been read; later layers may still win some of what it keeps."""

    def __init__(self) -> None:
        self._begin(0)

    def _begin(self, width: int) -> None:
        # weak, as layers hold their contest: an interrupted prompt's cache must go with its last reference
        self._layers: list[weakref.ref[EvictingLayer]] = []
        self._shares: list[Tensor] = []  # of each layer, [S] each stored slot's share of the layer's total
        self._noted: list[int] = []
        self._contest = Contest([])
        self._width = width

    def enter(self, layer: EvictingLayer, order: Order, width: int) -> Kept:
        """Return the tokens that the layer keeps for now.

        Args:
            width: elements of a token's key and value together.

        Raises:
            ValueError: a token of this layer takes another number of bytes than one of the first.
        """
        index, number = layer.place
        if index == 0:
            self._begin(width)
            free = [n - always for n, always in zip(order.n_keep, order.fixed, strict=True)]
            self._contest = Contest([number * order.priority.shape[1] * n for n in free])
        if width != self._width:
            raise ValueError(
                f"allocation: expected layers of equal head_dim under {order.rule.name!r}, which trades tokens between "
                f"them, got {width} after {self._width}; use 'ada' or 'uniform'"
            )
        fixed = torch.tensor(order.fixed, device="cpu")[:, None]
        counts = [fixed + won for won in self._contest.enter(order.priority)]
        for earlier, count in enumerate(counts[:-1]):
            self._shrink(earlier, count)
        own = counts[-1].to(order.priority.device)
        kept = Kept(highest(order.priority, own, int(counts[-1].max())), own)
        self._layers.append(weakref.ref(layer))
        self._shares.append(order.priority.gather(2, kept.indices.clamp_min(0))[kept.valid()])
        return kept

    def _shrink(self, index: int, counts: Tensor) -> None:
        """An earlier layer gives back all but the `counts[b, h]` highest of each head's tokens."""
        layer, shares = self._layers[index](), self._shares[index]
        if layer is None:
            return
        phase = layer.phase
        if not isinstance(phase, Evicted) or not isinstance(phase.store, RaggedStore):
            raise RuntimeError("the layer takes part in no contest")
        store, kept = phase.store, phase.kept
        lane = store.lanes()
        order = shares.argsort(descending=True, stable=True)
        order = order[lane[order].argsort(stable=True)]
        rank = torch.empty_like(order)
        rank[order] = torch.arange(order.shape[0], device=order.device) - store.starts[lane[order]]
        keep = rank < counts.to(lane.device).flatten()[lane]
        if bool(keep.all()):
            return
        store.shrink(keep)
        self._shares[index] = shares[keep]
        left = torch.zeros_like(kept.valid()).masked_scatter_(kept.valid(), keep)
        indices = kept.indices.masked_fill(~left, FILLER).sort(-1).values
        held = left.sum(-1)
        less = Kept(indices[..., indices.shape[2] - int(held.max()) :].contiguous(), held)
        layer.hold(store, phase.answer, less)

    def note(self, layer: EvictingLayer, bytes_before: int) -> list[tuple[EvictingLayer, Tensor, int]]:
        """The layer holds what it keeps for now.

        Returns:
            Once the last layer does, each layer with the tokens [B, H] that its heads keep and its bytes before;
            nothing until then.
        """
        self._noted.append(bytes_before)
        index, number = layer.place
        if index < number - 1:
            return []
        settled = []
        for held, noted in zip(self._layers, self._noted, strict=True):
            if (other := held()) is not None and other.kept is not None:
                settled.append((other, other.kept.counts, noted))
        self._begin(0)
        return settled
