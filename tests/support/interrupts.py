"""Interrupts between two lines of Python, as a signal's handler raises them, each at a place of one's choice."""

from __future__ import annotations

import functools
import linecache
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


@functools.cache
def _of_with(file: str, line: int) -> bool:
    return linecache.getline(file, line).lstrip().startswith(("with ", "async with "))


@contextmanager
def counting(stop: int | None, places: tuple[str, ...] = PLACES) -> Iterator[list[int]]:
    """Count lines that run in the files of `places`; raise KeyboardInterrupt before line `stop`, once.

    A `with` line is passed over: Python comes back to it when its block ends, and an error there would skip the exit,
    which no signal's handler can.
    """
    count = [0]

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if not any(place in frame.f_code.co_filename for place in places):
            return None
        if event == "line" and not _of_with(frame.f_code.co_filename, frame.f_lineno):
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
    do: Callable[[], object], number: int, places: tuple[str, ...] = PLACES, *, keep: bool = False
) -> Iterator[bool]:
    """Do it again and again, each time interrupted before another of its lines; yields whether it was, after each.

    An interrupt inside a finalizer goes no further.

    Args:
        number: of lines to interrupt it before, spread evenly over all that `do` runs.
        keep: leave the traceback where a notebook keeps it, and with it every frame.
    """
    with counting(None, places) as lines:
        do()
    for stop in range(1, lines[0] + 1, max(1, lines[0] // number)):
        stopped = False
        try:
            with counting(stop, places):
                do()
        except KeyboardInterrupt as error:
            stopped = True
            if keep:
                sys.last_traceback = error.__traceback__
        yield stopped
        if keep:
            sys.last_traceback = None
