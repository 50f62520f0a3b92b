"""A prompt's eviction in one layer: score by its own attention call, select, compact, write down."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decantkv.base.options import Need
from decantkv.base.precision import without_autocast
from decantkv.cache import re_eviction, token_cap
from decantkv.cache.bounds import UNBOUNDED, Bounds
from decantkv.cache.call_window import window_of
from decantkv.cache.layer_contest import LayerContest
from decantkv.cache.phases import KEPT_WHOLE, Answer, Prompt, Waiting, Whole
from decantkv.cache.policy import Policy
from decantkv.cache.positions import Trail
from decantkv.cache.re_eviction import EvictedAnswer
from decantkv.cache.recorder import LayerRecord, Recorder
from decantkv.cache.stores import DENSE
from decantkv.cache.stores.dense import DenseStore
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.cache.stores.store import Store
from decantkv.hf.attention_hook import AttentionCall, CallTerms
from decantkv.hf.masks import PromptMask
from decantkv.scoring.rehearsal import Rehearsal
from decantkv.scoring.window import AttentionWindow, Rotate
from decantkv.selection.allocation import UNIFORM, Shared
from decantkv.selection.prompt_budget import PromptBudget
from decantkv.selection.selector import Kept
from decantkv.selection.tensor_parallel import Peers
from decantkv.settings import Settings

if TYPE_CHECKING:
    from decantkv.cache.layer import EvictingLayer


@dataclass(frozen=True, eq=False)
class Eviction(Policy):
    """Keep the costliest tokens of each prompt.

    Attributes:
        settings: what to evict by, and how much to keep.
        recorder: where evictions are written down.
        bounds: on what is stored at once.
        shared: one set for all heads of a layer.
        rotate: turns keys by positions, for methods that need it.
        attends_twice: the model makes two attention calls a layer, of which the cache sees one.
        read_again: later layers attend to a layer's keys by calls that the cache does not see.
        own: layers may attend to what they store by themselves.
        peers: processes that hold the layers' other heads.
        contest: of all layers for one budget, where layers compete.
    """

    settings: Settings
    recorder: Recorder
    bounds: Bounds = UNBOUNDED
    shared: bool = False
    rotate: Rotate | None = None
    attends_twice: bool = False
    read_again: bool = False
    own: bool = True
    peers: Peers | None = None
    contest: LayerContest | None = None

    @functools.cached_property
    def rows(self) -> int:  # type: ignore[override]
        """As `Policy.rows`."""
        return self.settings.rows

    @functools.cached_property
    def needs(self) -> frozenset[Need]:
        """Inputs of the method beyond the window's queries, the keys and the values."""
        return self.settings.method.needs

    @functools.cached_property
    def reads_ids(self) -> bool:  # type: ignore[override]
        """As `Policy.reads_ids`."""
        return bool(self.settings.chats)

    @functools.cached_property
    def every_query(self) -> bool:  # type: ignore[override]
        """As `Policy.every_query`."""
        return "queries" in self.needs

    @functools.cached_property
    def listens(self) -> bool:  # type: ignore[override]
        """As `Policy.listens`."""
        return self.bounds.every is not None

    @functools.cached_property
    def uneven(self) -> bool:  # type: ignore[override]
        """As `Policy.uneven`."""
        return self.settings.allocation.by_layer

    @functools.cached_property
    def rehearsal(self) -> Rehearsal | None:  # type: ignore[override]
        """As `Policy.rehearsal`."""
        return self.settings.rehearsal

    # -- a prompt

    def decide(self, layer: EvictingLayer, prompt: Prompt, call: AttentionCall, seen: PromptMask) -> None:
        """Score, select, compact; a prompt within its budget is kept whole."""
        keys, slots, device = prompt.keys, prompt.slots, prompt.keys.device
        if self.bounds.every is not None:
            self.check_stored_heads(call, prompt, "every")
        if self.bounds.max_kv_tokens is not None:
            self._check_cap(prompt, self.bounds.max_kv_tokens)
        held = seen.lengths if seen.lengths is not None else (keys.shape[2],) * keys.shape[0]
        lengths = slots.seen(held)
        budget = layer.cache.prompt_budget(self.settings, lengths)
        counts = [min(n, most) for n, most in zip(budget.n_keep, held, strict=True)]
        if counts != list(budget.n_keep):
            self.recorder.count("capped")
        before = sum({x.data_ptr(): x.nbytes for x in (keys, prompt.values)}.values())  # slack of chunks apart
        before = before * layer.logical // keys.shape[2]  # of all that was read, not of what early chunks left
        contested = False
        if counts == list(held):
            kept_counts = torch.tensor(counts, device=device)[:, None].expand(-1, keys.shape[1])
            left = slots.left(kept_counts, counts)
            answer = self._answer(layer, call, lengths, counts)
            self._hold(layer, prompt, call, self._stored_whole(layer, prompt, seen, left), answer, left)
        else:
            kept = self._choose(layer, prompt, call, seen, counts, budget)
            with self.recorder.stopwatch.measure("compaction", device):
                store = self._stored(layer, prompt, call, kept)
                answer = KEPT_WHOLE if self.bounds.every is None else self._answer(layer, call, lengths, kept.rows)
                self._hold(layer, prompt, call, store, answer, slots.origin(kept))
            kept_counts, contested = kept.counts, self.contest is not None
        if contested and self.contest is not None:
            for settled, counts_of, full in self.contest.note(layer, before):
                self._record(settled, budget, counts_of, full)
        else:
            self._record(layer, budget, kept_counts, before)

    def _answer(
        self, layer: EvictingLayer, call: AttentionCall, lengths: Sequence[int], counts: Sequence[int] | None
    ) -> Answer:
        """Return the answer's state; `counts`: tokens that every head of a row keeps, None if heads differ."""
        if self.bounds.every is None or counts is None:
            return KEPT_WHOLE
        return re_eviction.begin(self, layer, call.query, lengths, counts)

    def _stored_whole(self, layer: EvictingLayer, prompt: Prompt, seen: PromptMask, left: Kept | None) -> DenseStore:
        """Return a store of all of the prompt, or of all that a cap left of it."""
        kind = DENSE[self.bounds.store]
        store = kind.of_all(prompt.keys, prompt.values, seen.lengths, announced=layer.until_eviction())
        store.whole = left is None
        return store

    def _stored(self, layer: EvictingLayer, prompt: Prompt, call: AttentionCall, kept: Kept) -> Store:
        """Return a store of the kept tokens; heads that the cache does not tell apart share one choice."""
        store: Store
        if self.settings.allocation.ragged:
            store = RaggedStore.from_kept(prompt.keys, prompt.values, kept)
        else:
            kind, announced = DENSE[self.bounds.store], layer.until_eviction()
            store = kind.from_kept(prompt.keys, prompt.values, kept, announced=announced)
        if self.attends_twice or self.read_again:
            self.check_filler(store, call.attention_class)
        if self.rotate is not None and self.settings.method.renumbers:
            store.renumber(kept, layer.logical, self.rotate)
        return store

    def _hold(
        self, layer: EvictingLayer, prompt: Prompt, call: AttentionCall, store: Store, answer: Answer, kept: Kept | None
    ) -> None:
        """Hold the store, where the layer attends by itself as a ragged one."""
        same_heads = call.key.shape[1] == prompt.keys.shape[1]
        own = self.own and same_heads and call.causal and not self.attends_twice and self.bounds.own(call.key.device)
        layer.hold(RaggedStore.of_dense(store) if own and isinstance(store, DenseStore) else store, answer, kept)

    def _choose(
        self, layer: EvictingLayer, prompt: Prompt, call: AttentionCall, seen: PromptMask, counts: list[int],
        budget: PromptBudget,
    ) -> Kept:  # fmt: skip
        heads, stopwatch, device = prompt.keys.shape[1], self.recorder.stopwatch, prompt.keys.device
        with stopwatch.measure("scoring", device):
            win = window_of(
                call, seen, self.rows, layer.layer_idx, needs=self.needs, rotate=self.rotate,
                hints=self._hints(prompt) if self.bounds.reuse_lse else None,
            )  # fmt: skip
            scores = self._rehearsed(prompt.rehearsed[0], win) if prompt.rehearsed else self.settings.score(win)
        # a latent cache (MLA) stores one head for all, some models repeat heads after the cache
        shared = self.shared or call.key.shape[1] != heads
        settings = self.settings
        terms: dict[str, Any] = {"budget": budget}
        if isinstance(prompt.slots, Trail):
            settings, terms = self._terms(layer, prompt.slots, counts, budget)
        terms |= {"win": win, "lengths": seen.lengths, "layer": layer.place, "shared": shared}
        with stopwatch.measure("selection", device):
            if self.contest is None:
                kept = settings.choose(scores, peers=self.peers, **terms)
            else:
                width = prompt.keys.shape[3] + prompt.values.shape[3]
                kept = self.contest.enter(layer, settings.order(scores, **terms), width)
        if call.key.shape[1] != heads:
            kept = Kept(kept.indices[:, :1].expand(-1, heads, -1), kept.counts[:, :1].expand(-1, heads), kept.rows)
        return kept

    def _rehearsed(self, scores: Tensor, win: AttentionWindow) -> Tensor:
        """[B, HK, N] by the queries of a rehearsal, or by these and the prompt's last ones."""
        if self.rehearsal is None or not self.rehearsal.window:
            return scores
        return self.settings.beside(scores, self.settings.score(win), win.window)

    def _hints(self, prompt: Prompt) -> tuple[Tensor, Tensor] | None:
        """Return the output and log-sum-exp that the prompt's attention gave, or None; both cases are counted."""
        if isinstance(prompt.lse, tuple):
            self.recorder.count("reused_lse")
            return prompt.lse
        self.recorder.count_reason("without_lse", prompt.lse or "the prompt came in chunks")
        return None

    def _terms(
        self, layer: EvictingLayer, trail: Trail, counts: list[int], budget: PromptBudget
    ) -> tuple[Settings, dict[str, Any]]:
        """Return settings for what is stored, and arguments of `choose`: counts, and the slots of protected tokens."""
        spans = self.settings.protect
        forced = trail.inside(spans, [layer.logical - n for n in trail.given]) if spans else None
        settings = dataclasses.replace(self.settings, protect=())
        if spans and settings.allocation.by_layer:  # a layer's share is never below what is forced into it
            rule = settings.allocation
            counts = [
                rule.layer_budget(n, fixed, length, *layer.place)
                for n, fixed, length in zip(counts, budget.fixed, trail.held, strict=True)
            ]
            settings = dataclasses.replace(settings, allocation=UNIFORM)
        return settings, {"n_keep": counts, "forced": forced}

    def _record(self, layer: EvictingLayer, budget: PromptBudget, counts: Tensor, bytes_before: int) -> None:
        """Write down what was kept."""
        store = layer.store
        after = 0 if store is None else store.nbytes()
        self.recorder.records.add(
            LayerRecord(layer.layer_idx, budget.lengths, counts, bytes_before, after, budget.raised, budget.unscored)
        )  # fmt: skip

    # -- rounds of eviction before and after

    def choose_round(self, win: AttentionWindow, lengths: list[int], counts: list[int], forced: Tensor | None) -> Kept:
        """Return the slots each head keeps in one round; every head of a row keeps equally many.

        Args:
            win: over the stored tokens.
            lengths: real tokens stored by each row; counts: how many of them stay.
            forced: [B, H, N] bool, slots that stay whatever their score; None: none beyond window and sinks.
        """
        self.recorder.count("rounds")
        one = self.shared or isinstance(self.settings.allocation, Shared)
        plain = dataclasses.replace(self.settings, protect=(), allocation=Shared() if one else UNIFORM)
        stopwatch = self.recorder.stopwatch
        with stopwatch.measure("scoring", win.k.device):
            scores = plain.score(win)
        with stopwatch.measure("selection", win.k.device):
            return plain.choose(
                scores, win=win, lengths=lengths, shared=self.shared, n_keep=counts, forced=forced, peers=self.peers
            )

    def thinned(self, layer: EvictingLayer, prompt: Waiting, call: AttentionCall) -> Waiting:
        """As `Policy.thinned`."""
        if self.bounds.max_kv_tokens is None:
            return prompt
        with without_autocast(call.key.device):
            return token_cap.thin(self, layer, prompt, call, self.bounds.max_kv_tokens)

    def attended(self, layer: EvictingLayer, call: AttentionCall) -> None:
        """Every so many tokens, evict from all that is stored."""
        if not isinstance(layer.answer, EvictedAnswer):
            return
        layer.answer.remember(call.query, in_place=layer.postponed)
        if layer.postponed:
            layer.noted = CallTerms.of(call)
        elif self.due(layer):
            self.renew(layer, CallTerms.of(call))

    def due(self, layer: EvictingLayer) -> bool:
        """As `Policy.due`."""
        every, answer = self.bounds.every, layer.answer
        return every is not None and isinstance(answer, EvictedAnswer) and layer.logical - answer.renewed >= every

    @torch.no_grad()
    def renew(self, layer: EvictingLayer, terms: CallTerms) -> None:
        """As `Policy.renew`."""
        if isinstance(layer.phase, Whole):
            with without_autocast(layer.phase.store.buffers()[0].device):
                re_eviction.renew(self, layer, terms)

    def answer_of(self, state: Mapping[str, Tensor], batch: int, logical: int) -> Answer:
        """As `Policy.answer_of`."""
        return EvictedAnswer.from_state(state, batch=batch, logical=logical, rows=self.rows) if state else KEPT_WHOLE

    # -- what cannot be evicted

    def _check_cap(self, prompt: Prompt, most: int) -> None:
        """Raise where a prompt that was to be thinned chunk by chunk came in one piece."""
        chunk, length = self.bounds.prefill_chunk, prompt.keys.shape[2]
        if chunk is not None and not isinstance(prompt.slots, Trail) and length > max(most, chunk):
            raise ValueError(
                f"max_kv_tokens: expected a prompt in chunks of {chunk}, by generate or a loop under deferred, "
                f"got {length} tokens at once"
            )

    def check_filler(self, store: Store, attention_class: str) -> None:
        """Raise where filler is stored that a call which the cache does not see would take for tokens."""
        if (self.attends_twice or self.read_again) and store.hides:
            why = "which attends twice a layer" if self.attends_twice else "whose keys later layers read again"
            raise ValueError(
                f"input_ids: expected prompts that keep equally many tokens with {attention_class}, {why}, "
                "got rows of unequal length"
            )

    def check_stored_heads(self, call: AttentionCall, prompt: Prompt, option: str) -> None:
        """Raise ValueError where the attention reads other heads than those stored: no round can score by them."""
        if call.key.shape[1] != prompt.keys.shape[1]:
            raise ValueError(
                f"{option}: expected a model that attends to the heads it caches, got {call.attention_class}, which "
                "makes its heads from what it caches"
            )
