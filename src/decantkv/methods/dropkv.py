"""DropKV: Decoupling Residual-Output Perturbation for Near-Optimal KV-Cache Eviction (2026), §3; its single-query
form appeared earlier in CAOTE (arXiv 2504.14051)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from torch import Tensor

from decantkv import scoring
from decantkv.methods.base import Kind, Method
from decantkv.options import Impl, Pool, Reduce, expect_choice
from decantkv.scoring.window import AttentionWindow


@dataclass(frozen=True)
class DropKV(Method):
    """Keep the tokens whose removal alone would move the attention output most.

    s_j = (1/g) Σ_i [ p_ij/(1 − p_ij) · ‖a_i − v_j‖ ]², exact for one token (Lemma 1), summed over the window's rows.

    Attributes:
        reduce: "sum" over the window with the mean over the group, as published; "max" over both.
    """

    name: ClassVar[str] = "dropkv"
    kind: ClassVar[Kind] = "exact singleton"
    source: ClassVar[str] = "DropKV (2026)"
    formula: ClassVar[str] = "Σ_i [p/(1−p)·‖a−v‖]²"
    presets: ClassVar = {
        "paper": {},
        "authors-cache": {"pool": "avg"},
        "kvpress-pr": {"window": 32, "pool": "avg", "kernel_size": 7},
    }

    window: int = 8
    pool: Pool = "max"
    kernel_size: int = 11
    reduce: Reduce = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_choice("DropKV.reduce", self.reduce, get_args(Reduce))

    @classmethod
    def least_window(cls) -> int:
        """One query row."""
        return 1

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: the mean squared shift of the output when a key is removed."""
        return scoring.compute("perturbation", win, impl=impl, reduce=self.reduce)
