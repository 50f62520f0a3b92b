"""Moved to `decantkv.cache.report`."""

from decantkv.base.moved import moved

__getattr__ = moved("decantkv.records", "decantkv.cache.report")
