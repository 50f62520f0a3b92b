"""The tests; `tests.tiny` is where scripts from before tests/support look for the small random models."""

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "tiny":
        return importlib.import_module("tests.support.tiny")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
