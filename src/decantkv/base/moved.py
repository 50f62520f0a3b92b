"""Old import paths that work for one release, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def moved(old: str, new: str) -> Callable[[str], Any]:
    """Return a module's `__getattr__` that takes every name from the module `new` and warns that `old` moved there."""

    def getattribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warnings.warn(f"{old} has moved to {new} and goes with the next release", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(new), name)

    return getattribute
