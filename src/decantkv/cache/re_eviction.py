"""Evictions while an answer is written (`every`): of prompt and answer alike, as the last queries score them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decantkv.base.precision import writable
from decantkv.cache.call_window import window_of
from decantkv.cache.phases import Answer, Evicted, Whole
from decantkv.cache.positions import Trail
from decantkv.cache.stores.dense import gather_kv
from decantkv.cache.stores.store import check
from decantkv.hf.attention_hook import CallTerms
from decantkv.hf.masks import PromptMask

if TYPE_CHECKING:
    from decantkv.cache.eviction import Eviction
    from decantkv.cache.layer import EvictingLayer


class EvictedAnswer(Answer):
    """The state of an answer that is evicted again while it is written.

    Attributes:
        frame: [B, 3] int64 on the CPU: a row's first position, its prompt's end, and tokens it keeps at most.
        renewed: logical length at the last eviction.
        recent: [B, HQ, ≤ rows, D] the last queries.
        rows: how many of them a window holds.
        given: how many were ever remembered.
    """

    evicted = True

    def __init__(self, frame: Tensor, renewed: int, recent: Tensor, rows: int) -> None:
        self.frame, self.renewed, self.recent, self.rows = frame, renewed, recent, rows
        self.given = 0

    @classmethod
    def begin(cls, frame: Tensor, logical: int, query: Tensor, rows: int) -> EvictedAnswer:
        """After a prompt of `logical` tokens whose attention had these queries."""
        with torch.inference_mode(False):
            return cls(frame, logical, query[:, :, -rows:].clone(), rows)

    @property
    def steady(self) -> bool:  # type: ignore[override]
        """Return whether a window of queries was seen, so that further ones are written in place."""
        return self.recent.shape[2] == self.rows

    def remember(self, query: Tensor, *, in_place: bool) -> None:
        """Add new queries and forget those that no window will hold again.

        Args:
            in_place: a graph may hold the tensor.
        """
        new = query[:, :, -self.rows :]
        self.given += query.shape[2]
        if in_place and self.steady:
            held = self.recent = writable(self.recent, new)
            held.copy_(torch.cat([held[:, :, new.shape[2] :], new], 2))
        else:
            with torch.inference_mode(False):
                self.recent = torch.cat([self.recent, new], 2)[:, :, -self.rows :].clone()

    def crop(self, removed: int, logical: int) -> None:
        """The newest queries go with their tokens."""
        self.recent = self.recent[:, :, : max(0, self.recent.shape[2] - removed)]
        self.renewed = min(self.renewed, logical)

    def standing(self) -> tuple[Any, ...]:
        """As `Answer.standing`."""
        return self.renewed, self.recent, self.given

    def go_back(self, standing: tuple[Any, ...]) -> None:
        """As `Answer.go_back`; queries that newer ones were written over are gone."""
        self.renewed, recent, given = standing
        if self.recent is recent:
            recent = recent[:, :, : max(0, recent.shape[2] - self.given + given)]
        self.recent, self.given = recent, given

    def select_rows(self, rows: Tensor) -> None:
        """As `Answer.select_rows`."""
        self.recent = self.recent.index_select(0, rows.to(self.recent.device))
        self.frame = self.frame.index_select(0, rows.to(self.frame.device))

    def mark(self) -> Tensor | None:
        """As `Answer.mark`."""
        return self.recent.clone()

    def back_to(self, mark: Tensor | None) -> None:
        """As `Answer.back_to`."""
        if mark is not None:
            self.recent.copy_(mark)

    def state(self) -> dict[str, Tensor]:
        """Return the answer as plain tensors."""
        renewed = torch.tensor([self.renewed], device="cpu")
        return {"frame": self.frame, "recent": self.recent, "renewed": renewed}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], *, batch: int, logical: int, rows: int) -> EvictedAnswer:
        """Return the answer that `state` described.

        Raises:
            KeyError, ValueError: the state contradicts itself.
        """
        frame, recent, renewed = state["frame"].cpu(), state["recent"], int(state["renewed"].item())
        fits = tuple(frame.shape) == (batch, 3) and recent.dim() == 4 and recent.shape[0] == batch
        check(fits, "a frame", "[B, 3] beside recent queries [B, HQ, w, D]")
        inside = 0 <= renewed <= logical and not bool((frame < 0).any() | (frame[:, :2] > logical).any())
        check(inside, "a frame", "inside what was read")
        return cls(frame, renewed, recent, rows)

    @classmethod
    def cat(cls, answers: Sequence[EvictedAnswer], ahead: Sequence[int]) -> EvictedAnswer:
        """Return the rows of several answers, whose tokens now come `ahead` positions later."""
        frames = [x.frame + torch.tensor([n, n, 0], device="cpu") for x, n in zip(answers, ahead, strict=True)]
        least = min(x.recent.shape[2] for x in answers)
        recent = torch.cat([x.recent[:, :, x.recent.shape[2] - least :] for x in answers])
        renewed = min(x.renewed + n for x, n in zip(answers, ahead, strict=True))
        return cls(torch.cat(frames), renewed, recent, answers[0].rows)


def begin(
    policy: Eviction, layer: EvictingLayer, query: Tensor, lengths: Sequence[int], counts: Sequence[int]
) -> Answer:
    """The answer to prompts of these lengths, of which the layer keeps `counts`; `query`: of the prompt's end."""
    bounds, settings = policy.bounds, policy.settings
    own, whole, always = bounds.decode_budget, settings.budget.tokens, settings.rounds_keep()
    if whole is not None:
        whole = settings.allocation.layer_budget(max(whole, always), always, sys.maxsize, *layer.place)
    if bounds.protect_prompt:
        most = [n + max(n if own is None else own, settings.method.window + settings.sinks) for n in counts]
    else:  # a short prompt is kept whole, and may have had fewer tokens than a round keeps whatever their score
        most = [max(own if own is not None else whole if whole is not None else n, always) for n in counts]
    rows = [(layer.logical - n, layer.logical, limit) for n, limit in zip(lengths, most, strict=True)]
    return EvictedAnswer.begin(torch.tensor(rows, device="cpu"), layer.logical, query, policy.rows)


def renew(policy: Eviction, layer: EvictingLayer, call: CallTerms) -> None:
    """Evict from what the layer stores, unless every row is within its limit."""
    phase = layer.phase
    if not isinstance(phase, Whole) or not isinstance(phase.answer, EvictedAnswer):
        return
    store, answer = phase.store, phase.answer
    # a mask that transformers made fits the first layer's slots, which may be others; `valid` hides all pads
    keys, values, held = store.right_aligned(None if policy.uneven else call.mask)
    batch, _, stored = keys.shape[:3]
    answer.renewed = layer.logical
    starts, ends, most = answer.frame.T.tolist()
    counts = [min(n, limit) for n, limit in zip(held, most, strict=True)]
    if counts == held:
        return
    trail = Trail(_positions(phase, layer.logical, held, stored), (0,) * batch, (0,) * batch)
    forced = trail.inside(policy.settings.protect, starts) if policy.settings.protect else None
    if policy.bounds.protect_prompt:
        forced = trail.inside([(0, max(ends))], [0] * batch)
    seen = PromptMask(None if set(held) == {stored} else tuple(held), None)
    win = window_of(
        call.over(answer.recent, keys, values), seen, policy.rows, layer.layer_idx, needs=policy.needs,
        rotate=policy.rotate,
    )  # fmt: skip
    keys, values = win.k, win.v  # in one dtype
    kept = policy.choose_round(win, held, counts, forced)
    with policy.recorder.stopwatch.measure("compaction", keys.device):
        announced = layer.until_eviction()
        layer.hold(store, answer, layer.kept)  # anew: no interrupted forward goes back behind an eviction
        store = store.refill(*gather_kv(keys, values, kept.indices), kept, announced=announced)
        layer.hold(store, answer, trail.origin(kept))
        policy.check_filler(store, call.attention_class)


def _positions(phase: Whole, logical: int, held: Sequence[int], stored: int) -> Tensor:
    """[B, H, S] int64: where the slots that `right_aligned` gave come from, FILLER on the left."""
    later = phase.store.later(logical)
    kept = [phase.kept.indices.expand(-1, later.shape[1], -1)] if isinstance(phase, Evicted) else []
    places = torch.cat([*kept, later], 2)
    if places.shape[2] == stored and set(held) == {stored}:  # no filler among them: in order as they are
        return places
    return places.sort(-1).values[..., -stored:]
