"""DefensiveKV: Taming the Fragility of KV Cache Eviction in LLM Inference (arXiv 2510.13334)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decantkv import scoring
from decantkv.base.options import Impl, Need, expect_fraction, expect_odd
from decantkv.methods.base import Kind, Method
from decantkv.scoring.window import AttentionWindow
from decantkv.selection.topk import bounded, keep_highest


@dataclass(frozen=True)
class DefensiveKV(Method):
    """Guard against the worst case: a token's score is its largest weight over all rows, and at least the mean score.

    s_j = max_i avgpool(p_ij) over the window and the group. First stage: by s, until its share of Σ s is covered or
    the budget is spent. Second: by max(s_j, mean s)·‖W_O v_j‖₁/Σ‖W_O v‖₁.

    Attributes:
        row_kernel_size: odd length of the average pooling along each row, over the keys before the window.
        first_stage: share of the mass of s that the first stage covers.
    """

    name: ClassVar[str] = "defensivekv"
    kind: ClassVar[Kind] = "heuristic"
    source: ClassVar[str] = "arXiv 2510.13334"
    formula: ClassVar[str] = "max(max_i p̄, mean)·‖W_O v‖₁, 90 % of the mass by max_i p̄"
    cost: ClassVar[str] = "2·g·w·d + g·d·E"
    presets: ClassVar = {"paper": {}, "shared": {"window": 8}}

    window: int = 32
    row_kernel_size: int = 5
    first_stage: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_odd("DefensiveKV.row_kernel_size", self.row_kernel_size)
        expect_fraction("DefensiveKV.first_stage", self.first_stage)

    @classmethod
    def least_window(cls) -> int:
        """One query row."""
        return 1

    @property
    def needs(self) -> frozenset[Need]:
        """The attention's output projection."""
        return frozenset({"W_O"})

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: the second stage's score."""
        real = win.droppable(0)[:, None]
        return self._guarded(self.base_score(win, impl=impl), real, win)

    def base_score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: the largest pooled weight over the window's rows."""
        return scoring.compute(
            "attention_mass", win, impl=impl, reduce="max", row_pool="avg", kernel_size=self.row_kernel_size
        )

    def rank(self, pooled: Tensor, win: AttentionWindow, n_keep: Sequence[int]) -> Tensor:
        """Return priorities: always-kept keys and the first stage's first, then all others by the guarded score."""
        free = pooled.isfinite()
        mass = pooled.masked_fill(~free, 0.0)
        falling = mass.sort(-1, descending=True).values.double().cumsum(-1)
        # a key belongs to the first stage while the keys above it do not yet cover the share
        covered = (falling < self.first_stage * falling[..., -1:]).sum(-1) + (falling[..., -1] > 0)
        fixed = (pooled == torch.inf).sum(-1)
        budget = torch.tensor(list(n_keep), device=pooled.device)[:, None]
        counts = torch.minimum(fixed + covered.clamp_max(mass.shape[-1]), budget)
        return keep_highest(bounded(self._guarded(mass, free, win)), by=pooled, counts=counts)

    def _guarded(self, s: Tensor, free: Tensor, win: AttentionWindow) -> Tensor:
        norm = self._projected_norm(win)
        norm = norm if s.shape[1] == norm.shape[1] else norm.mean(1, keepdim=True)
        number = free.sum(-1, keepdim=True).clamp_min(1)
        mean = (s * free).sum(-1, keepdim=True) / number
        total = (norm * free).sum(-1, keepdim=True)
        return torch.maximum(s, mean) * norm / total.where(total > 0, 1.0)
