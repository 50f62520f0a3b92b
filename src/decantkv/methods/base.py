"""The base class of methods: one score per key, and the authors' settings for selecting by it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, get_args

import torch
from torch import Tensor

from decantkv.base.options import Impl, Need, Pool, PoolScope, expect_choice, expect_int, expect_odd
from decantkv.scoring import streams
from decantkv.scoring.window import AttentionWindow

Kind = Literal["exact singleton", "heuristic", "upper bound", "relaxation", "control"]


@dataclass(frozen=True)
class Method(ABC):
    """A rule that scores cached tokens; higher means costlier to lose. Instances are immutable settings.

    A subclass is one file: its source on the first line, its score, its authors' settings as field defaults, other
    published settings under `presets`. Most methods define `score` alone. One whose choice depends on the budget
    also defines `base_score` and `rank`, or `tail`.

    Attributes:
        allocation: how its authors spread a budget over heads and layers; the user may choose another.
        by_window: its scores come from the window's attention, so that it can reuse its output and denominators.
        cost: multiply-adds per cached token and KV head, g query heads sharing it, w window rows, D = Dv = d.
        window: the last w positions, whose queries score the rest and which are themselves always kept. 0 for
            methods that neither look at queries nor protect a window.
        pool: "max", "avg" or "none": pooling of scores along keys before selection.
        kernel_size: odd length of the pooling kernel, stride 1.
        pool_scope: "all" pools over every key, the window's included; "prefix" over the keys before the window.
        sinks: how many first tokens are always kept.
    """

    name: ClassVar[str]
    kind: ClassVar[Kind]
    source: ClassVar[str]
    formula: ClassVar[str]
    cost: ClassVar[str] = "0"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    shared_by_heads: ClassVar[bool] = False
    allocation: ClassVar[str] = "uniform"
    by_window: ClassVar[bool] = True

    window: int = 0
    pool: Pool = "none"
    kernel_size: int = 1
    pool_scope: PoolScope = "all"
    sinks: int = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Check the class attributes that a subclass sets.

        Raises:
            TypeError, ValueError: an attribute has a wrong type or value.
        """
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        for attribute in ("name", "source", "formula", "cost", "allocation"):
            if not isinstance(own.get(attribute, ""), str):
                raise TypeError(f"{cls.__name__}.{attribute}: expected text, got {own[attribute]!r}")
        for attribute in ("shared_by_heads", "by_window"):
            if not isinstance(own.get(attribute, True), bool):
                raise TypeError(f"{cls.__name__}.{attribute}: expected True or False, got {own[attribute]!r}")
        if "name" in own and not re.fullmatch(r"[a-z][a-z0-9-]*", cls.name):
            raise ValueError(f"{cls.__name__}.name: expected small letters, digits and '-', got {cls.name!r}")
        if "kind" in own:
            expect_choice(f"{cls.__name__}.kind", cls.kind, get_args(Kind))
        if not isinstance(own.get("presets", {}), Mapping):
            raise TypeError(f"{cls.__name__}.presets: expected a mapping of names to options, got {own['presets']!r}")

    def __post_init__(self) -> None:
        where = type(self).__name__
        expect_int(f"{where}.window", self.window, at_least=self.least_window())
        expect_choice(f"{where}.pool", self.pool, get_args(Pool))
        expect_odd(f"{where}.kernel_size", self.kernel_size)
        expect_choice(f"{where}.pool_scope", self.pool_scope, get_args(PoolScope))
        expect_int(f"{where}.sinks", self.sinks, at_least=0)

    @classmethod
    def least_window(cls) -> int:
        """Return the smallest window the method can work with: 1 if it looks at queries."""
        return 0

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """Return the method under published settings, changed by `options`.

        Raises:
            ValueError: the method has no such preset.
        """
        expect_choice("preset", name, cls.presets)
        return cls(**{**cls.presets[name], **options})

    @property
    def needs(self) -> frozenset[Need]:
        """Inputs beyond the window's queries, the keys and the values: "queries", "W_O", "rotate" or "stream"."""
        return frozenset()

    @property
    def renumbers(self) -> bool:
        """Whether kept keys move to consecutive positions that end where the prompt ends."""
        return False

    @abstractmethod
    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """Score every key.

        Returns:
            [B, H, N] float32, unpooled. What pads and always-kept keys get is not used.
        """

    def base_score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """Return [B, H, N] float32 for selection to pool and pass to `rank`; `score` unless there are two stages."""
        return self.score(win, impl=impl)

    @property
    def takes_largest(self) -> bool:
        """Whether a score is the largest over the queries, and not their sum."""
        return getattr(self, "reduce", "sum") == "max"

    def add(self, scores: Tensor, more: Tensor) -> Tensor:
        """[B, H, N] by the queries behind both scores."""
        return torch.maximum(scores, more) if self.takes_largest else scores + more

    def rank(self, pooled: Tensor, win: AttentionWindow, n_keep: Sequence[int]) -> Tensor:
        """Return priorities from pooled base scores: the same scores unless the method has two stages.

        Args:
            pooled: [B, H or 1, N] base scores after pooling; always-kept keys at +inf, pads at −inf.
            n_keep: tokens each head of a batch row keeps, always-kept ones included.

        Returns:
            [B, H or 1, N], higher = keep; what always-kept keys and pads get is not used.
        """
        return pooled

    def tail(self, n_keep: int, fixed: int) -> int:
        """Return how many last tokens the method always keeps if `fixed` of `n_keep` are kept anyway."""
        return 0

    @property
    def keeps(self) -> str:
        """Return what is kept whatever its score, as text for the table."""
        kept = ([f"first {self.sinks}"] if self.sinks else []) + ([f"last {self.window}"] if self.window else [])
        return " + ".join(kept) or "–"

    def describe(self) -> str:
        """Return name and options, for reports: `dropkv(window=8, pool=max, …)`."""
        options = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
        return f"{self.name}({options})"

    def _projected_norm(self, win: AttentionWindow) -> Tensor:
        """Return [B, H, N] float32: ‖W_O v‖₁ of the window's values."""
        return streams.projected_norm(win, self._expect_need(win, "W_O"))

    def _expect_need(self, win: AttentionWindow, need: Need) -> Any:
        """Return the window's input `need`; raise ValueError, with advice, if the window lacks it."""
        arguments = {"queries": "queries", "W_O": "output_projection", "rotate": "rotate", "stream": "stream_norm"}
        argument = arguments[need]
        held = getattr(win, argument)
        if held is None:
            ways = {
                "queries": "pass the prompt's queries [B, HQ, N, D]",
                "W_O": "pass W_O as [HQ, Dv, E]",
                "rotate": "pass a function that turns RoPE vectors by positions",
                "stream": "pass the residual stream's squared norms [B, w], choose weigh='block'",
            }
            raise ValueError(
                f"{argument}: expected by {self.describe()}, got None; {ways[need]}, "
                f"or choose a method that does without, such as dropkv or snapkv"
            )
        return held
