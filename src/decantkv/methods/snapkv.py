"""SnapKV: LLM Knows What You are Looking for Before Generation (arXiv 2404.14469), and budgets built upon it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from torch import Tensor

from decantkv import scoring
from decantkv.base.options import Impl, Pool, PoolScope, Reduce, expect_choice
from decantkv.methods.base import Kind, Method
from decantkv.scoring.window import AttentionWindow


@dataclass(frozen=True)
class SnapKV(Method):
    """Keep the tokens to which the window's queries attend most, pooled over the keys before the window.

    Attributes:
        reduce: "sum" over the window with the mean over the group, as published; "max" over both, which is KVzip's
            score (arXiv 2505.23416) where the queries are those of a replay.
    """

    name: ClassVar[str] = "snapkv"
    kind: ClassVar[Kind] = "heuristic"
    source: ClassVar[str] = "arXiv 2404.14469"
    formula: ClassVar[str] = "Σ_i p"
    cost: ClassVar[str] = "2·g·w·d"
    presets: ClassVar = {
        "paper": {},
        "kvpress": {"window": 64, "pool": "avg", "kernel_size": 5},
        "kvcache-factory": {"window": 8},
        "rehearsed": {"window": 8, "pool": "none", "sinks": 4, "reduce": "max"},
        "shared": {"window": 8, "pool": "max", "kernel_size": 11, "pool_scope": "all"},
        "kvzip": {"window": 8, "pool": "none", "kernel_size": 1, "sinks": 4, "reduce": "max"},
    }

    window: int = 32
    pool: Pool = "max"
    kernel_size: int = 7
    pool_scope: PoolScope = "prefix"
    reduce: Reduce = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_choice(f"{type(self).__name__}.reduce", self.reduce, get_args(Reduce))

    @classmethod
    def least_window(cls) -> int:
        """One query row."""
        return 1

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: attention mass, reduced over the window and the group."""
        return scoring.compute("attention_mass", win, impl=impl, reduce=self.reduce)


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """PyramidKV (arXiv 2406.02069): SnapKV's scores; lower layers get larger budgets, falling linearly."""

    name: ClassVar[str] = "pyramidkv"
    source: ClassVar[str] = "arXiv 2406.02069"
    allocation: ClassVar[str] = "pyramid"

    window: int = 8


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """Ada-KV (arXiv 2407.11550): SnapKV's scores; the heads of a layer compete for one budget."""

    name: ClassVar[str] = "adakv"
    source: ClassVar[str] = "arXiv 2407.11550"
    allocation: ClassVar[str] = "ada"
