"""Supported versions of other packages. This module imports none of them."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:
    import torch

PYTHON = "3.11"  # and later
TORCH = "2.11"  # and later
TRITON = "3.6"  # and later
OLDEST, BEYOND = "4.56", "6"  # transformers versions that were tried: from OLDEST on, below BEYOND
CAPABILITY = (8, 0)  # of a CUDA device, for the kernels


def at_least(version: str, oldest: str) -> bool:
    """Return whether a version is `oldest` or later; a development build counts as its release."""
    return Version(Version(version).base_version) >= Version(oldest)


def installed(package: str) -> str | None:
    """Return a package's installed version, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def transformers_fits(version: str) -> bool:
    """Return whether a version of transformers lies in the tested range."""
    return at_least(version, OLDEST) and not at_least(version, BEYOND)


@functools.cache
def kernels_run_on(device: torch.device) -> bool:
    """Return whether the Triton kernels can run: the device is CUDA and triton is installed."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def kernels_on(device: torch.device, name: str) -> Any:
    """Return a module of the kernels, such as "decode", or None if kernels cannot run here."""
    return importlib.import_module(f"decantkv.kernels.{name}") if kernels_run_on(device) else None
