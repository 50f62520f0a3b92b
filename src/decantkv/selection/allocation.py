"""Allocation rules: how a budget is spread over the heads of a layer and over the layers. Totals are exact.

Of the `n_keep` tokens per head, `fixed` are always kept, equally many in every head. The others are *free*: a rule
spreads them. The H heads of a layer keep H·n_keep tokens together, and L layers keep L times as many.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from decantkv.base.options import Allocation, expect_fraction
from decantkv.base.plugins import plugins
from decantkv.base.transfer import to_device
from decantkv.selection.tensor_parallel import Peers, wins_of_rows
from decantkv.selection.topk import keep_highest, wins


@dataclass(frozen=True)
class AllocationRule:
    """Give each head the same number of tokens: "uniform", and the base class of all other rules.

    Attributes:
        ragged: heads may keep different numbers of tokens.
        by_layer: layers may keep different numbers of tokens.
        over_layers: layers compete, so a layer's share is known only when the last one has been seen.
        by_share: competing layers compare each score's share of its layer's total, which no score below 0 has.
    """

    name: ClassVar[str] = "uniform"
    ragged: ClassVar[bool] = False
    by_layer: ClassVar[bool] = False
    over_layers: ClassVar[bool] = False
    by_share: ClassVar[bool] = True

    def describe(self) -> str:
        """Return the rule with its settings, for reports: `ada(alpha=0.2)`."""
        options = ", ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))
        return f"{self.name}({options})" if options else self.name

    def layer_budget(self, n_keep: int, fixed: int, length: int, layer: int, layers: int) -> int:
        """Return the number of tokens that a head keeps in layer `layer` of `layers`; `n_keep` is the mean over layers.

        Raises:
            ValueError: the layer would keep nothing.
        """
        return n_keep

    def head_counts(self, priority: Tensor, n_keep: list[int], fixed: list[int], peers: Peers | None = None) -> Tensor:
        """Return the number of tokens that each head keeps.

        Args:
            priority: [B, H, N], +inf at the always-kept keys, −inf at pads.
            n_keep: tokens each head keeps on average, one number per batch row.
            fixed: how many of them are kept whatever their score, one number per batch row.
            peers: processes that hold the layer's other heads, which take part where heads compete.

        Returns:
            [B, H] int64; rows sum to H·n_keep, over all peers' heads.
        """
        return to_device(n_keep, priority.device)[:, None].expand(priority.shape[:2])

    def across_layers(self, priority: Tensor, n_keep: list[int]) -> Tensor:
        """Return [B, H, N] priorities that can be compared between layers; arguments as in `head_counts`."""
        return layer_shares(priority) if self.by_share else priority


@dataclass(frozen=True)
class Shared(AllocationRule):
    """Keep one set of tokens for all heads of a layer, as paged serving engines can store."""

    name: ClassVar[str] = "shared"


@dataclass(frozen=True)
class Ada(AllocationRule):
    """Ada-KV (arXiv 2407.11550), the authors' interpolation: (1 − α)·c_h + α·B free tokens for head h.

    c_h counts the head's keys among the layer's H·B highest, B = n_keep − fixed. The authors round each head and
    floor α·B; here the largest remainder rounds, so that totals are exact. The two differ by at most two tokens per
    head, and by at most one if α·B is whole.

    Attributes:
        alpha: share of the budget that all heads get equally; 0: all heads compete for everything, 1: uniform.
    """

    name: ClassVar[str] = "ada"
    ragged: ClassVar[bool] = True

    alpha: float = 0.2

    def __post_init__(self) -> None:
        expect_fraction(f"{type(self).__name__}.alpha", self.alpha)

    def head_counts(self, priority: Tensor, n_keep: list[int], fixed: list[int], peers: Peers | None = None) -> Tensor:
        """Return [B, H] int64: the tokens that a head wins in the layer's top-k, pulled towards the mean by α."""
        alpha, heads = _exact(self.alpha), _heads(priority, peers)
        free = priority.masked_fill(priority == torch.inf, -torch.inf)
        budgets = [number - always for number, always in zip(n_keep, fixed, strict=True)]
        won = wins_of_rows(free, [budget * heads for budget in budgets], peers)
        free_each, always = (to_device(numbers, won.device)[:, None] for numbers in (budgets, fixed))
        parts = (alpha.denominator - alpha.numerator) * won + alpha.numerator * free_each
        return _own(always + _largest_remainder(parts, alpha.denominator, free_each * heads), peers)


@dataclass(frozen=True)
class Heads(Ada):
    """Let all heads of a layer compete for the whole budget; no head has a guarantee: "ada" with α = 0."""

    name: ClassVar[str] = "heads"

    alpha: float = 0.0


@dataclass(frozen=True)
class AdaKvpress(AllocationRule):
    """Ada-KV as in kvpress: each head keeps its own ⌊α·n_keep⌋ highest, and the layer's highest get the rest.

    Attributes:
        alpha: the guaranteed share, always-kept tokens included.
    """

    name: ClassVar[str] = "ada-kvpress"
    ragged: ClassVar[bool] = True

    alpha: float = 0.2

    def __post_init__(self) -> None:
        expect_fraction("AdaKvpress.alpha", self.alpha)

    def head_counts(self, priority: Tensor, n_keep: list[int], fixed: list[int], peers: Peers | None = None) -> Tensor:
        """Return [B, H] int64: the guaranteed number plus what the head wins in the layer's top-k."""
        alpha, heads = _exact(self.alpha), _heads(priority, peers)
        safe = [max(int(alpha * number), always) for number, always in zip(n_keep, fixed, strict=True)]
        own = torch.tensor(safe, device=priority.device)[:, None].expand(priority.shape[:2])
        lifted = keep_highest(priority, by=priority, counts=own, to=torch.inf)  # a method's first stage is lifted too
        return _own(wins_of_rows(lifted, [number * heads for number in n_keep], peers), peers)


@dataclass(frozen=True)
class Pyramid(AllocationRule):
    """PyramidKV (arXiv 2406.02069): free tokens fall linearly from 2B − B/β in the first layer to B/β in the last.

    Where the first layer would exceed the prompt it takes all of it and the last one keeps the mean, as the authors
    do. Whole numbers by largest remainder.

    Attributes:
        beta: how steep; the authors' is 20.
    """

    name: ClassVar[str] = "pyramid"
    by_layer: ClassVar[bool] = True

    beta: float = 20.0

    def __post_init__(self) -> None:
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float):
            raise TypeError(f"Pyramid.beta: expected a number of at least 1, got {self.beta!r}")
        if not self.beta >= 1:  # NaN included
            raise ValueError(f"Pyramid.beta: expected a number of at least 1, got {self.beta!r}")

    def layer_budget(self, n_keep: int, fixed: int, length: int, layer: int, layers: int) -> int:
        """Return the layer's point on the falling line."""
        if layers == 1 or n_keep == length:
            return n_keep
        budget, most = Fraction(n_keep - fixed), Fraction(length - fixed)
        first = min(2 * budget - budget / _exact(self.beta), most)
        step = (2 * first - 2 * budget) / (layers - 1)
        exact = [first - i * step for i in range(layers)]
        missing = int(budget) * layers - sum(math.floor(x) for x in exact)
        by_remainder = sorted(range(layers), key=lambda i: (math.floor(exact[i]) - exact[i], i))
        share = math.floor(exact[layer]) + (layer in by_remainder[:missing])
        if share + fixed == 0:
            raise ValueError(
                f"budget: expected enough for every layer to keep a token under pyramid allocation, got {n_keep} a "
                f"head of which layer {layer} of {layers} keeps none; raise the budget, lower beta or use 'uniform'"
            )
        return share + fixed


@dataclass(frozen=True)
class Layers(AllocationRule):
    """Spread one budget over all heads of all layers, by each score's share of its layer's total.

    Layers are read one after the other. Each enters a running top-k over the layers so far and gives back the tokens
    that later layers win (`Contest`). The result equals one top-k over all layers; memory never exceeds the final total
    by more than one layer.
    """

    name: ClassVar[str] = "layer"
    ragged: ClassVar[bool] = True
    over_layers: ClassVar[bool] = True


@dataclass(frozen=True)
class Global(AllocationRule):
    """Spread one budget over all heads of all layers, by raw scores: KVzip's "non-uniform" ranking (2505.23416).

    It suits methods whose scores mean the same in every layer: weights, and DropKV's costs in the units "head",
    "block" and "stream". Costs in the unit "value" grow with a layer's values; "layer" takes that out.

    Attributes:
        floor: share of the mean budget that each head keeps of its own highest tokens, always-kept ones included,
            rounded down.
    """

    name: ClassVar[str] = "global"
    ragged: ClassVar[bool] = True
    over_layers: ClassVar[bool] = True
    by_share: ClassVar[bool] = False

    floor: float = 0.0

    def __post_init__(self) -> None:
        expect_fraction("Global.floor", self.floor)

    def across_layers(self, priority: Tensor, n_keep: list[int]) -> Tensor:
        """Return the priorities, with each head's guaranteed tokens above all others."""
        safe = [int(_exact(self.floor) * number) for number in n_keep]
        if not any(safe):
            return priority
        own = to_device(safe, priority.device)[:, None].expand(priority.shape[:2])
        lifted = keep_highest(priority, by=priority, counts=own, to=torch.finfo(priority.dtype).max)
        return torch.maximum(lifted, priority)


UNIFORM = AllocationRule()
RULES: dict[str, AllocationRule] = {
    rule.name: rule for rule in (UNIFORM, Shared(), Ada(), AdaKvpress(), Heads(), Pyramid(), Layers(), Global())
}
GROUP = "decantkv.allocations"  # the entry-point group by which other packages add rules


def register_allocation(rule: AllocationRule) -> AllocationRule:
    """Make an allocation rule known by its name in this process, under the settings it holds, and return it.

    A package whose entry points name the rule in the group "decantkv.allocations" need not call this.

    Raises:
        TypeError: no `AllocationRule` with a name of its own.
        ValueError: another rule has the name.
    """
    if not isinstance(rule, AllocationRule) or not isinstance(vars(type(rule)).get("name"), str):
        raise TypeError(f"allocation: expected an AllocationRule whose class has a name of its own, got {rule!r}")
    there, kind = RULES.get(rule.name), type(rule)
    if there is not None and (type(there).__module__, type(there).__qualname__) != (kind.__module__, kind.__qualname__):
        raise ValueError(
            f"allocation: expected a name that is free, got {rule.name!r}, which is {type(there).__name__}"
        )
    RULES[rule.name] = rule
    return rule


def known_allocations() -> dict[str, AllocationRule]:
    """Return every rule by its name: built-in ones, registered ones, and those of installed packages."""
    for rule in plugins(GROUP):
        register_allocation(rule)
    return RULES


def resolve_allocation(allocation: Allocation | AllocationRule | str) -> AllocationRule:
    """Return the rule of a name, under its authors' settings, or the rule itself if one is given.

    Raises:
        TypeError, ValueError: neither a known name nor a rule.
    """
    if isinstance(allocation, AllocationRule):
        return allocation
    if not isinstance(allocation, str):
        raise TypeError(f"allocation: expected a name or an AllocationRule, got {allocation!r}")
    rules = RULES if allocation in RULES else known_allocations()
    if allocation not in rules:
        close = difflib.get_close_matches(allocation.lower(), rules, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"allocation: expected one of {', '.join(sorted(rules))}, got {allocation!r}{hint}")
    return rules[allocation]


def layer_shares(priority: Tensor) -> Tensor:
    """Return scores divided by their layer's total over its free keys, so that layers can be compared.

    Args:
        priority: [B, H, N], +inf at always-kept keys, −inf at pads.

    Raises:
        ValueError: a score below 0, which has no share.
    """
    free = priority.masked_fill(~priority.isfinite(), 0.0).double()
    if bool((free < 0).any()):
        raise ValueError(
            "allocation: expected scores that are not negative, which 'layer' compares by their share of the "
            "layer's total, got negative ones; use 'ada' or 'uniform' with this method"
        )
    total = free.sum((1, 2), keepdim=True)
    shares = free / total.where(total > 0, 1.0)
    return shares.where(priority.isfinite(), priority.double())


class Contest:
    """A running top-k over layers, for "layer" and "global": how many free tokens each layer read so far keeps."""

    def __init__(self, totals: list[int]) -> None:
        """Start without layers; `totals` are the free tokens of all layers and heads together, one per batch row."""
        self.totals = totals
        self._shares: list[Tensor] = []  # per layer [B, H, n], falling; −inf beyond what takes part

    def enter(self, shares: Tensor) -> list[Tensor]:
        """Let one more layer take part.

        Args:
            shares: [B, H, N] of `across_layers`.

        Returns:
            A [B, H] int64 tensor per layer seen so far: how many free tokens each head keeps from here on, never more
            than before. They are the head's highest.
        """
        free = shares.masked_fill(shares == torch.inf, -torch.inf)
        self._shares.append(free.sort(-1, descending=True).values.cpu())
        kept = [torch.zeros(s.shape[:2], dtype=torch.int64, device="cpu") for s in self._shares]
        for row, total in enumerate(self.totals):
            width = max(s.shape[2] for s in self._shares)
            lanes = torch.cat([_widened(s[row], width) for s in self._shares])  # [layers·H, width]
            total = min(total, int((lanes > -torch.inf).sum()))
            counts = wins(lanes, total).split([s.shape[1] for s in self._shares])
            for layer, count in enumerate(counts):
                kept[layer][row] = count
        self._shares = [s[..., : int(k.max())].clone() for s, k in zip(self._shares, kept, strict=True)]
        for s, k in zip(self._shares, kept, strict=True):
            s.masked_fill_(torch.arange(s.shape[2], device=s.device) >= k[..., None], -torch.inf)
        return kept


def decide(priorities: Sequence[Tensor], totals: list[int]) -> list[Tensor]:
    """Return each head's number of free tokens if all layers are at hand; `Contest` ends with the same numbers.

    Args:
        priorities: [B, H, N] of `across_layers` per layer, +inf at the always-kept keys. H and N may differ.
        totals: free tokens that all layers and heads together keep, a number per batch row.

    Returns:
        A [B, H] int64 tensor per layer, on the first one's device; rows sum to `totals` over all layers.
    """
    device, width = priorities[0].device, max(x.shape[2] for x in priorities)
    lanes = torch.cat([_widened(x.to(device), width) for x in priorities], 1)
    won = wins_of_rows(lanes.masked_fill_(lanes == torch.inf, -torch.inf), totals)
    return list(won.split([x.shape[1] for x in priorities], 1))


def _widened(x: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[-1]), value=-torch.inf)


def _heads(priority: Tensor, peers: Peers | None) -> int:
    return priority.shape[1] * (1 if peers is None else peers.size)


def _own(counts: Tensor, peers: Peers | None) -> Tensor:
    return counts if peers is None else peers.own(counts)


def _largest_remainder(parts: Tensor, denominator: int, totals: Tensor) -> Tensor:
    """Return [B, H] whole numbers near parts/denominator that sum to `totals` [B, 1]; ties go to the
    lower index.
    """
    whole = parts.div(denominator, rounding_mode="floor")
    missing = totals - whole.sum(-1, keepdim=True)
    rank = (parts - whole * denominator).argsort(descending=True, stable=True).argsort()
    return whole + (rank < missing)


def _exact(x: float) -> Fraction:
    """Return the decimal that a float prints as, of at most six digits, so that products stay within int64."""
    return Fraction(repr(float(x))).limit_denominator(10**6)
