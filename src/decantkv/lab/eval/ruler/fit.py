"""The largest haystack that still fits a length."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Fit:
    """Sizes prompts to a length; the size of one sample is the first guess for the next.

    NVIDIA's generator searches a size once and takes a whole step off where a sample overflows; here each sample
    ends up with the largest size that fits, so that lengths stay within one unit of the goal.
    """

    def __init__(self, length: int, least: int, step: int, *, what: str) -> None:
        self.length = length
        self.least = least
        self.step = step
        self.what = what
        self._size: int | None = None  # the last sample's

    def check(self, build: Callable[[int], tuple[T, int]]) -> None:
        """Raise ValueError where not even the least size fits."""
        _, tokens = build(self.least)
        if tokens > self.length:
            raise self._too_short(tokens)

    def _too_short(self, tokens: int) -> ValueError:
        return ValueError(f"length: expected at least {tokens} tokens for {self.what}, got {self.length}")

    def largest(self, build: Callable[[int], tuple[T, int]]) -> T:
        """The item of the largest size whose token count is within the length.

        Args:
            build: size -> (item, tokens with the answer).

        Raises:
            ValueError: not even the least size fits.
        """
        seen: dict[int, tuple[T, int]] = {}

        def fits(size: int) -> bool:
            if size not in seen:
                seen[size] = build(size)
            return seen[size][1] <= self.length

        low, high = self._size or self.least, 0  # high: a size that does not fit, 0 while none is known
        stride = first = self.step if self._size is None else 1
        while not fits(low):
            if low == self.least:
                raise self._too_short(seen[low][1])
            low, high, stride = max(self.least, low - stride), low, stride * 2
        stride = first
        while not high:
            if fits(low + stride):
                low, stride = low + stride, stride * 2
            else:
                high = low + stride
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        self._size = low
        return seen[low][0]
