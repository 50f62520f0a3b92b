"""Moved to `decantkv.hf.loading`."""

from decantkv.base.moved import moved

__getattr__ = moved("decantkv.models", "decantkv.hf.loading")
