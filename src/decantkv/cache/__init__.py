"""The evicting cache: its layers, the stores that hold kept tokens, files, reports."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decantkv.cache.evicting_cache import EvictingCache, cache_argument, cache_bytes, deferred

__all__ = ["EvictingCache", "cache_argument", "cache_bytes", "deferred"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # on first use: the reports and stores of this room are also imported without the cache
        return getattr(importlib.import_module("decantkv.cache.evicting_cache"), name)
    raise AttributeError(f"module 'decantkv.cache' has no attribute {name!r}")
