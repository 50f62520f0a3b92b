"""What other packages register under this package's entry-point groups."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import Any


@functools.cache
def plugins(group: str) -> tuple[Any, ...]:
    """Return what the installed packages' entry points of a group name, each loaded once.

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
