"""Load code of others: entry points of installed packages, and classes in a user's file."""

from __future__ import annotations

import functools
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path
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


@functools.cache
def from_file(argument: str, path: str, name: str) -> Any:
    """Return what a Python file calls `name`; the file runs once per process.

    Args:
        argument: whose value named the file, for errors.

    Raises:
        ValueError: no such file or name in it, or the file fails.
    """
    if not Path(path).is_file():
        raise ValueError(f"{argument}: expected a Python file, got {path}, which is none")
    module_name = f"decantkv_user_file.{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{argument}: expected a Python file, got {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # where dataclasses look names up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{argument}: expected {path} to load, got {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise ValueError(f"{argument}: expected a class of {path}, got {name!r}, which it does not define")
    return getattr(module, name)
