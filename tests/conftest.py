"""Fixtures: the demo model, where `make test` put it."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test reaches a hub; said before anything asks

import pytest
import torch

MODEL = os.environ.get("DECANTKV_TEST_MODEL")


def pytest_collection_modifyitems(items):
    gone = not MODEL or not Path(MODEL).exists()
    for item in items:
        if gone and item.get_closest_marker("model"):
            item.add_marker(pytest.mark.skip(reason="DECANTKV_TEST_MODEL names no model file; `make test` sets it"))
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="session")
def model_path():
    return MODEL


@pytest.fixture(scope="session")
def demo_model(model_path):
    from decantkv.models import load

    return load(model_path)
