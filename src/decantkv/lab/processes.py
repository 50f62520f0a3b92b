"""Processes that work for another one: what they inherit, and their end when it is gone."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that start inside the block; libraries read them once, at start."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def end_with_parent() -> None:
    """Have this process end when its parent is gone, however it went.

    Raises:
        RuntimeError: it was not started by another process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        raise RuntimeError("workers: expected to be started by another process, got none")

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
