"""Wrap a method of vLLM, once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MARK = "_decantkv_wrapped"


def wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of `owner` by `around(method)`; a second call for the same method does nothing."""
    original = getattr(owner, name)
    if getattr(original, MARK, False):
        return
    wrapper = functools.wraps(original)(around(original))
    setattr(wrapper, MARK, True)
    setattr(owner, name, wrapper)
