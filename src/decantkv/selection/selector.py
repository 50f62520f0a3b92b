"""From scores to kept tokens: pool, protect, allocate, take the highest."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from decantkv.base.options import (
    Allocation,
    Impl,
    Pool,
    PoolScope,
    Span,
    expect_choice,
    expect_int,
    expect_odd,
    expect_spans,
)
from decantkv.base.transfer import move, to_device
from decantkv.selection.allocation import AllocationRule, Shared, decide, resolve_allocation
from decantkv.selection.budget import count, fixed_spans
from decantkv.selection.tensor_parallel import Peers, mean_over_heads
from decantkv.selection.topk import FILLER, bounded, highest

__all__ = ["FILLER", "Kept", "Order", "SelectionPlan", "order", "pool_scores", "select", "select_layers"]

Rank = Callable[[Tensor, list[int]], Tensor]


@dataclass(frozen=True)
class Kept:
    """The kept positions of one layer.

    Attributes:
        indices: [B, H, K] int64 key indices, ascending; where a row and head keep fewer than K, FILLER (−1) fills
            up on the left.
        counts: [B, H] int64 number of kept tokens of each row and head.
        rows: number of kept tokens of each batch row, if all heads keep equally many and the host knows it; else None.
    """

    indices: Tensor
    counts: Tensor
    rows: tuple[int, ...] | None = None

    def valid(self) -> Tensor:
        """Return [B, H, K] bool, True where a slot holds a token and not filler."""
        return self.indices != FILLER

    def select_rows(self, rows: Tensor) -> Kept:
        """The choice of these batch rows."""
        indices, counts = (x.index_select(0, rows.to(x.device)) for x in (self.indices, self.counts))
        return Kept(indices, counts)

    def mask(self, kv_len: int) -> Tensor:
        """Return [B, H, N] bool, True at the keys that are kept."""
        slots = torch.where(self.valid(), self.indices, kv_len)
        kept = torch.zeros(*slots.shape[:2], kv_len + 1, dtype=torch.bool, device=slots.device)
        return kept.scatter_(2, slots, True)[..., :kv_len]


def pool_scores(
    scores: Tensor,
    *,
    pool: Pool,
    kernel_size: int,
    lengths: Sequence[int] | None = None,
    stop: int | None = None,
) -> Tensor:
    """Return scores pooled along keys, stride 1, same length; pads and the array's ends are edges.

    Max pads with −inf; avg pads with zeros and always divides by the kernel size, as DropKV's authors do.

    Args:
        scores: [B, H, N] float32.
        lengths: real keys of each batch row, the rest being pads on the left.
        stop: pool only the keys before `stop`; the others pass through.
    """
    if pool == "none" or kernel_size == 1:
        return scores
    stop = scores.shape[2] if stop is None else stop
    head, tail = scores[..., :stop], scores[..., stop:]
    if stop == 0:
        return scores
    edge = -torch.inf if pool == "max" else 0.0
    if lengths is not None:
        head = head.masked_fill(_pads(lengths, scores)[..., :stop], edge)
    if pool == "max":
        pooled = F.max_pool1d(head, kernel_size, stride=1, padding=kernel_size // 2)
    else:
        pooled = F.avg_pool1d(head, kernel_size, stride=1, padding=kernel_size // 2, count_include_pad=True)
    return torch.cat([pooled, tail], dim=-1) if tail.shape[-1] else pooled


def select(
    scores: Tensor,
    *,
    n_keep: int | Sequence[int],
    window: int = 0,
    pool: Pool = "none",
    kernel_size: int = 1,
    pool_scope: PoolScope = "all",
    sinks: int = 0,
    protect: Sequence[Span] | Sequence[Sequence[Span]] = (),
    allocation: Allocation | AllocationRule = "uniform",
    lengths: Sequence[int] | Tensor | None = None,
    forced_tail: int | Sequence[int] = 0,
    layer: tuple[int, int] = (0, 1),
    rank: Rank | None = None,
    shared: bool = False,
    impl: Impl = "auto",
    peers: Peers | None = None,
) -> Kept:
    """Choose the tokens to keep.

    Scores are pooled, the protected tokens are taken by index, and the highest of the others fill up to `n_keep`;
    equal scores are broken by position, the earlier token first. NaN counts as the lowest score, and an infinite score
    as the largest finite one of its sign (a quarter of the dtype's range; under average pooling that, divided by the
    kernel size), so that counts and protection hold whatever the scores are.

    Args:
        scores: [B, H, N] floating point, higher = keep.
        n_keep: tokens each head keeps, protected ones included; one number, or one per batch row.
        window: the last tokens, always kept.
        pool: "max", "avg" or "none": pooling of scores along keys before the choice.
        kernel_size: odd length of the pooling kernel, stride 1.
        pool_scope: "all" pools over every key, the window's included; "prefix" over the keys before the window.
        sinks: the first real tokens, always kept.
        protect: spans (start, stop) of real-token positions, always kept; or a list of spans for each batch row.
        allocation: how the layer's budget is spread over its heads: "uniform"; "shared": one set for all, by their
            mean score; "ada", "ada-kvpress", "heads": heads compete; "pyramid": lower layers keep more; or a rule.
            "layer" and "global" need every layer's scores: `order` and `select_layers`, or `allocation.Contest`.
        lengths: real keys of each batch row; pads lie on the left and are never chosen.
        forced_tail: the last tokens, always kept, beside the window: whichever reaches further back counts. One
            number, or one per batch row.
        layer: (index, number of layers), for rules that tell layers apart; `n_keep` is the mean over them.
        rank: turns pooled scores into the order of keeping, given each row's budget; see `Method.rank`.
        shared: keep one set for all heads, whatever the rule.
        impl: "auto" takes the fused kernel for scores on CUDA if it covers the rule; "triton" raises if it cannot; any
            other name is plain torch. All choose the same tokens.
        peers: processes that hold the layer's other heads. One set for all heads, and heads that compete, take all of
            them into account, by one exchange. `rank` must then look at one head alone, and `shared` excludes it.

    Raises:
        TypeError, ValueError: an argument out of its range, `n_keep` below what is protected, or impl="triton" for a
            selection that the kernel cannot make.
    """
    plan = SelectionPlan.check(
        _rows_of(scores, lengths), n_keep=n_keep, window=window, pool=pool, kernel_size=kernel_size,
        pool_scope=pool_scope, sinks=sinks, protect=protect, allocation=allocation, forced_tail=forced_tail,
        shared=shared,
    )  # fmt: skip
    expect_choice("impl", impl, get_args(Impl))
    return choose(scores, plan.of_layer(*layer), rank=rank, impl=impl, peers=peers)


def choose(
    scores: Tensor, plan: SelectionPlan, *, rank: Rank | None = None, impl: Impl = "auto", peers: Peers | None = None
) -> Kept:
    """Choose the tokens to keep by a plan for these scores; see `select`."""
    if impl == "triton" or (impl == "auto" and scores.is_cuda):
        reason = _fused_unsupported(scores, plan, rank)
        if reason is None:
            return _select_fused(scores, plan, peers)
        if impl == "triton":
            raise ValueError(f"impl: expected one that can take this selection, got 'triton': {reason}")
    chosen = order_by(scores, plan, rank, peers)
    heads, rule = scores.shape[1], chosen.rule
    across = None if plan.shared else peers  # one set for all heads is agreed on already
    counts = rule.head_counts(chosen.priority, chosen.n_keep, chosen.fixed, across)
    if chosen.rule.over_layers:
        raise ValueError(
            f"allocation: expected a rule for one layer's scores, got {chosen.rule.name!r}, which compares all layers'"
        )
    most = int(counts.max()) if chosen.rule.ragged else max(chosen.n_keep)
    indices = highest(chosen.priority, counts, most)
    rows = None if chosen.rule.ragged else tuple(chosen.n_keep)
    return Kept(indices.expand(-1, heads, -1), counts.expand(-1, heads), rows)


class Order(NamedTuple):
    """The keys' order of keeping, before budgets are spread over heads.

    Attributes:
        priority: [B, H or 1, N], +inf at always-kept keys, −inf at pads.
        n_keep: tokens that each head of a batch row keeps in this layer.
        fixed: how many of them are kept whatever their score.
        rule: how the budget is spread.
    """

    priority: Tensor
    n_keep: list[int]
    fixed: list[int]
    rule: AllocationRule


def order(
    scores: Tensor,
    *,
    n_keep: int | Sequence[int],
    window: int = 0,
    pool: Pool = "none",
    kernel_size: int = 1,
    pool_scope: PoolScope = "all",
    sinks: int = 0,
    protect: Sequence[Span] | Sequence[Sequence[Span]] = (),
    allocation: Allocation | AllocationRule = "uniform",
    lengths: Sequence[int] | Tensor | None = None,
    forced_tail: int | Sequence[int] = 0,
    layer: tuple[int, int] = (0, 1),
    rank: Rank | None = None,
    shared: bool = False,
) -> Order:
    """Pool and protect, but do not choose yet; arguments and errors are those of `select`.

    Under "layer" the priorities are the scores' shares of the layer's total; under "global" they are the scores.
    """
    plan = SelectionPlan.check(
        _rows_of(scores, lengths), n_keep=n_keep, window=window, pool=pool, kernel_size=kernel_size,
        pool_scope=pool_scope, sinks=sinks, protect=protect, allocation=allocation, forced_tail=forced_tail,
        shared=shared,
    )  # fmt: skip
    return order_by(scores, plan.of_layer(*layer), rank)


def select_layers(orders: Sequence[Order]) -> list[Kept]:
    """Return what each layer keeps under a rule that compares all layers.

    Args:
        orders: of `order`, one per layer, of one batch.
    """
    rows = range(orders[0].priority.shape[0])
    totals = [sum((each.n_keep[b] - each.fixed[b]) * each.priority.shape[1] for each in orders) for b in rows]
    kept = []
    for each, free in zip(orders, decide([each.priority for each in orders], totals), strict=True):
        counts = free.to(each.priority.device) + to_device(each.fixed, each.priority.device)[:, None]
        kept.append(Kept(highest(each.priority, counts, int(counts.max())), counts))
    return kept


class SelectionPlan(NamedTuple):
    """The checked arguments of a selection, as numbers on the host: the same for all layers of a prompt.

    Attributes:
        rule: how the layer's budget is spread; shared: one set for all heads.
        pool, kernel_size: pooling of the scores along keys; window: of the last keys, which `prefix` leaves out of it.
        rows: real keys of each batch row.
        spans: always-kept positions of each row; fixed: how many those are.
        n_keep: tokens each head of a row keeps, on average over the layers.
        tails: last keys always kept, of each row; sinks: first ones.
        scattered: spans are protected beside window and sinks.
        parts: how many scores pooling adds up; nan: what a score that is no number becomes, None: the lowest score.
    """

    rule: AllocationRule
    shared: bool
    pool: Pool
    kernel_size: int
    window: int
    prefix: bool
    rows: list[int]
    spans: list[tuple[Span, ...]]
    fixed: list[int]
    n_keep: list[int]
    tails: list[int]
    sinks: int
    scattered: bool
    parts: int
    nan: float | None

    @classmethod
    def check(
        cls,
        rows: list[int],
        *,
        n_keep: int | Sequence[int],
        window: int = 0,
        pool: Pool = "none",
        kernel_size: int = 1,
        pool_scope: PoolScope = "all",
        sinks: int = 0,
        protect: Sequence[Span] | Sequence[Sequence[Span]] = (),
        allocation: Allocation | AllocationRule = "uniform",
        forced_tail: int | Sequence[int] = 0,
        shared: bool = False,
    ) -> SelectionPlan:
        """Return the plan for prompts of `rows` real keys; the other arguments and the errors are those of `select`."""
        expect_int("window", window, at_least=0)
        expect_int("sinks", sinks, at_least=0)
        expect_choice("pool", pool, get_args(Pool))
        expect_choice("pool_scope", pool_scope, get_args(PoolScope))
        expect_odd("kernel_size", kernel_size)
        rule = resolve_allocation(allocation)
        forced = _per_row("forced_tail", forced_tail, len(rows))
        tails = [max(window, expect_int("forced_tail", n, at_least=0)) for n in forced]
        wanted = _row_spans(protect, len(rows))
        spans = [
            fixed_spans(n, window=tail, sinks=sinks, protect=own)
            for n, tail, own in zip(rows, tails, wanted, strict=True)
        ]
        fixed = [count(s) for s in spans]
        return cls(
            rule=rule,
            shared=shared or isinstance(rule, Shared),
            pool=pool,
            kernel_size=kernel_size,
            window=window,
            prefix=pool_scope == "prefix",
            rows=rows,
            spans=spans,
            fixed=fixed,
            n_keep=_row_counts(n_keep, rows, fixed),
            tails=tails,
            sinks=sinks,
            scattered=any(wanted),
            parts=kernel_size if pool == "avg" else 1,
            nan=0.0 if rule.over_layers and rule.by_share else None,  # shares are not negative
        )

    def of_layer(self, layer: int, layers: int) -> SelectionPlan:
        """Return the plan of one of several layers, whose budgets may differ."""
        each = zip(self.n_keep, self.fixed, self.rows, strict=True)
        return self._replace(n_keep=[self.rule.layer_budget(*row, layer, layers) for row in each])

    def over(self, kv_len: int) -> tuple[list[int] | None, int]:
        """Return each row's real keys of `kv_len`, or None if no row has pads, and the number of pooled keys."""
        stop = max(0, kv_len - self.window) if self.prefix else kv_len
        return self.rows if any(n < kv_len for n in self.rows) else None, stop


def order_by(scores: Tensor, plan: SelectionPlan, rank: Rank | None = None, peers: Peers | None = None) -> Order:
    """Return the keys' order of keeping by a plan for these scores; see `order`."""
    scores = bounded(scores.float() if scores.dtype.itemsize < 4 else scores, parts=plan.parts, nan=plan.nan)
    if plan.shared:
        scores = mean_over_heads(scores, peers)
    padded, stop = plan.over(scores.shape[2])
    pooled = pool_scores(scores, pool=plan.pool, kernel_size=plan.kernel_size, lengths=padded, stop=stop)
    protected = _protected(plan.spans, plan.rows, pooled)
    pads = None if padded is None else _pads(padded, pooled)
    pooled = _marked(pooled, protected, pads)
    if rank is not None:
        ranked = rank(pooled, plan.n_keep)
        pooled = _marked(ranked.nan_to_num(torch.finfo(ranked.dtype).min), protected, pads)
    priority = plan.rule.across_layers(pooled, plan.n_keep) if plan.rule.over_layers else pooled
    return Order(priority, plan.n_keep, plan.fixed, plan.rule)


def _fused_unsupported(scores: Tensor, plan: SelectionPlan, rank: Rank | None) -> str | None:
    """Return None if the fused kernel can make this selection, otherwise the reason why not."""
    if not scores.is_cuda:
        return f"the scores are on {scores.device}, the kernel runs on CUDA"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install decantkv[triton])"
    if plan.rule.ragged or plan.rule.over_layers:
        return f"the allocation {plan.rule.name!r} compares heads or layers"
    if rank is not None:
        return "the method chooses in two stages"
    if scores.dtype != torch.float32:
        return f"the scores are {scores.dtype}, not float32"
    return None


def _select_fused(scores: Tensor, plan: SelectionPlan, peers: Peers | None) -> Kept:
    """Make the same choice in one pass of the fused kernel; the host does not wait."""
    from decantkv import kernels

    batch, heads, kv_len = scores.shape
    device, most, tail = scores.device, max(plan.n_keep), min(plan.tails)
    if plan.shared:
        scores = mean_over_heads(bounded(scores, parts=plan.parts, nan=plan.nan), peers)
    even, (padded, stop) = min(plan.n_keep) == most, plan.over(kv_len)
    counts = scores.new_full((batch, scores.shape[1]), most, dtype=torch.int64)
    if not even:
        counts = to_device(plan.n_keep, device)[:, None].expand_as(counts).contiguous()
    start = None if padded is None else to_device([kv_len - n for n in padded], device)
    forced = None
    if plan.scattered or max(plan.tails) > tail:  # sinks and the common tail are numbers to the kernel
        forced = _protected(plan.spans, plan.rows, scores)[:, 0]
    indices = kernels.select_topk(
        scores.contiguous(),
        most,
        counts=None if even else counts,
        start=start,
        pool="none" if plan.kernel_size == 1 else plan.pool,
        kernel_size=plan.kernel_size,
        pool_stop=None if stop == kv_len else stop,
        sinks=plan.sinks,
        window=tail,
        forced=forced,
    )
    return Kept(indices.expand(-1, heads, -1), counts.expand(-1, heads), tuple(plan.n_keep))


def _marked(scores: Tensor, protected: Tensor, pads: Tensor | None) -> Tensor:
    """Return finite scores with protected tokens at +inf and pads, if there are any, at −inf."""
    marked = scores.masked_fill(protected, torch.inf)
    return marked if pads is None else marked.masked_fill_(pads, -torch.inf)


def _per_row(argument: str, value: int | Sequence[int], batch: int) -> list[int]:
    wanted = list(value) if isinstance(value, Sequence) else [value] * batch
    if len(wanted) != batch:
        raise ValueError(f"{argument}: expected one number or {batch}, one per batch row, got {len(wanted)}")
    return wanted


def _row_spans(protect: object, batch: int) -> list[tuple[Span, ...]]:
    """Return the protected spans of each row, given for all rows or row by row."""
    by_row = isinstance(protect, Sequence) and any(
        isinstance(entry, Sequence)
        and (not entry or (isinstance(entry[0], Sequence) and not isinstance(entry[0], str)))
        for entry in protect
    )
    if not by_row or not isinstance(protect, Sequence):
        return [expect_spans("protect", protect)] * batch
    if len(protect) != batch:
        raise ValueError(f"protect: expected a list of spans for each of {batch} batch rows, got {len(protect)}")
    return [expect_spans("protect", spans) for spans in protect]


def _rows_of(scores: object, lengths: Sequence[int] | Tensor | None) -> list[int]:
    """Return the real keys of each batch row of scores [B, H, N]."""
    if not isinstance(scores, Tensor) or scores.dim() != 3 or not scores.is_floating_point():
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores: expected a floating-point tensor [batch, KV heads, keys], got {got}")
    batch, _, kv_len = scores.shape
    if lengths is None:
        return [kv_len] * batch
    rows = [int(n) for n in (lengths.tolist() if isinstance(lengths, Tensor) else lengths)]
    if len(rows) != batch or not all(1 <= n <= kv_len for n in rows):
        raise ValueError(f"lengths: expected {batch} numbers from 1 to {kv_len}, got {rows}")
    return rows


def _row_counts(n_keep: int | Sequence[int], rows: list[int], fixed: list[int]) -> list[int]:
    counts = []
    for number, length, least in zip(_per_row("n_keep", n_keep, len(rows)), rows, fixed, strict=True):
        number = min(expect_int("n_keep", number, at_least=1), length)
        if number < least:
            raise ValueError(
                f"n_keep: expected at least {least}, which window, sinks and protect always keep, got {number}"
            )
        counts.append(number)
    return counts


def _pads(lengths: Sequence[int], scores: Tensor) -> Tensor:
    """Return [B, 1, N] bool, True at a pad."""
    position = torch.arange(scores.shape[2], device=scores.device)
    return position < (scores.shape[2] - to_device(lengths, scores.device))[:, None, None]


def _protected(fixed: list[tuple[Span, ...]], rows: list[int], scores: Tensor) -> Tensor:
    """Return [B, 1, N] bool, True at always-kept keys; spans count from a row's first real token."""
    kv_len = scores.shape[2]
    protected = torch.zeros(len(rows), 1, kv_len, dtype=torch.bool, device="cpu")
    for row, (spans, length) in enumerate(zip(fixed, rows, strict=True)):
        for start, stop in spans:
            protected[row, 0, kv_len - length + start : kv_len - length + stop] = True
    return move(protected, scores.device)
