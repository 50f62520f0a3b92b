"""CriticalKV: Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective (2502.03805)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decantkv import scoring
from decantkv.base.options import Impl, Need, Quantity, expect_choice, expect_fraction
from decantkv.methods.base import Kind
from decantkv.methods.snapkv import SnapKV
from decantkv.scoring.window import AttentionWindow
from decantkv.selection.topk import bounded, keep_highest

_BASES: dict[str, Quantity] = {"snapkv": "attention_mass", "dropkv": "perturbation"}


@dataclass(frozen=True)
class CriticalKV(SnapKV):
    """Keep the largest score × ‖W_O v‖₁, a bound on the output's shift; half of the budget goes by the score alone.

    Attributes:
        base: method of the score: "snapkv", as published, or "dropkv". The score is pooled before the bound.
        first_stage: share of the budget, always-kept tokens included, that the base score alone decides.
        epsilon: added to the mean weight over the window, so that a large value is not lost behind a weight of 0.
    """

    name: ClassVar[str] = "criticalkv"
    kind: ClassVar[Kind] = "upper bound"
    source: ClassVar[str] = "arXiv 2502.03805"
    formula: ClassVar[str] = "(mean_i p + 1e-4)·‖W_O v‖₁, half by Σ_i p"
    cost: ClassVar[str] = "2·g·w·d + g·d·E"
    presets: ClassVar = SnapKV.presets

    base: str = "snapkv"
    first_stage: float = 0.5
    epsilon: float = 1e-4

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_choice("CriticalKV.base", self.base, _BASES)
        expect_fraction("CriticalKV.first_stage", self.first_stage)
        expect_fraction("CriticalKV.epsilon", self.epsilon)

    @property
    def needs(self) -> frozenset[Need]:
        """The attention's output projection."""
        return frozenset({"W_O"})

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: the second stage's bound, of the unpooled base score."""
        norm = self._projected_norm(win)
        return (self.base_score(win, impl=impl) + self.epsilon * win.window) * norm

    def base_score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """Return [B, H, N] float32: the score that the first stage ranks by and the second multiplies."""
        return scoring.compute(_BASES[self.base], win, impl=impl, reduce=self.reduce)

    def rank(self, pooled: Tensor, win: AttentionWindow, n_keep: Sequence[int]) -> Tensor:
        """Return priorities: the first stage's choice first, then all others by the bound."""
        norm = self._projected_norm(win)
        norm = norm if pooled.shape[1] == norm.shape[1] else norm.mean(1, keepdim=True)
        bound = (pooled + self.epsilon * win.window) * norm
        counts = torch.tensor([int(n * self.first_stage) for n in n_keep], device=pooled.device)
        return keep_highest(bounded(bound), by=pooled, counts=counts[:, None].expand(pooled.shape[:2]))
