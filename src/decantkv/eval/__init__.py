"""Moved to `decantkv.lab.eval`."""
