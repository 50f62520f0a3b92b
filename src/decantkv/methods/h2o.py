"""H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models (arXiv 2306.14048)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decantkv.base.options import Impl, Need, expect_fraction
from decantkv.methods.base import Kind, Method
from decantkv.scoring import streams
from decantkv.scoring.window import AttentionWindow


@dataclass(frozen=True)
class H2O(Method):
    """Keep the tokens to which all queries of the prompt attend most (heavy hitters), and the recent tokens.

    It evicts once, after the prompt; the original also evicts while decoding. It costs as much as the prompt's
    attention.

    Attributes:
        recent: share of the budget that goes to the last tokens; the authors split it evenly.
    """

    name: ClassVar[str] = "h2o"
    kind: ClassVar[Kind] = "heuristic"
    source: ClassVar[str] = "arXiv 2306.14048"
    formula: ClassVar[str] = "Σ over all queries of p"
    cost: ClassVar[str] = "2·g·N·d"
    presets: ClassVar = {"paper": {}, "shared": {"window": 8, "recent": 0.0, "pool": "max", "kernel_size": 11}}
    by_window: ClassVar[bool] = False

    recent: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_fraction("H2O.recent", self.recent)

    @property
    def needs(self) -> frozenset[Need]:
        """Every query of the prompt."""
        return frozenset({"queries"})

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: attention mass over the whole prompt, mean over the group."""
        return streams.column_mass(win, self._expect_need(win, "queries"), impl=impl)

    def tail(self, n_keep: int, fixed: int) -> int:
        """Return how many last tokens are always kept: the `recent` share of the budget beyond the fixed ones."""
        return int((n_keep - fixed) * self.recent)

    @property
    def keeps(self) -> str:
        """What is kept whatever its score."""
        recent = f"last {self.recent:.0%} of the budget"
        return recent if self.window == 0 else super().keeps
