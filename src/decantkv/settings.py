"""What to evict by and how much to keep, checked once and then immutable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, get_args

from torch import Tensor

from decantkv.budget import Budget, count, fixed_spans
from decantkv.methods import Method, resolve
from decantkv.options import Allocation, Impl, Span, expect_choice, expect_int, expect_spans
from decantkv.scoring.window import AttentionWindow
from decantkv.selection import Kept, select


@dataclass(frozen=True)
class Settings:
    """How a cache evicts.

    Attributes:
        method: scores tokens.
        budget: what is kept, protected tokens included.
        allocation: how a layer's budget is spread over its KV heads.
        sinks: first tokens always kept.
        protect: spans (start, stop) of prompt positions always kept, counted from the first real token.
        impl: implementation of the scores.
    """

    method: Method
    budget: Budget
    allocation: Allocation = "uniform"
    sinks: int = 0
    protect: tuple[Span, ...] = ()
    impl: Impl = "auto"

    @classmethod
    def parse(
        cls,
        method: str | Method,
        *,
        budget: float | int | Budget,
        allocation: Allocation = "uniform",
        sinks: int | None = None,
        protect: Sequence[Span] = (),
        impl: Impl = "auto",
        **options: Any,
    ) -> Self:
        """Check what a user typed; `sinks=None` takes the method's own, `options` are the named method's.

        Raises:
            TypeError, ValueError: an argument out of its range, or a budget in tokens below window plus sinks.
        """
        chosen = resolve(method, **options)
        expect_choice("allocation", allocation, get_args(Allocation))
        expect_choice("impl", impl, get_args(Impl))
        kept_first = chosen.sinks if sinks is None else expect_int("sinks", sinks, at_least=0)
        parsed = Budget.parse(budget)
        parsed.check_fixed(chosen.window + kept_first, f"window {chosen.window} and sinks {kept_first}")
        return cls(chosen, parsed, allocation, kept_first, expect_spans("protect", protect), impl)

    @property
    def rows(self) -> int:
        """How many of the last queries the method looks at; 1 where it looks at none."""
        return max(self.method.window, 1)

    def n_keep(self, lengths: Sequence[int]) -> list[int]:
        """Tokens each head keeps in each batch row of `lengths` real tokens.

        Raises:
            ValueError: protected spans outside a row, or a budget in tokens below what is protected there.
        """
        counts = []
        for length in lengths:
            fixed = self.fixed(length)
            if fixed < length:
                self.budget.check_fixed(fixed, "window, sinks and protected spans")
            counts.append(self.budget.n_keep(length, fixed))
        return counts

    def fixed(self, length: int) -> int:
        """How many tokens of a prompt are kept whatever their score."""
        return count(fixed_spans(length, window=self.method.window, sinks=self.sinks, protect=self.protect))

    def raised(self, lengths: Sequence[int]) -> bool:
        """Whether protection kept more in some row than the budget's share asked for."""
        return any(self.budget.raised(length, self.fixed(length)) for length in lengths)

    def choose(self, scores: Tensor, *, lengths: Sequence[int] | None, shared: bool = False) -> Kept:
        """Select by the method's own pooling and these settings; `shared` forces one set for all heads."""
        rows = list(lengths) if lengths is not None else [scores.shape[2]] * scores.shape[0]
        return select(
            scores,
            n_keep=self.n_keep(rows),
            window=self.method.window,
            pool=self.method.pool,
            kernel_size=self.method.kernel_size,
            pool_scope=self.method.pool_scope,
            sinks=self.sinks,
            protect=self.protect,
            allocation="shared" if shared or self.method.shared_by_heads else self.allocation,
            lengths=lengths,
        )

    def score(self, win: AttentionWindow) -> Tensor:
        """[B, H, N] float32 scores of the method."""
        return self.method.score(win, impl=self.impl)
