"""Interrupts between two lines of Python, as a signal's handler raises them, each at a place of one's choice."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PLACES = (
    "/decantkv/",
    "/transformers/models/",
    "/transformers/cache_utils.py",
    "/transformers/generation/",
    "/nn/modules/",
)


@contextmanager
def counting(stop: int | None, places: tuple[str, ...] = PLACES) -> Iterator[list[int]]:
    """Count lines that run in the files of `places`; raise KeyboardInterrupt before line `stop`, once."""
    count = [0]

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if not any(place in frame.f_code.co_filename for place in places):
            return None
        if event == "line":
            count[0] += 1
            if count[0] == stop:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def interrupted(
    do: Callable[[], object], number: int, places: tuple[str, ...] = PLACES, first: int = 1
) -> Iterator[BaseException | None]:
    """Do it again and again, each time interrupted before another of its lines; yields after each.

    Args:
        number: of places, spread evenly over all lines that `do` runs, from line `first` on; 0: every line.
    """
    with counting(None, places) as lines:
        do()
    step = max(1, lines[0] // number) if number else 1
    for stop in range(first, lines[0] + 1, step):
        try:
            with counting(stop, places):
                do()
        except KeyboardInterrupt as error:
            yield error
        else:
            yield None
