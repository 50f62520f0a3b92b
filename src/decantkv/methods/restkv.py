"""ReST-KV: Robust KV Cache Eviction with Layer-wise Output Reconstruction and Spatial-Temporal Smoothing
(arXiv 2605.08840)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from decantkv import scoring
from decantkv.base.options import Impl, Need, Pool, expect_fraction
from decantkv.methods.base import Kind, Method
from decantkv.scoring.window import AttentionWindow


@dataclass(frozen=True)
class ReSTKV(Method):
    """Keep the tokens whose removal would move the layer's output most, the newest queries counting most.

    s_j = mean over the group of Σ_i e_i · p_ij/(1 − p_ij) · ‖W_O(a_i − v_j)‖, e an exponential average over the
    window. Scores are then averaged over neighbours. The authors widen that average, and shift it, where the highest
    tokens of the window's halves lie far apart; below 6,000 tokens apart their width is the 5 that is used here
    throughout.

    Attributes:
        alpha: weight of the newest query in the exponential average; every step back keeps 1 − alpha of it.
    """

    name: ClassVar[str] = "rest-kv"
    kind: ClassVar[Kind] = "exact singleton"
    source: ClassVar[str] = "arXiv 2605.08840"
    formula: ClassVar[str] = "Σ_i e_i·p/(1−p)·‖W_O(a−v)‖"
    cost: ClassVar[str] = "4·g·w·d + g·d²"
    presets: ClassVar = {"paper": {}, "shared": {"window": 8, "pool": "max", "kernel_size": 11}}

    window: int = 32
    pool: Pool = "avg"
    kernel_size: int = 5
    alpha: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_fraction("ReSTKV.alpha", self.alpha)

    @classmethod
    def least_window(cls) -> int:
        """One query row."""
        return 1

    @property
    def needs(self) -> frozenset[Need]:
        """The attention's output projection."""
        return frozenset({"W_O"})

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: the averaged shift of the layer's output, mean over the group."""
        self._expect_need(win, "W_O")
        back = torch.arange(win.window - 1, -1, -1, device=win.k.device, dtype=torch.float32)
        average = (1 - self.alpha) ** back
        average[1:] *= self.alpha  # the oldest query is where the average starts
        weights = average.expand(win.batch, 1, -1) if win.row_weights is None else average * win.row_weights
        weighted = replace(win, row_weights=weights)
        return scoring.compute("perturbation", weighted, impl=impl, weigh="output", power=1)
