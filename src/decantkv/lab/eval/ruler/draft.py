"""A RULER prompt before it is fitted to a length."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Draft:
    """The parts of a prompt; as in `Sample`."""

    context: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]


class Maker(Protocol):
    """What a task's generator offers to the fitting of lengths."""

    @property
    def step(self) -> int:
        """Units by which a search for the size begins."""

    @property
    def least(self) -> int:
        """The smallest size that makes a prompt."""

    def draft(self, size: int, rng: random.Random, index: int) -> Draft:
        """A prompt of `size` units, its draws from `rng`; `index` picks the question where a list has them."""
