"""Fixtures: the demo model, where `make test` put it."""

from __future__ import annotations

import functools
import os
import zlib
from importlib import metadata
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches a hub; said before anything asks

import pytest
import torch
from packaging.version import Version

MODEL = os.environ.get("DECANTKV_TEST_MODEL")
HALF = os.environ.get("DECANTKV_INTERPRETER_HALF")
INTERPRETER = Version("3.9")


def _half(item):
    return zlib.crc32(item.nodeid.encode()) % 2


@functools.cache
def interprets():
    try:
        return Version(metadata.version("triton")) >= INTERPRETER
    except metadata.PackageNotFoundError:
        return False


def pytest_collection_modifyitems(config, items):
    if HALF:  # of what is slow in the interpreter, the other half comes the next day
        today = [item for item in items if item.get_closest_marker("interpreter") is None or _half(item) == int(HALF)]
        config.hook.pytest_deselected(items=[item for item in items if item not in set(today)])
        items[:] = today
    gone = not MODEL or not Path(MODEL).exists()
    for item in items:
        if item.get_closest_marker("interpreter") and not interprets():
            item.add_marker(pytest.mark.skip(reason=f"Triton before {INTERPRETER} fails at interpreting"))
        if gone and item.get_closest_marker("model"):
            item.add_marker(pytest.mark.skip(reason="DECANTKV_TEST_MODEL names no model file; `make test` sets it"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def model_path():
    return MODEL


@pytest.fixture(scope="session")
def demo_model(model_path):
    from decantkv.hf.loading import load

    return load(model_path)


@pytest.fixture
def tape(monkeypatch):
    from tests.support.tape import capture_on_tapes

    return capture_on_tapes(monkeypatch)
