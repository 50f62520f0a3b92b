"""Moved to `decantkv.lab.eval.lm_eval`."""

from decantkv.base.moved import moved

__getattr__ = moved("decantkv.eval.lm_eval", "decantkv.lab.eval.lm_eval")
