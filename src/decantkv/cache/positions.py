"""Prompt positions of stored tokens: a round of eviction leaves tokens from anywhere in the prompt side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from decantkv.base.options import Span
from decantkv.base.transfer import to_device
from decantkv.selection.selector import Kept
from decantkv.selection.topk import FILLER


class Slots(Protocol):
    """The prompt positions of stored slots, while the prompt is read."""

    def seen(self, held: Sequence[int]) -> Sequence[int]:
        """Return the real tokens that each row was given, of which `held` are stored."""

    def origin(self, kept: Kept) -> Kept:
        """Return the same choice by prompt positions instead of slots."""

    def left(self, counts: Tensor, rows: Sequence[int]) -> Kept | None:
        """Return all that is stored, by prompt positions, or None if nothing was dropped yet.

        Args:
            counts: [B, H] and rows: how many tokens are stored.
        """


class Straight(Slots):
    """Slots hold the prompt's tokens in order, and all of them."""

    def seen(self, held: Sequence[int]) -> Sequence[int]:
        """Those stored."""
        return held

    def origin(self, kept: Kept) -> Kept:
        """Slots are positions."""
        return kept

    def left(self, counts: Tensor, rows: Sequence[int]) -> Kept | None:
        """Nothing was dropped."""
        return None


STRAIGHT = Straight()


@dataclass(frozen=True)
class Trail(Slots):
    """Prompt positions of the stored slots of a prompt that was thinned between its chunks.

    Attributes:
        positions: [B, H, M] int64 prompt positions, ascending; FILLER on the left.
        held: real tokens each row stores; given: real tokens each row was given. Pads count in neither.
    """

    positions: Tensor
    held: tuple[int, ...]
    given: tuple[int, ...]

    @classmethod
    def start(cls, batch: int, heads: int, device: torch.device) -> Trail:
        """Before the first chunk."""
        none = (0,) * batch
        return cls(torch.zeros(batch, heads, 0, dtype=torch.int64, device=device), none, none)

    def extend(self, new: int, logical: int, held: Sequence[int]) -> Trail:
        """After `new` more tokens, the last at position `logical` − 1; `held` real ones are stored now."""
        later = torch.arange(logical - new, logical, device=self.positions.device)
        later = later.expand(*self.positions.shape[:2], -1)
        given = tuple(all_ + now - before for all_, now, before in zip(self.given, held, self.held, strict=True))
        return Trail(torch.cat([self.positions, later], 2), tuple(held), given)

    def keep(self, kept: Kept, held: Sequence[int]) -> Trail:
        """After all but `kept` slots are gone, of which `held` are real tokens of each row."""
        return Trail(self.origin(kept).indices, tuple(held), self.given)

    def seen(self, held: Sequence[int]) -> Sequence[int]:
        """Real tokens each row was given."""
        return self.given

    def left(self, counts: Tensor, rows: Sequence[int]) -> Kept | None:
        """All that is stored, if that is less than came."""
        return None if self.given == self.held else Kept(self.positions, counts, tuple(rows))

    def origin(self, kept: Kept) -> Kept:
        """Return the same choice by prompt positions instead of slots."""
        found = self.positions.gather(2, kept.indices.clamp_min(0))
        return Kept(found.masked_fill(kept.indices == FILLER, FILLER), kept.counts, kept.rows)

    def inside(self, spans: Sequence[Span], starts: Sequence[int]) -> Tensor:
        """[B, H, M] bool: which slots hold a token of the spans, which count from where each row starts."""
        place = self.positions - to_device(starts, self.positions.device)[:, None, None]
        within = torch.zeros_like(place, dtype=torch.bool)
        for start, stop in spans:
            within |= (place >= start) & (place < stop)
        return within & (self.positions != FILLER)
