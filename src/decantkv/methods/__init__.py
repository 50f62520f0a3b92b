"""The registry of methods. A built-in method is one file and one line here; others are added by `register_method`."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import fields
from typing import Any, TypeVar

from decantkv.base.options import RUN_OPTIONS
from decantkv.base.plugins import from_file, plugins
from decantkv.methods.andpro import AnDPro, AnDProChunks
from decantkv.methods.base import Method
from decantkv.methods.caote import CAOTE
from decantkv.methods.compactor import Compactor
from decantkv.methods.critical import CriticalKV
from decantkv.methods.defensive import DefensiveKV
from decantkv.methods.dropkv import AdaDropKV, DropKV
from decantkv.methods.expected import ExpectedAttention
from decantkv.methods.h2o import H2O
from decantkv.methods.keydiff import KeyDiff
from decantkv.methods.knorm import KNorm
from decantkv.methods.position import Random, Recent, Sliding, Streaming
from decantkv.methods.restkv import ReSTKV
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
    ReSTKV,
    ExpectedAttention,
    Compactor,
    H2O,
    TOVA,
    KNorm,
    KeyDiff,
    Streaming,
    Sliding,
    Recent,
    Random,
)
METHODS: dict[str, type[Method]] = {cls.name: cls for cls in _REGISTERED}
GROUP = "decantkv.methods"  # the entry-point group by which other packages add methods
Added = TypeVar("Added", bound=type[Method])

__all__ = [
    "CAOTE",
    "H2O",
    "METHODS",
    "TOVA",
    "AdaDropKV",
    "AdaKV",
    "AnDPro",
    "AnDProChunks",
    "Compactor",
    "CriticalKV",
    "DefensiveKV",
    "DropKV",
    "ExpectedAttention",
    "KNorm",
    "KeyDiff",
    "Method",
    "PyramidKV",
    "Random",
    "ReSTKV",
    "Recent",
    "Sliding",
    "SnapKV",
    "Streaming",
    "known_methods",
    "register_method",
    "resolve",
]


def register_method(cls: Added) -> Added:
    """Make a method known by its name in this process, and return it; a decorator.

    From then on the name works in `attach`, on the command line, in saved files and in `decantkv eval`. A package
    whose entry points name the class in the group "decantkv.methods" need not call this.

    Raises:
        TypeError: no frozen dataclass that derives from `Method` and defines `score`, `name`, `kind`, `source` and
            `formula`.
        ValueError: another method has the name.
    """
    if not (isinstance(cls, type) and issubclass(cls, Method)):
        raise TypeError(f"method: expected a class that derives from decantkv.Method, got {cls!r}")
    if inspect.isabstract(cls):
        raise TypeError(f"method: expected {cls.__name__} to define score(win, *, impl), got none")
    if missing := [name for name in ("name", "kind", "source", "formula") if not hasattr(cls, name)]:
        raise TypeError(f"method: expected {cls.__name__}.{missing[0]}, a class attribute, got none")
    parameters = vars(cls).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise TypeError(f"method: expected {cls.__name__} to be a frozen dataclass (@dataclass(frozen=True))")
    there = METHODS.get(cls.name)
    # a notebook's cell that runs again defines the same class anew
    if there is not None and (there.__module__, there.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"method: expected a name that is free, got {cls.name!r}, which is {there.__qualname__}")
    METHODS[cls.name] = cls
    return cls


def known_methods() -> dict[str, type[Method]]:
    """Return every method by its name: built-in ones, registered ones, and those of installed packages."""
    for cls in plugins(GROUP):
        register_method(cls)
    return METHODS


def resolve(method: str | Method, **options: Any) -> Method:
    """Return the method of a name, of "name:preset" or of "file.py:Class"; an instance is returned as it is.

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
    path, of_file, name = method.rpartition(".py:")
    name, _, preset = name.partition(":")
    if of_file:
        name = register_method(from_file("method", f"{path}.py", name)).name
    methods = METHODS if name in METHODS else known_methods()
    if name not in methods:
        close = difflib.get_close_matches(name.lower(), methods, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"method: expected one of {', '.join(sorted(methods))}, got {name!r}{hint}")
    cls = methods[name]
    known = [f.name for f in fields(cls)]
    if unknown := sorted(set(options) - set(known)):
        close = difflib.get_close_matches(unknown[0], (*known, *RUN_OPTIONS), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(
            f"{unknown[0]}: expected one of {name}'s options {', '.join(known)}, got an unknown option{hint}"
        )
    return cls.preset(preset, **options) if preset else cls(**options)
