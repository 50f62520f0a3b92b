"""Budgets: numbers of tokens to keep, computed in whole numbers and exact fractions."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real

from decantkv.base.options import Span

_TEXT = re.compile(r"(\d+/\d+|[+]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(%|tokens?)?")


@dataclass(frozen=True)
class Budget:
    """A budget per head: a share of the prompt's real tokens, or a number of them.

    Attributes:
        share: exact fraction in (0, 1], or None.
        tokens: number of tokens, or None.
    """

    share: Fraction | None
    tokens: int | None

    @classmethod
    def parse(cls, budget: object) -> Budget:
        """Read a fraction (0 < b ≤ 1, of what is kept) or a whole number of tokens, as a number or as text.

        A float is read as the decimal it prints as, so that 0.1 of 500 is 50. Text may be "0.05", "5%", "1/20", "512"
        or "512 tokens". 1 and "1" mean 1.0, the whole prompt; "1 token" is one token.

        Raises:
            TypeError: neither a number nor text.
            ValueError: outside the range, NaN included, or text that is no budget.
        """
        if isinstance(budget, Budget):
            return budget
        wanted = "a fraction in (0, 1] or a whole number of tokens to keep"
        if isinstance(budget, str):
            return cls._read(budget, wanted)
        if isinstance(budget, bool) or not isinstance(budget, Real):
            raise TypeError(f"budget: expected {wanted}, got {budget!r}")
        if isinstance(budget, Integral):
            if budget < 1:
                raise ValueError(f"budget: expected {wanted}, got {budget!r}")
            return cls(Fraction(1), None) if budget == 1 else cls(None, int(budget))
        if not 0 < float(budget) <= 1:  # NaN included
            raise ValueError(f"budget: expected {wanted}, got {budget!r}")
        # `str` gives the shortest decimal of the number's own precision: 0.7 for np.float32(0.7)
        return cls(budget if isinstance(budget, Fraction) else Fraction(str(budget)), None)

    @classmethod
    def _read(cls, text: str, wanted: str) -> Budget:
        """Return the budget that a text names."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"budget: expected {wanted}, such as 0.05, 5% or 512, got {text!r}")
        number, unit = found.groups()
        if unit in ("token", "tokens") and number.isdigit() and int(number) > 0:
            return cls(None, int(number))
        if unit in ("token", "tokens"):
            raise ValueError(f"budget: expected a whole number of tokens, got {text!r}")
        try:
            share = Fraction(number) / (100 if unit == "%" else 1)
        except ZeroDivisionError:
            share = Fraction(0)
        if unit is None and number.isdigit():
            return cls.parse(int(number))
        if not 0 < share <= 1:
            raise ValueError(f"budget: expected {wanted}, got {text!r}")
        return cls(share, None)

    @classmethod
    def of_share(cls, share: str | Fraction) -> Budget:
        """Return the budget of an exact fraction, given as "1/20", as "0.05" or as a `Fraction`.

        Raises:
            ValueError: outside (0, 1], or no fraction.
        """
        return cls.parse(Fraction(share))

    def __str__(self) -> str:
        """Return the budget for a reader: "0.05" or "512 tokens"."""
        if self.share is not None:
            return f"{float(self.share):g}"
        return f"{self.tokens} token{'' if self.tokens == 1 else 's'}"

    def check_fixed(self, fixed: int, names: str) -> None:
        """Raise ValueError if the budget is a number of tokens below the `fixed` always-kept ones."""
        if self.tokens is not None and self.tokens < fixed:
            raise ValueError(f"budget: expected at least {fixed} tokens, which {names} always keep, got {self.tokens}")

    def n_keep(self, length: int, fixed: int) -> int:
        """Return the tokens kept of `length` real ones if `fixed` are always kept: min(n, max(⌊b·n⌋, fixed, 1))."""
        wanted = math.floor(self.share * length) if self.share is not None else self.tokens or 0
        return min(length, max(wanted, fixed, 1))

    def raised(self, length: int, fixed: int) -> bool:
        """Return whether the `fixed` tokens, and not the share, decide `n_keep`."""
        return self.share is not None and math.floor(self.share * length) < min(length, max(fixed, 1))

    def starved(self, length: int, fixed: int) -> str | None:
        """Return why scores do not matter for `length` tokens of which `fixed` are always kept, or None if they do."""
        if fixed >= length or self.n_keep(length, fixed) > fixed:
            return None
        if self.raised(length, fixed):
            return "protected tokens alone exceed the budget's share, so more is kept than asked for"
        return "protected tokens alone fill the budget: no score has a say in what is kept"


@functools.lru_cache(maxsize=256)
def fixed_spans(length: int, *, window: int, sinks: int, protect: tuple[Span, ...]) -> tuple[Span, ...]:
    """Return the always-kept positions of a prompt of `length` tokens, as disjoint ascending spans.

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
    """Return the number of positions in disjoint spans."""
    return sum(stop - start for start, stop in spans)
