"""KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference (arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decantkv.base.options import Impl
from decantkv.methods.base import Kind, Method
from decantkv.scoring.rehearsal import key_difference
from decantkv.scoring.window import AttentionWindow


@dataclass(frozen=True)
class KeyDiff(Method):
    """Keep the tokens whose keys differ most in direction from the mean key. Looks at no query.

    Attributes:
        normalise: take the mean of the keys' directions, as kvpress does, and not of the keys.
    """

    name: ClassVar[str] = "keydiff"
    kind: ClassVar[Kind] = "heuristic"
    source: ClassVar[str] = "arXiv 2504.15364"
    formula: ClassVar[str] = "1 − cos(k, mean k)"
    cost: ClassVar[str] = "2·d"
    presets: ClassVar = {
        "paper": {},
        "kvpress": {"normalise": True},
        "shared": {"window": 8, "pool": "max", "kernel_size": 11},
    }
    by_window: ClassVar[bool] = False

    normalise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.normalise, bool):
            raise TypeError(f"KeyDiff.normalise: expected True or False, got {self.normalise!r}")

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32 from 0 to 2."""
        return key_difference(win.k, win.real(), normalise=self.normalise)
