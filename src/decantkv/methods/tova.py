"""TOVA: Transformers are Multi-State RNNs (arXiv 2401.06104)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decantkv import scoring
from decantkv.base.options import Impl
from decantkv.methods.base import Kind, Method
from decantkv.scoring.window import AttentionWindow


@dataclass(frozen=True)
class TOVA(Method):
    """Keep the tokens to which the last query attends most, on average over all heads: one set for all heads."""

    name: ClassVar[str] = "tova"
    kind: ClassVar[Kind] = "heuristic"
    source: ClassVar[str] = "arXiv 2401.06104"
    formula: ClassVar[str] = "p of the last query, mean over heads"
    cost: ClassVar[str] = "2·g·d"
    presets: ClassVar = {"paper": {}, "shared": {"window": 8, "pool": "max", "kernel_size": 11}}
    shared_by_heads: ClassVar[bool] = True

    window: int = 1

    @classmethod
    def least_window(cls) -> int:
        """One query row."""
        return 1

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: the last query's weights, the same for every head."""
        mass = scoring.compute("attention_mass", win.last(1), impl=impl)
        return mass.mean(1, keepdim=True).expand_as(mass)
