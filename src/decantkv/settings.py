"""Settings of eviction: method, budget, allocation, protection. They are checked once and then immutable."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, get_args

import torch
from torch import Tensor

from decantkv.base.chat import ROLES, Chat, ProtectedChat, chat_of, protected_chats
from decantkv.base.options import Allocation, Impl, Span, expect_choice, expect_int, expect_protected
from decantkv.methods import Method, resolve
from decantkv.scoring.rehearsal import Rehearsal
from decantkv.scoring.window import AttentionWindow
from decantkv.selection.allocation import UNIFORM, AllocationRule, resolve_allocation
from decantkv.selection.budget import Budget, count, fixed_spans
from decantkv.selection.prompt_budget import PromptBudget
from decantkv.selection.selector import Kept, Order, Rank, SelectionPlan, choose, order_by
from decantkv.selection.tensor_parallel import Peers

REHEARSED = "rehearsed"  # a method's preset under a rehearsal


@dataclass(frozen=True)
class Settings:
    """The settings by which a cache evicts.

    Attributes:
        method: scores tokens.
        budget: what is kept, protected tokens included.
        allocation: how the budget is spread over KV heads and layers.
        protect: spans (start, stop) of prompt positions always kept, counted from the first real token.
        impl: implementation of the scores.
        rehearsal: what is run over a prompt so that its queries score it; None: the prompt's last queries score it.
        roles: parts of a chat that are always kept as well: "system", "tools".
        chats: the chats that prompts may be, with the spans of these parts; `protect` holds those that all share.
    """

    method: Method
    budget: Budget
    allocation: AllocationRule = UNIFORM
    protect: tuple[Span, ...] = ()
    impl: Impl = "auto"
    rehearsal: Rehearsal | None = None
    roles: tuple[str, ...] = ()
    chats: tuple[ProtectedChat, ...] = ()

    @classmethod
    def parse(
        cls,
        method: str | Method,
        *,
        budget: float | int | str | Budget | None,
        allocation: Allocation | AllocationRule | None = None,
        sinks: int | None = None,
        protect: Sequence[Span | str] = (),
        chat: Chat | Sequence[Chat] | None = None,
        impl: Impl = "auto",
        rehearsal: str | Rehearsal | None = None,
        **options: Any,
    ) -> Self:
        """Check the user's options; `None` takes the method's own, `options` are those of the named method.

        Raises:
            TypeError, ValueError: an argument out of its range, or a budget in tokens below window plus sinks.
        """
        if budget is None:
            raise TypeError("budget: expected what is kept, a share such as 0.1 or a number of tokens, got None")
        rehearsed = Rehearsal.parse(rehearsal)
        chosen = resolve(method, **options) if rehearsed is None else _rehearsed(method, rehearsed, options)
        own = chosen.allocation if rehearsed is None or chosen.shared_by_heads else "global"
        rule = resolve_allocation(own if allocation is None else allocation)
        if chosen.shared_by_heads and rule.ragged:
            raise ValueError(
                f"allocation: expected 'uniform', 'shared' or 'pyramid' with {chosen.name}, whose heads share one set "
                f"of tokens, got {rule.name!r}"
            )
        expect_choice("impl", impl, get_args(Impl))
        if sinks is not None and expect_int("sinks", sinks, at_least=0) != chosen.sinks:
            chosen = dataclasses.replace(chosen, sinks=int(sinks))
        parsed = Budget.parse(budget)
        parsed.check_fixed(chosen.window + chosen.sinks, f"window {chosen.window} and sinks {chosen.sinks}")
        spans, roles = expect_protected("protect", protect, ROLES)
        return cls(chosen, parsed, rule, spans, impl, rehearsed).protecting(roles, chat)

    def protecting(self, roles: Sequence[str], chat: Chat | Sequence[Chat] | None) -> Self:
        """Return these settings for prompts that are chats, of which the parts named by `roles` are always kept.

        Raises:
            TypeError, ValueError: roles without a chat, a chat without roles, or one in which a part cannot be found.
        """
        chats = protected_chats(roles, chat)
        common = chats[0].spans if chats and not _differ(chats) else ()
        return dataclasses.replace(self, protect=(*self.protect, *common), roles=tuple(roles), chats=chats)

    @property
    def protects_by_row(self) -> bool:
        """Return whether prompts of one batch may have different protected spans."""
        return _differ(self.chats)

    def for_chat(self, ids: Sequence[int]) -> Self:
        """Return the settings for one prompt of these token ids, which must begin with one of `chats`.

        Raises:
            ValueError: the prompt is none of them.
        """
        return dataclasses.replace(self, protect=(*self.protect, *chat_of(ids, self.chats).spans))

    @property
    def sinks(self) -> int:
        """Number of first tokens that are always kept; it belongs to the method, whose scores may depend on it."""
        return self.method.sinks

    def in_force(self) -> dict[str, Any]:
        """Return all options besides method and budget, for JSON."""
        return {
            "allocation": self.allocation.describe(),
            "sinks": self.sinks,
            "protect": [*(list(span) for span in self.protect), *self.roles],
            "impl": self.impl,
            "rehearsal": None if self.rehearsal is None else str(self.rehearsal),
        }

    @property
    def rows(self) -> int:
        """Number of last queries that the method looks at; 1 if it looks at none."""
        return max(self.method.window, 1)

    def n_keep(self, lengths: Sequence[int]) -> list[int]:
        """Return the number of tokens that each head keeps, for each batch row of `lengths` real tokens.

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
        """Return how many tokens of a prompt are kept whatever their score."""
        return count(fixed_spans(length, window=self.method.window, sinks=self.sinks, protect=self.protect))

    def rounds_keep(self) -> int:
        """Return how many tokens are kept whatever their score once the window has moved past all protected ones."""
        return self.fixed(sys.maxsize)

    def prompt_budget(self, lengths: Sequence[int], ids: Sequence[Sequence[int]] | None = None) -> PromptBudget:
        """Return what prompts of these lengths keep; errors are those of `n_keep` and `for_chat`.

        Args:
            ids: token ids of each prompt, which are needed where the settings have chats.
        """
        each = [self] * len(lengths) if ids is None else [self.for_chat(row) for row in ids]
        n_keep = [own.n_keep([length])[0] for own, length in zip(each, lengths, strict=True)]
        fixed = [own.fixed(length) for own, length in zip(each, lengths, strict=True)]
        rows = list(zip(lengths, fixed, n_keep, strict=True))
        raised = any(self.budget.raised(length, always) for length, always, _ in rows)
        unscored = any(kept == always < length for length, always, kept in rows)
        plan = self.selection_plan(lengths, n_keep, fixed, [own.protect for own in each])
        return PromptBudget(tuple(lengths), tuple(fixed), tuple(n_keep), plan, raised, unscored)

    def selection_plan(
        self,
        lengths: Sequence[int],
        n_keep: Sequence[int],
        fixed: Sequence[int],
        protect: Sequence[Sequence[Span]],
        *,
        shared: bool = False,
    ) -> SelectionPlan:
        """Return what a selection by these settings needs to know of prompts; a number or spans for each of them.

        Args:
            lengths: real tokens; n_keep: tokens that a head keeps; fixed: how many of them whatever their score.
            protect: spans always kept.
            shared: keep one set for all heads.
        """
        method = self.method
        return SelectionPlan.check(
            list(lengths),
            n_keep=list(n_keep),
            window=method.window,
            pool=method.pool,
            kernel_size=method.kernel_size,
            pool_scope=method.pool_scope,
            sinks=self.sinks,
            protect=protect,
            allocation=self.allocation,
            forced_tail=self.tails(lengths, n_keep, fixed),
            shared=shared or method.shared_by_heads,
        )

    def tails(self, lengths: Sequence[int], n_keep: Sequence[int], fixed: Sequence[int]) -> list[int]:
        """Return how many last tokens of each prompt are always kept, beside the window; see `selection_plan`."""
        return [self.method.tail(n, always) for n, always in zip(n_keep, fixed, strict=True)]

    def score(self, win: AttentionWindow) -> Tensor:
        """Return [B, H, N] float32 scores, which `choose` pools.

        Raises:
            ValueError: the method gave something else, as a user's own may.
        """
        scores = self.method.base_score(win, impl=self.impl)
        batch, heads, kv_len, _ = win.k.shape
        if not isinstance(scores, Tensor) or tuple(scores.shape) not in ((batch, heads, kv_len), (batch, 1, kv_len)):
            got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(
                f"{self.method.name}.score: expected scores [B, H, N] of {[batch, heads, kv_len]}, got {got}"
            )
        return scores

    def beside(self, rehearsed: Tensor, own: Tensor, rows: int) -> Tensor:
        """[B, H, N] by a rehearsal and by the prompt's own last `rows` queries, as sources of equal weight."""
        return self.method.add(rehearsed, own if self.method.takes_largest else own / rows)

    def choose(
        self,
        scores: Tensor,
        *,
        win: AttentionWindow | None = None,
        lengths: Sequence[int] | None = None,
        layer: tuple[int, int] = (0, 1),
        shared: bool = False,
        n_keep: Sequence[int] | None = None,
        forced: Tensor | None = None,
        budget: PromptBudget | None = None,
        peers: Peers | None = None,
    ) -> Kept:
        """Select by the method's own rules and these settings.

        Args:
            scores: from `score`, for the same window.
            win: the window, which methods of two stages look at again.
            lengths: real tokens of each row, if the host knows them; None: read from the window.
            layer: (index, number) among the layers that evict.
            shared: keep one set for all heads.
            n_keep: tokens that each head of a row keeps; None: by the budget.
            forced: [B, H, N] bool, keys that are kept before all but the protected ones; None: no such keys.
            budget: from `prompt_budget`, for the same lengths; None: made here.
            peers: processes that hold the layer's other heads.

        Raises:
            ValueError: the allocation gives heads different numbers where they must share one set.
        """
        plan, rank = self._planned(scores, win, lengths, layer, shared, n_keep, forced, budget)
        return choose(scores, plan, rank=rank, impl=self.impl, peers=peers)

    def order(
        self,
        scores: Tensor,
        *,
        win: AttentionWindow | None = None,
        lengths: Sequence[int] | None = None,
        layer: tuple[int, int] = (0, 1),
        shared: bool = False,
        n_keep: Sequence[int] | None = None,
        forced: Tensor | None = None,
        budget: PromptBudget | None = None,
    ) -> Order:
        """Return the keys' priorities, for a rule that spreads one budget over the layers; arguments as in `choose`."""
        plan, rank = self._planned(scores, win, lengths, layer, shared, n_keep, forced, budget)
        return order_by(scores, plan, rank)

    def keep(self, win: AttentionWindow, *, layer: tuple[int, int] = (0, 1), shared: bool = False) -> Kept:
        """Score and select in one call."""
        return self.choose(self.score(win), win=win, layer=layer, shared=shared)

    def _planned(
        self,
        scores: Tensor,
        win: AttentionWindow | None,
        lengths: Sequence[int] | None,
        layer: tuple[int, int],
        shared: bool,
        n_keep: Sequence[int] | None,
        forced: Tensor | None,
        budget: PromptBudget | None,
    ) -> tuple[SelectionPlan, Rank | None]:
        """Return the plan for these scores, and the second stage of the choice where there is one."""
        if shared and self.allocation.ragged:
            raise must_share(self.allocation.name)
        if budget is not None:
            plan = budget.plan._replace(shared=True) if shared else budget.plan
        else:
            if lengths is None and win is not None and win.lengths is not None:
                lengths = [int(n) for n in win.lengths.tolist()]
            rows = [scores.shape[2]] * scores.shape[0] if lengths is None else list(lengths)
            fixed, protect = [self.fixed(length) for length in rows], [self.protect] * len(rows)
            plan = self.selection_plan(rows, n_keep or self.n_keep(rows), fixed, protect, shared=shared)
        if type(self.allocation).layer_budget is not AllocationRule.layer_budget:
            plan = plan.of_layer(*layer)
        two_stages = type(self.method).rank is not Method.rank

        def rank(pooled: Tensor, counts: list[int]) -> Tensor:
            if win is None:
                raise TypeError(
                    f"win: expected the attention window, which {self.method.name} looks at again, got None"
                )
            ranked = self.method.rank(pooled, win, counts) if two_stages else pooled
            if forced is None:
                return ranked
            first = forced if forced.shape[1] == ranked.shape[1] else forced.any(1, keepdim=True)
            largest = torch.finfo(ranked.dtype).max  # a method's first stage comes second here
            return ranked.clamp(max=largest / 2).masked_fill(first, largest)

        return plan, rank if two_stages or forced is not None else None


def _differ(chats: Sequence[ProtectedChat]) -> bool:
    return any(chat.spans != chats[0].spans for chat in chats)


def _rehearsed(method: str | Method, rehearsal: Rehearsal, options: dict[str, Any]) -> Method:
    """The method for a rehearsal: under its preset of that name, where it has one and none other was named.

    Questions alone need the method's own pooling: their queries ask for the first token of an answer, not for those
    behind it.

    Raises:
        ValueError: the method scores by something else than single queries' attention.
    """
    chosen = resolve(method, **options)
    if not chosen.by_window or "queries" in chosen.needs or chosen.renumbers:
        raise ValueError(
            f"rehearsal: expected a method that scores by queries, such as dropkv or snapkv, got {chosen.describe()}"
        )
    if isinstance(method, str) and ":" not in method and REHEARSED in chosen.presets:
        if not (rehearsal.replay or rehearsal.anchors):
            options = {"pool": chosen.pool, **options}
        return resolve(f"{method}:{REHEARSED}", **options)
    return chosen


def must_share(allocation: str) -> ValueError:
    """Return the error for an allocation that gives heads different sets in a model that stores one set for all."""
    return ValueError(
        f"allocation: expected 'uniform', 'shared' or 'pyramid' for a model whose heads must share one set of "
        f"tokens, got {allocation!r}"
    )
