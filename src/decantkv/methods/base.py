"""What a method is: one score per key, and how its authors select by it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, Self, get_args

from torch import Tensor

from decantkv.options import Impl, Pool, PoolScope, expect_choice, expect_int, expect_odd
from decantkv.scoring.window import AttentionWindow

Kind = Literal["exact singleton", "heuristic", "upper bound", "relaxation", "control"]


@dataclass(frozen=True)
class Method(ABC):
    """A rule that scores cached tokens; higher means costlier to lose. Instances are immutable settings.

    A subclass is one file: its source on the first line, its score, its authors' settings as field defaults, other
    published settings under `presets`.

    Attributes:
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
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    shared_by_heads: ClassVar[bool] = False

    window: int = 0
    pool: Pool = "none"
    kernel_size: int = 1
    pool_scope: PoolScope = "all"
    sinks: int = 0

    def __post_init__(self) -> None:
        where = type(self).__name__
        expect_int(f"{where}.window", self.window, at_least=self.least_window())
        expect_choice(f"{where}.pool", self.pool, get_args(Pool))
        expect_odd(f"{where}.kernel_size", self.kernel_size)
        expect_choice(f"{where}.pool_scope", self.pool_scope, get_args(PoolScope))
        expect_int(f"{where}.sinks", self.sinks, at_least=0)

    @classmethod
    def least_window(cls) -> int:
        """The smallest window the method can work with: 1 when it looks at queries."""
        return 0

    @classmethod
    def preset(cls, name: str, **options: Any) -> Self:
        """The method under published settings, with `options` on top.

        Raises:
            ValueError: the method has no such preset.
        """
        expect_choice("preset", name, cls.presets)
        return cls(**{**cls.presets[name], **options})

    @abstractmethod
    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """Score every key.

        Returns:
            [B, H, N] float32, unpooled. What pads and always-kept keys get is not used.
        """

    def describe(self) -> str:
        """The settings that differ between instances, for reports: `dropkv(window=8, pool=max, …)`."""
        options = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
        return f"{self.name}({options})"
