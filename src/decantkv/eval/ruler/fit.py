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

        if not fits(self.least):
            raise ValueError(
                f"length: expected at least {seen[self.least][1]} tokens for {self.what}, got {self.length}"
            )
        low, high = self._bracket(fits)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        self._size = low
        return seen[low][0]

    def _bracket(self, fits: Callable[[int], bool]) -> tuple[int, int]:
        """(low, high): low fits and high does not."""
        if self._size is None:
            low, stride = self.least, self.step
        else:
            stride = 1
            low = self._size
            while low > self.least and not fits(low):
                low, stride = max(self.least, low - stride), stride * 2
            if not fits(low + 1):
                return low, low + 1
            stride = 1
        high = low + stride
        while fits(high):
            low, stride = high, stride * 2
            high = low + stride
        return low, high
