"""CAOTE: KV Cache Selection for LLMs via Attention Output Error-Based Token Eviction (arXiv 2504.14051)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decantkv import scoring
from decantkv.base.options import Impl, Need, expect_choice
from decantkv.methods.base import Kind, Method
from decantkv.scoring import streams
from decantkv.scoring.window import AttentionWindow


@dataclass(frozen=True)
class CAOTE(Method):
    """Turn a base policy's scores into a distribution α and keep the tokens whose loss α/(1−α)·‖a−v‖ is largest.

    The closed form is that of DropKV's single token; there is one distribution per KV head instead of one per row.

    Attributes:
        base: method whose scores become α: "tova" (the last query, mean over the group), "snapkv" (the window's sum) or
            "h2o" (every query's).
    """

    name: ClassVar[str] = "caote"
    kind: ClassVar[Kind] = "exact singleton"
    source: ClassVar[str] = "arXiv 2504.14051"
    formula: ClassVar[str] = "α/(1−α)·‖Σαv−v‖, α ∝ the base's score"
    cost: ClassVar[str] = "2·g·d + 2·d"
    presets: ClassVar = {"paper": {}, "shared": {"window": 8, "pool": "max", "kernel_size": 11}}

    window: int = 1
    base: str = "tova"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_choice("CAOTE.base", self.base, ("tova", "snapkv", "h2o"))

    @classmethod
    def least_window(cls) -> int:
        """One query row."""
        return 1

    @property
    def needs(self) -> frozenset[Need]:
        """Return the needs of the base method."""
        return frozenset({"queries"}) if self.base == "h2o" else frozenset()

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: the shift of Σ αv when a key is removed."""
        if self.base == "h2o":
            weights = streams.column_mass(win, self._expect_need(win, "queries"), impl=impl)
        else:
            weights = scoring.compute("attention_mass", win.last(1) if self.base == "tova" else win, impl=impl)
        return streams.weighted_cost(win, weights)
