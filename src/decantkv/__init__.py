"""decantkv: keep the few cached tokens that matter. Importing it patches nothing; names load when they are used."""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decantkv.api import score
    from decantkv.attachment import Run, attach
    from decantkv.base.chat import Chat
    from decantkv.cache.chunked_reading import deferred
    from decantkv.cache.documents import Document, condense
    from decantkv.cache.evicting_cache import EvictingCache, cache_argument
    from decantkv.cache.report import Memory, Report
    from decantkv.hf.attention_hook import UnsupportedModelError
    from decantkv.methods import (
        CAOTE,
        H2O,
        TOVA,
        AdaDropKV,
        AdaKV,
        AnDPro,
        AnDProChunks,
        Compactor,
        CriticalKV,
        DefensiveKV,
        DropKV,
        ExpectedAttention,
        KeyDiff,
        KNorm,
        Method,
        PyramidKV,
        Random,
        Recent,
        ReSTKV,
        Sliding,
        SnapKV,
        Streaming,
        register_method,
    )
    from decantkv.scoring.rehearsal import Rehearsal
    from decantkv.scoring.window import AttentionWindow
    from decantkv.selection.allocation import Ada, AdaKvpress, AllocationRule, Global, Pyramid, register_allocation
    from decantkv.selection.budget import Budget
    from decantkv.selection.selector import Kept, select

__version__ = "0.1.0"

__all__ = [
    "CAOTE",
    "H2O",
    "TOVA",
    "Ada",
    "AdaDropKV",
    "AdaKV",
    "AdaKvpress",
    "AllocationRule",
    "AnDPro",
    "AnDProChunks",
    "AttentionWindow",
    "Budget",
    "Chat",
    "Compactor",
    "CriticalKV",
    "DefensiveKV",
    "Document",
    "DropKV",
    "EvictingCache",
    "ExpectedAttention",
    "Global",
    "KNorm",
    "Kept",
    "KeyDiff",
    "Memory",
    "Method",
    "Pyramid",
    "PyramidKV",
    "Random",
    "ReSTKV",
    "Recent",
    "Rehearsal",
    "Report",
    "Run",
    "Sliding",
    "SnapKV",
    "Streaming",
    "UnsupportedModelError",
    "attach",
    "cache_argument",
    "condense",
    "deferred",
    "register_allocation",
    "register_method",
    "score",
    "select",
]

_HOME = {
    **dict.fromkeys(
        ("Ada", "AdaKvpress", "AllocationRule", "Global", "Pyramid", "register_allocation"), "selection.allocation"
    ),
    **dict.fromkeys(("EvictingCache", "cache_argument"), "cache.evicting_cache"),
    **dict.fromkeys(("Run", "attach"), "attachment"),
    **dict.fromkeys(("Document", "condense"), "cache.documents"),
    **dict.fromkeys(("Kept", "select"), "selection.selector"),
    **dict.fromkeys(("Memory", "Report"), "cache.report"),
    "AttentionWindow": "scoring.window",
    "Rehearsal": "scoring.rehearsal",
    "Budget": "selection.budget",
    "Chat": "base.chat",
    "UnsupportedModelError": "hf.attention_hook",
    "deferred": "cache.chunked_reading",
    "score": "api",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        found = getattr(importlib.import_module(f"decantkv.{_HOME.get(name, 'methods')}"), name)
        globals()[name] = found
        return found
    if not name.startswith("_") and importlib.util.find_spec(f"decantkv.{name}") is not None:
        return importlib.import_module(f"decantkv.{name}")
    raise AttributeError(f"module 'decantkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
