"""DropKV: Decoupling Residual-Output Perturbation for Near-Optimal KV-Cache Eviction (2026), §3; its single-query
form appeared earlier in CAOTE (arXiv 2504.14051)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from torch import Tensor

from decantkv import scoring
from decantkv.base.options import Impl, Need, Pool, Reduce, expect_choice
from decantkv.methods.base import Kind, Method
from decantkv.scoring.units import BEHIND_PROJECTION
from decantkv.scoring.window import AttentionWindow

Weigh = Literal["value", "output", "head", "block", "stream"]


@dataclass(frozen=True)
class DropKV(Method):
    """Keep the tokens whose removal alone would move the attention output most.

    s_j = (1/g) Σ_i [ p_ij/(1 − p_ij) · ‖a_i − v_j‖ ]², exact for one token (Lemma 1), summed over the window's rows.

    Attributes:
        reduce: "sum" over the window with the mean over the group, as published; "max" over both.
        weigh: the unit of a shift Δ = p/(1−p)·(a − v). "value": ‖Δ‖², as published; "output": ‖W_O Δ‖², the shift of
            the layer's output; "head": ‖Δ‖²/‖a‖²; "block": ‖W_O Δ‖²/‖W_O a‖², where W_O a sums all heads; "stream":
            ‖W_O Δ‖² over the squared norm of the residual stream before the block.
    """

    name: ClassVar[str] = "dropkv"
    kind: ClassVar[Kind] = "exact singleton"
    source: ClassVar[str] = "DropKV (2026)"
    formula: ClassVar[str] = "Σ_i [p/(1−p)·‖a−v‖]²"
    cost: ClassVar[str] = "4·g·w·d"
    presets: ClassVar = {
        "paper": {},
        "shared": {},
        "authors-cache": {"pool": "avg"},
        "kvpress-pr": {"window": 32, "pool": "avg", "kernel_size": 7},
        "rehearsed": {"pool": "none", "sinks": 4, "weigh": "block"},
    }

    window: int = 8
    pool: Pool = "max"
    kernel_size: int = 11
    reduce: Reduce = "sum"
    weigh: Weigh = "value"

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_choice(f"{type(self).__name__}.reduce", self.reduce, get_args(Reduce))
        expect_choice(f"{type(self).__name__}.weigh", self.weigh, get_args(Weigh))

    @classmethod
    def least_window(cls) -> int:
        """One query row."""
        return 1

    @property
    def needs(self) -> frozenset[Need]:
        """Return "W_O" if the shift is measured after the output projection, and "stream" if that is the unit."""
        behind: frozenset[Need] = frozenset({"W_O"}) if self.weigh in BEHIND_PROJECTION else frozenset()
        return behind | {"stream"} if self.weigh == "stream" else behind

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: the mean squared shift of the output when a key is removed."""
        if self.weigh == "value":
            return scoring.compute("perturbation", win, impl=impl, reduce=self.reduce)
        for need in sorted(self.needs):
            self._expect_need(win, need)
        return scoring.compute("perturbation", win, impl=impl, reduce=self.reduce, weigh=self.weigh)


@dataclass(frozen=True)
class AdaDropKV(DropKV):
    """DropKV's scores with AdaKV's head budgets: heads compete for one budget per layer."""

    name: ClassVar[str] = "adadropkv"
    allocation: ClassVar[str] = "ada"
