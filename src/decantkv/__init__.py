"""decantkv: keep the few cached tokens that matter. Importing it patches nothing and loads no model library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from decantkv.api import score
from decantkv.methods import DropKV, KNorm, Method, Random, Recent, Sliding, SnapKV, Streaming
from decantkv.selection import Kept, select

if TYPE_CHECKING:
    from decantkv.cache import EvictingCache
    from decantkv.integration import Run, attach

__version__ = "0.1.0"

__all__ = [
    "DropKV",
    "EvictingCache",
    "KNorm",
    "Kept",
    "Method",
    "Random",
    "Recent",
    "Run",
    "Sliding",
    "SnapKV",
    "Streaming",
    "attach",
    "score",
    "select",
]

_NEEDS_TRANSFORMERS = {"EvictingCache": "cache", "Run": "integration", "attach": "integration"}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TRANSFORMERS:
        return getattr(importlib.import_module(f"decantkv.{_NEEDS_TRANSFORMERS[name]}"), name)
    raise AttributeError(f"module 'decantkv' has no attribute {name!r}")
