"""Entry points: what other packages register for this one."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import Any


@functools.cache
def plugins(group: str) -> tuple[Any, ...]:
    """Return the objects that installed packages register under an entry-point group; each is loaded once.

    Raises:
        ValueError: one cannot be loaded.
    """
    found = []
    for entry in entry_points(group=group):
        try:
            found.append(entry.load())
        except Exception as error:
            raise ValueError(
                f"{group}: expected {entry.value!r} to load, got {type(error).__name__}: {error}"
            ) from error
    return tuple(found)
