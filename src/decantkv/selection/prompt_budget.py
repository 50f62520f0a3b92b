"""The numbers of tokens that prompts keep: decided once for prompts of given lengths, the same for all layers."""

from __future__ import annotations

from dataclasses import dataclass

from decantkv.selection.selector import SelectionPlan


@dataclass(frozen=True)
class PromptBudget:
    """The tokens that a head keeps of each prompt of a batch, before an allocation spreads them over heads and layers.

    Attributes:
        lengths: real tokens of each batch row.
        fixed: how many of them are kept whatever their score.
        n_keep: how many are kept in all.
        plan: what every layer selects by.
        raised: protection kept more than the budget's share in some row.
        unscored: some row drops tokens and keeps only protected ones.
    """

    lengths: tuple[int, ...]
    fixed: tuple[int, ...]
    n_keep: tuple[int, ...]
    plan: SelectionPlan
    raised: bool
    unscored: bool
