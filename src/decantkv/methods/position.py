"""Methods that look at positions alone: StreamingLLM (arXiv 2309.17453), sliding window, and the controls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decantkv.base.options import Impl, Need, expect_int
from decantkv.methods.base import Kind, Method
from decantkv.scoring.window import AttentionWindow


@dataclass(frozen=True)
class Sliding(Method):
    """Keep the most recent tokens and nothing else."""

    name: ClassVar[str] = "sliding"
    kind: ClassVar[Kind] = "heuristic"
    source: ClassVar[str] = "sliding-window attention"
    formula: ClassVar[str] = "position"
    presets: ClassVar = {"paper": {}, "shared": {"window": 8}}
    by_window: ClassVar[bool] = False

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: the key's position."""
        position = torch.arange(win.kv_len, dtype=torch.float32, device=win.k.device)
        return position.expand(win.k.shape[:3])


@dataclass(frozen=True)
class Streaming(Sliding):
    """StreamingLLM: keep the first tokens, which act as attention sinks, and the most recent ones.

    Attributes:
        renumber: give kept tokens consecutive positions inside the cache, as the original does; ports keep each
            token's own. Distances are all that RoPE knows, so kept keys move up to the prompt's end.
    """

    name: ClassVar[str] = "streaming"
    source: ClassVar[str] = "arXiv 2309.17453"
    formula: ClassVar[str] = "position, first 4 kept"
    presets: ClassVar = {"paper": {"renumber": True}, "ports": {}, "shared": {"window": 8}}

    sinks: int = 4
    renumber: bool = False

    @property
    def needs(self) -> frozenset[Need]:
        """Return "rotate" if kept tokens change positions."""
        return frozenset({"rotate"}) if self.renumber else frozenset()

    @property
    def renumbers(self) -> bool:
        """Return whether kept tokens get consecutive positions, as in the original."""
        return self.renumber


@dataclass(frozen=True)
class Recent(Sliding):
    """Control: the most recent tokens, with the same protected window as the compared methods."""

    name: ClassVar[str] = "recent"
    kind: ClassVar[Kind] = "control"
    source: ClassVar[str] = "control"
    presets: ClassVar = {"paper": {}, "shared": {}}

    window: int = 8


@dataclass(frozen=True)
class Random(Method):
    """Control: random tokens, drawn anew per layer, head and batch row; the same seed gives the same choice.

    Attributes:
        seed: of the draw, which is the same on every device.
    """

    name: ClassVar[str] = "random"
    kind: ClassVar[Kind] = "control"
    source: ClassVar[str] = "control"
    formula: ClassVar[str] = "uniform noise"
    presets: ClassVar = {"paper": {}, "shared": {}}
    by_window: ClassVar[bool] = False

    window: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_int("Random.seed", self.seed, at_least=0)

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: uniform noise."""
        generator = torch.Generator(device="cpu").manual_seed(self.seed * 1_000_003 + win.layer_idx)
        return torch.rand(win.k.shape[:3], generator=generator, device="cpu").to(win.k.device)
