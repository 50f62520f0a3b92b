"""Wrapping a method of vLLM's, once in a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MARK = "_decantkv_wrapped"


def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `around(method)` in the place of `owner`'s method; a second call for the same place does nothing."""
    original = getattr(owner, name)
    if getattr(original, MARK, False):
        return
    wrapper = functools.wraps(original)(around(original))
    setattr(wrapper, MARK, True)
    setattr(owner, name, wrapper)
