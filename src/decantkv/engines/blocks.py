"""Budgets for engines that store a cache in blocks: whole blocks of chosen tokens, then the prompt's partial block.

With P prompt tokens and blocks of `block_size`, t = ⌊P/block_size⌋ is the block that the first new token goes to and
P − t·block_size prompt tokens lie in it. Those stay where they are, so they are always kept; the other kept tokens fill
m whole blocks. m depends on P alone, never on a score, so that every process can compute the layout from P.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from decantkv.base.options import expect_int
from decantkv.selection.budget import count, fixed_spans
from decantkv.settings import Settings


@dataclass(frozen=True)
class Plan:
    """The layout of one prompt's blocks after eviction.

    Attributes:
        prompt_len: P tokens.
        block_size: tokens of a block.
        kept_blocks: m, the whole blocks that chosen tokens fill.
        tail_block: t, the block that the first new token goes to; the prompt's last P − t·block_size tokens are in it.
    """

    prompt_len: int
    block_size: int
    kept_blocks: int
    tail_block: int

    @property
    def first_block(self) -> int:
        """t − m: the prompt's first block that is still needed; the blocks before it are freed."""
        return self.tail_block - self.kept_blocks

    @property
    def evicts(self) -> bool:
        """Whether any token is dropped."""
        return self.first_block > 0

    @property
    def tail(self) -> int:
        """Number of prompt tokens in the partial block."""
        return self.prompt_len - self.tail_block * self.block_size

    @property
    def chosen(self) -> int:
        """Number of tokens that each KV head chooses for the whole blocks."""
        return self.kept_blocks * self.block_size

    @property
    def kept(self) -> int:
        """Number of prompt tokens that each KV head keeps."""
        return self.chosen + self.tail

    @property
    def dropped(self) -> int:
        """Number of prompt tokens that each KV head drops: as many as the freed blocks hold."""
        return self.first_block * self.block_size


@dataclass(frozen=True)
class BlockSettings(Settings):
    """Settings that keep whole blocks, so that every engine keeps the same tokens.

    Attributes:
        block_size: tokens of a block; with 1 these are plain settings.
    """

    block_size: int = 1

    @classmethod
    def of(cls, settings: Settings, block_size: int) -> Self:
        """Return the same settings, in blocks.

        Raises:
            TypeError, ValueError: `block_size` is no positive whole number.
        """
        own = {name: getattr(settings, name) for name in Settings.__dataclass_fields__}
        return replace(cls(**own), block_size=expect_int("block_size", block_size, at_least=1))

    def n_keep(self, lengths: Sequence[int]) -> list[int]:
        """Return the tokens that each head keeps: the budget, in whole blocks, and the prompt's partial block."""
        return [self.plan(length).kept for length in lengths]

    def plan(self, length: int) -> Plan:
        """Return the layout of a prompt of `length` tokens: the fewest blocks that hold budget and protected tokens.

        Raises:
            ValueError: as `Settings.n_keep`.
        """
        (wanted,) = super().n_keep([length])
        tail = length % self.block_size
        always = fixed_spans(
            length, window=max(self.method.window, tail), sinks=self.sinks, protect=self.protect
        )  # what is protected before the partial block must find room in the whole ones
        blocks = -(-(max(wanted, count(always)) - tail) // self.block_size)
        return Plan(length, self.block_size, blocks, length // self.block_size)

    def tails(self, lengths: Sequence[int], n_keep: Sequence[int], fixed: Sequence[int]) -> list[int]:
        """As `Settings.tails`; a prompt's partial block is kept."""
        own = super().tails(lengths, n_keep, fixed)
        return [max(tail, length % self.block_size) for tail, length in zip(own, lengths, strict=True)]
