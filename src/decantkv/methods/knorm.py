"""KNorm: A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression (arXiv 2406.11430)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decantkv.base.options import Impl
from decantkv.methods.base import Kind, Method
from decantkv.scoring.window import AttentionWindow


@dataclass(frozen=True)
class KNorm(Method):
    """Keep the tokens with the smallest key norms, which tend to attract attention. Looks at no query."""

    name: ClassVar[str] = "knorm"
    kind: ClassVar[Kind] = "heuristic"
    source: ClassVar[str] = "arXiv 2406.11430"
    formula: ClassVar[str] = "−‖k‖"
    cost: ClassVar[str] = "d"
    presets: ClassVar = {"paper": {}, "shared": {"window": 8}}
    by_window: ClassVar[bool] = False

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: −‖k_j‖, accumulated in float32 because bf16 norms mostly tie."""
        norm: Tensor = torch.linalg.vector_norm(win.k.to(torch.promote_types(win.k.dtype, torch.float32)), dim=-1)
        return -norm.float()
