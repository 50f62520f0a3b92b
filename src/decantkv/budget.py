"""How many tokens to keep, in whole numbers and exact fractions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real

from decantkv.options import Span


@dataclass(frozen=True)
class Budget:
    """What is kept per head: a share of the prompt's real tokens, or a number of them.

    Attributes:
        share: exact fraction in (0, 1], or None.
        tokens: number of tokens, or None.
    """

    share: Fraction | None
    tokens: int | None

    @classmethod
    def parse(cls, budget: object) -> Budget:
        """Read a fraction (0 < b ≤ 1, of what is kept) or a whole number of tokens.

        A float is read as the decimal it prints as, so that 0.1 of 500 is 50.

        Raises:
            TypeError: not a number.
            ValueError: outside the range, NaN included.
        """
        if isinstance(budget, Budget):
            return budget
        wanted = "a fraction in (0, 1] or a whole number of tokens to keep"
        if isinstance(budget, bool) or not isinstance(budget, Real):
            raise TypeError(f"budget: expected {wanted}, got {budget!r}")
        if isinstance(budget, Integral):
            if budget < 1:
                raise ValueError(f"budget: expected {wanted}, got {budget!r}")
            return cls(None, int(budget))
        if not 0 < float(budget) <= 1:  # NaN included
            raise ValueError(f"budget: expected {wanted}, got {budget!r}")
        return cls(budget if isinstance(budget, Fraction) else Fraction(repr(float(budget))), None)

    @classmethod
    def of_share(cls, share: str | Fraction) -> Budget:
        """An exact fraction, as "1/20" or "0.05" or itself.

        Raises:
            ValueError: outside (0, 1], or no fraction.
        """
        return cls.parse(Fraction(share))

    def __str__(self) -> str:
        """The budget for a reader: "0.05" or "512 tokens"."""
        if self.share is not None:
            return f"{float(self.share):g}"
        return f"{self.tokens} token{'' if self.tokens == 1 else 's'}"

    def check_fixed(self, fixed: int, names: str) -> None:
        """Raise ValueError when a number of tokens is below what is always kept."""
        if self.tokens is not None and self.tokens < fixed:
            raise ValueError(f"budget: expected at least {fixed} tokens, which {names} always keep, got {self.tokens}")

    def n_keep(self, length: int, fixed: int) -> int:
        """Tokens kept of `length` real ones when `fixed` of them always are: min(n, max(⌊b·n⌋, fixed, 1))."""
        wanted = math.floor(self.share * length) if self.share is not None else self.tokens or 0
        return min(length, max(wanted, fixed, 1))

    def raised(self, length: int, fixed: int) -> bool:
        """Whether `fixed` tokens, not the share asked for, decided `n_keep`."""
        return self.share is not None and math.floor(self.share * length) < min(length, max(fixed, 1))


def fixed_spans(length: int, *, window: int, sinks: int, protect: tuple[Span, ...]) -> tuple[Span, ...]:
    """The always-kept positions of a prompt of `length` tokens as disjoint ascending spans.

    Raises:
        ValueError: a protected span ends outside the prompt.
    """
    for start, stop in protect:
        if stop > length:
            raise ValueError(f"protect: expected spans inside the prompt's {length} tokens, got ({start}, {stop})")
    spans = [(0, min(sinks, length)), (max(0, length - window), length), *protect]
    merged: list[Span] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def count(spans: tuple[Span, ...]) -> int:
    """How many positions disjoint spans hold."""
    return sum(stop - start for start, stop in spans)
