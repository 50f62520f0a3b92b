"""The registry: a method is one file and one line here."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Any

from decantkv.methods.andpro import AnDPro, AnDProChunks
from decantkv.methods.base import Method
from decantkv.methods.caote import CAOTE
from decantkv.methods.critical import CriticalKV
from decantkv.methods.defensive import DefensiveKV
from decantkv.methods.dropkv import AdaDropKV, DropKV
from decantkv.methods.expected import ExpectedAttention
from decantkv.methods.h2o import H2O
from decantkv.methods.knorm import KNorm
from decantkv.methods.position import Random, Recent, Sliding, Streaming
from decantkv.methods.snapkv import AdaKV, PyramidKV, SnapKV
from decantkv.methods.tova import TOVA

_REGISTERED: tuple[type[Method], ...] = (
    DropKV,
    AdaDropKV,
    SnapKV,
    PyramidKV,
    AdaKV,
    CriticalKV,
    CAOTE,
    AnDPro,
    AnDProChunks,
    DefensiveKV,
    ExpectedAttention,
    H2O,
    TOVA,
    KNorm,
    Streaming,
    Sliding,
    Recent,
    Random,
)
METHODS: dict[str, type[Method]] = {cls.name: cls for cls in _REGISTERED}

__all__ = [
    "CAOTE",
    "H2O",
    "METHODS",
    "TOVA",
    "AdaDropKV",
    "AdaKV",
    "AnDPro",
    "AnDProChunks",
    "CriticalKV",
    "DefensiveKV",
    "DropKV",
    "ExpectedAttention",
    "KNorm",
    "Method",
    "PyramidKV",
    "Random",
    "Recent",
    "Sliding",
    "SnapKV",
    "Streaming",
    "resolve",
]


def resolve(method: str | Method, **options: Any) -> Method:
    """A method from its name, "name:preset", or an instance.

    Raises:
        TypeError: neither a name nor a method, or an option the method does not have.
        ValueError: an unknown name or preset, or options beside an instance, which already holds its own.
    """
    if isinstance(method, Method):
        if options:
            raise ValueError(f"method: expected options inside the {type(method).__name__} instance, got {options}")
        return method
    if not isinstance(method, str):
        raise TypeError(f"method: expected a name or a Method instance, got {method!r}")
    name, _, preset = method.partition(":")
    if name not in METHODS:
        close = difflib.get_close_matches(name.lower(), METHODS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"method: expected one of {', '.join(sorted(METHODS))}, got {name!r}{hint}")
    cls = METHODS[name]
    known = [f.name for f in fields(cls)]
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(f"{unknown[0]}: expected one of {name}'s options {', '.join(known)}, got an unknown option")
    return cls.preset(preset, **options) if preset else cls(**options)
