"""AnDPro: Accurate KV Cache Eviction via Anchor Direction Projection for Efficient LLM Inference (NeurIPS 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from decantkv import scoring
from decantkv.base.options import Impl, Pool, PoolScope, expect_int, expect_odd
from decantkv.methods.base import Kind, Method
from decantkv.scoring.window import AttentionWindow


@dataclass(frozen=True)
class AnDPro(Method):
    """Keep the tokens whose values contribute most along the direction of the attention output: Σ_i p ⟨v, a⟩/‖a‖."""

    name: ClassVar[str] = "andpro"
    kind: ClassVar[Kind] = "relaxation"
    source: ClassVar[str] = "AnDPro (NeurIPS 2025)"
    formula: ClassVar[str] = "Σ_i p·⟨v, a⟩/‖a‖"
    cost: ClassVar[str] = "4·g·w·d"
    presets: ClassVar = {
        "paper": {},
        "shared": {"window": 8, "kernel_size": 11, "pool_scope": "all", "sinks": 0},
    }

    window: int = 32
    pool: Pool = "max"
    kernel_size: int = 7
    pool_scope: PoolScope = "prefix"
    sinks: int = 4

    @classmethod
    def least_window(cls) -> int:
        """One query row."""
        return 1

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32, negative where a value points away from the output."""
        return scoring.compute("alignment", win, impl=impl)


@dataclass(frozen=True)
class AnDProChunks(Method):
    """AnDPro as in its authors' code: chunks of 4 tokens, weights pooled along each row, heads compete within a layer.

    A token's score is its chunk's Σ_i ⟨z_i, u_i⟩, z_i = Σ_{j∈chunk} p̃ v and u_i the sum of z_i over the chunks that
    may go. The last chunk chosen may be kept in part, so that the total is exact.

    Attributes:
        row_kernel_size: odd length of the max pooling of p along keys, ahead of everything else.
        chunk: tokens that are chosen together, counted from the first real one.
    """

    name: ClassVar[str] = "andpro-chunks"
    kind: ClassVar[Kind] = "relaxation"
    source: ClassVar[str] = "AnDPro, the authors' code"
    formula: ClassVar[str] = "Σ_i ⟨Σ_chunk p̃v, u⟩"
    cost: ClassVar[str] = "6·g·w·d"
    presets: ClassVar = {"paper": {}, "shared": {"window": 8}}
    allocation: ClassVar[str] = "heads"

    window: int = 32
    sinks: int = 4
    row_kernel_size: int = 7
    chunk: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_odd("AnDProChunks.row_kernel_size", self.row_kernel_size)
        expect_int("AnDProChunks.chunk", self.chunk, at_least=1)

    @classmethod
    def least_window(cls) -> int:
        """One query row."""
        return 1

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32, the same for the tokens of a chunk."""
        return scoring.compute(
            "chunk_alignment", win, impl=impl, row_pool="max", kernel_size=self.row_kernel_size, chunk=self.chunk
        )
