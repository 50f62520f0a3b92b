"""decantkv: keep the few cached tokens that matter. Importing it patches nothing and loads no model library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from decantkv.allocation import Ada, AdaKvpress, Pyramid
from decantkv.api import score
from decantkv.methods import (
    CAOTE,
    H2O,
    TOVA,
    AdaDropKV,
    AdaKV,
    AnDPro,
    AnDProChunks,
    CriticalKV,
    DefensiveKV,
    DropKV,
    ExpectedAttention,
    KNorm,
    Method,
    PyramidKV,
    Random,
    Recent,
    Sliding,
    SnapKV,
    Streaming,
)
from decantkv.selection import Kept, select

if TYPE_CHECKING:
    from decantkv.cache import EvictingCache, cache_argument
    from decantkv.integration import Run, attach

__version__ = "0.1.0"

__all__ = [
    "CAOTE",
    "H2O",
    "TOVA",
    "Ada",
    "AdaDropKV",
    "AdaKV",
    "AdaKvpress",
    "AnDPro",
    "AnDProChunks",
    "CriticalKV",
    "DefensiveKV",
    "DropKV",
    "EvictingCache",
    "ExpectedAttention",
    "KNorm",
    "Kept",
    "Method",
    "Pyramid",
    "PyramidKV",
    "Random",
    "Recent",
    "Run",
    "Sliding",
    "SnapKV",
    "Streaming",
    "attach",
    "cache_argument",
    "score",
    "select",
]

_NEEDS_TRANSFORMERS = {
    "EvictingCache": "cache",
    "cache_argument": "cache",
    "Run": "integration",
    "attach": "integration",
}


def __getattr__(name: str) -> Any:
    if name in _NEEDS_TRANSFORMERS:
        return getattr(importlib.import_module(f"decantkv.{_NEEDS_TRANSFORMERS[name]}"), name)
    raise AttributeError(f"module 'decantkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
