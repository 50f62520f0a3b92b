"""How many tokens prompts keep: decided once for prompts of given lengths, and the same for all layers of a cache."""

from __future__ import annotations

from dataclasses import dataclass

from decantkv.base.options import Span


@dataclass(frozen=True)
class PromptBudget:
    """What a head keeps of each prompt of a batch, before an allocation spreads it over heads and layers.

    Attributes:
        lengths: real tokens of each batch row.
        protect: spans of positions of each row that are always kept, counted from its first real token.
        fixed: how many of them are kept whatever their score.
        n_keep: how many are kept in all.
        raised: protection kept more than the budget's share in some row.
        unscored: some row drops tokens and keeps only protected ones.
    """

    lengths: tuple[int, ...]
    protect: tuple[tuple[Span, ...], ...]
    fixed: tuple[int, ...]
    n_keep: tuple[int, ...]
    raised: bool
    unscored: bool
