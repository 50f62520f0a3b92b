"""The layer that evicts: when its prompt has been read, while it comes in chunks, and while an answer is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from decantkv.base.precision import alike, without_autocast, writable
from decantkv.base.transfer import to_device
from decantkv.cache.layer import PromptLayer, gather_kv, valid_slots, window_of
from decantkv.cache.positions import UNBOUNDED, Bounds, Trail, choose
from decantkv.cache.report import LayerRecord, Recorder
from decantkv.hf.attention_hook import AttentionCall, CallTerms
from decantkv.hf.chunked_attention import attend_chunk_with_lse
from decantkv.hf.masks import PromptMask, among_new, read_prompt_mask, real_tokens
from decantkv.hf.model_parts import output_projection
from decantkv.hf.sdpa import attend_with_lse
from decantkv.scoring.window import AttentionWindow, Rotate, make_window
from decantkv.selection.allocation import UNIFORM
from decantkv.selection.selector import Kept
from decantkv.selection.tensor_parallel import Peers
from decantkv.settings import Settings

Listening = Callable[["EvictingLayer", AttentionCall, tuple[Tensor, Tensor] | None], None]


class EvictingLayer(PromptLayer):
    """Scores its prompt by the model's own attention call and keeps the costliest tokens."""

    attends_twice = False  # the model makes two attention calls a layer, of which the cache sees one
    read_again = False  # later layers attend to this layer's keys by calls that the cache does not see
    peers: Peers | None = None  # processes that hold the layer's other heads

    def __init__(
        self,
        layer_idx: int,
        cache_id: int,
        settings: Settings,
        recorder: Recorder,
        *,
        shared: bool,
        rotate: Rotate | None = None,
        bounds: Bounds = UNBOUNDED,
    ) -> None:
        super().__init__(layer_idx, cache_id, settings.rows)
        self.bounds, self.listens, self.inner = bounds, bounds.every is not None, bounds.store
        self.trail: Trail | None = None  # of a prompt that was thinned while it came
        self.frame: Tensor | None = None  # [B, 3] on the CPU: a row's first position, its prompt's end, tokens at most
        self.recent: list[Tensor] = []  # the last queries, [B, HQ, ≤ w, D] together, where answers are evicted
        self.renewed = 0  # logical length at the last eviction
        self.outside = False  # evictions of the answer are left to whoever set this, between forwards
        self.noted: CallTerms | None = None  # the attention call's terms, which they need
        self.held: tuple[int, ...] | None = None  # real tokens a waiting prompt has stored, once a chunk is in
        self.own_chunks = False  # attends to a prompt's later chunks by itself
        # the window's output and log-sum-exp, or why the attention did not give them
        self.hints: tuple[Tensor, Tensor] | str | None = None
        self.rehearsing: Listening | None = None  # takes the attention calls of tokens that are run over the prompt
        self.rehearsed: Tensor | None = None  # [B, HK, N] what their queries make of the prompt's keys
        self.rehearsal = settings.rehearsal
        self.settings, self.recorder, self.shared, self.rotate = settings, recorder, shared, rotate
        self.uneven = settings.allocation.by_layer
        self.wants_every_query = "queries" in settings.method.needs
        self.place = (0, 1)  # which of how many evicting layers; the cache knows when all are there

    def keep(self, call: AttentionCall, seen: PromptMask, rows: int) -> None:
        """Score, select, compact; a prompt within its budget is kept whole."""
        keys, values = self._prompt()
        if self.bounds.every is not None:
            self._expect_stored_heads(call, "every")
        self._check_cap(keys.shape[2])
        held = seen.lengths if seen.lengths is not None else (keys.shape[2],) * keys.shape[0]
        lengths = held if self.trail is None else self.trail.seen
        counts = [min(n, most) for n, most in zip(self.settings.n_keep(lengths), held, strict=True)]
        if self.trail is not None and counts != self.settings.n_keep(lengths):
            self.recorder.capped = True
        before = sum({x.data_ptr(): x.nbytes for x in (keys, values)}.values())  # slack of chunks apart
        if self.trail is not None:  # of all that was read, not of what early chunks left
            before = before * self.logical // keys.shape[2]
        if counts == list(held):
            self.hints = None  # the output of a prompt that is not scored
            self.store_all()
            if seen.lengths is not None:
                place = torch.arange(keys.shape[2], device=keys.device)
                self.valid = (place >= keys.shape[2] - to_device(held, keys.device)[:, None])[:, None]
            kept_counts = torch.tensor(counts, device=keys.device)[:, None].expand(-1, keys.shape[1])
            if self.trail is not None and tuple(lengths) != tuple(held):
                self.kept = Kept(self.trail.positions, kept_counts.to(keys.device), tuple(counts))
        else:
            kept = self._choose(call, seen, rows, counts)
            with self.recorder.stopwatch.measure("compaction", keys.device):
                self.store_kept(kept)
                self._check_filler(call)
                if self.rotate is not None and self.settings.method.renumbers:
                    self._renumber(kept, self.rotate)
                if self.trail is not None:
                    self.kept = self.trail.origin(kept)
            kept_counts = kept.counts
        self.record(lengths, kept_counts, before)
        self._begin_answer(call, lengths, counts)
        self.trail = None  # `kept` holds the positions from here on

    def _check_cap(self, length: int) -> None:
        """Raise where a prompt that was to be thinned chunk by chunk came in one piece."""
        most, chunk = self.bounds.max_kv_tokens, self.bounds.prefill_chunk
        if most is not None and chunk is not None and self.trail is None and length > max(most, chunk):
            raise ValueError(
                f"max_kv_tokens: expected a prompt in chunks of {chunk}, by generate or a loop under deferred, "
                f"got {length} tokens at once"
            )

    def _check_filler(self, call: AttentionCall | CallTerms) -> None:
        """Raise where filler is stored that a call which the cache does not see would take for tokens."""
        if (self.attends_twice or self.read_again) and self.valid is not None:
            why = "which attends twice a layer" if self.attends_twice else "whose keys later layers read again"
            raise ValueError(
                f"input_ids: expected prompts that keep equally many tokens with {call.attention_class}, {why}, "
                "got rows of unequal length"
            )

    def _expect_stored_heads(self, call: AttentionCall, option: str) -> None:
        """Raise ValueError where the attention reads other heads than those stored: no round can score by them."""
        if call.key.shape[1] != self._prompt()[0].shape[1]:
            raise ValueError(
                f"{option}: expected a model that attends to the heads it caches, got {call.attention_class}, which "
                "makes its heads from what it caches"
            )

    def record(self, lengths: Sequence[int], counts: Tensor, bytes_before: int) -> None:
        """Note what was kept."""
        raised, unscored = self.settings.raised(lengths), self.settings.unscored(lengths)
        record = LayerRecord(self.layer_idx, tuple(lengths), counts, bytes_before, self.kept_bytes(), raised, unscored)
        self.recorder.add(record)

    def _renumber(self, kept: Kept, rotate: Rotate) -> None:
        """Turn kept keys by as many positions as were dropped behind them, so that no distance spans a gap."""
        if self.store is None:
            return
        slots = kept.indices.shape[2]
        place = torch.arange(self.logical - slots, self.logical, device=kept.indices.device)
        ahead = torch.where(kept.valid(), place - kept.indices, 0)  # [B, H, K]
        keys = self.store.keys
        self.fill(rotate(keys.flatten(0, 1)[:, None], ahead.flatten(0, 1)).view_as(keys), self.store.values)

    def store_tensors(self) -> list[Tensor]:
        """Keys and values of the kept tokens, with the room behind them."""
        return [] if self.store is None else self.store.buffers()

    def kept_bytes(self) -> int:
        """Bytes of the stored tokens' keys and values, without the room behind them."""
        return 0 if self.store is None else self.store.nbytes()

    def _choose(self, call: AttentionCall, seen: PromptMask, rows: int, counts: list[int]) -> Kept:
        keys, _ = self._prompt()
        stopwatch, device = self.recorder.stopwatch, keys.device
        with stopwatch.measure("scoring", device):
            win = window_of(
                call, seen, rows, self.layer_idx, needs=self.settings.method.needs, rotate=self.rotate,
                hints=self._take_hints(),
            )  # fmt: skip
            scores = self._scores(win)
        # a latent cache (MLA) stores one head for all, some models repeat heads after the cache
        shared = self.shared or call.key.shape[1] != keys.shape[1]
        with stopwatch.measure("selection", device):
            kept = self._select(scores, win, seen.lengths, shared, counts)
        if call.key.shape[1] != keys.shape[1]:
            heads = keys.shape[1]
            kept = Kept(kept.indices[:, :1].expand(-1, heads, -1), kept.counts[:, :1].expand(-1, heads), kept.rows)
        return kept

    def _scores(self, win: AttentionWindow) -> Tensor:
        """[B, HK, N] by the prompt's last queries, by those of a rehearsal, or by both."""
        rehearsed, self.rehearsed = self.rehearsed, None
        if rehearsed is None:
            return self.settings.score(win)
        if self.rehearsal is None or not self.rehearsal.window:
            return rehearsed
        return self.settings.beside(rehearsed, self.settings.score(win), win.window)

    def _select(
        self, scores: Tensor, win: AttentionWindow, lengths: Sequence[int] | None, shared: bool, counts: list[int]
    ) -> Kept:
        settings, terms = self._terms(counts)
        return settings.choose(
            scores, win=win, lengths=lengths, layer=self.place, shared=shared, peers=self.peers, **terms
        )

    def _terms(self, counts: list[int]) -> tuple[Settings, dict[str, Any]]:
        """The settings for what is stored, and what they cannot know of it: counts, and where protected tokens lie."""
        if self.trail is None:
            return self.settings, {}
        starts = [self.logical - n for n in self.trail.seen]
        spans = self.settings.protect
        forced = self.trail.inside(spans, starts) if spans else None
        settings = dataclasses.replace(self.settings, protect=())
        if spans and settings.allocation.by_layer:  # a layer's share is never below what is forced into it
            rule, held, seen = settings.allocation, self.trail.held, self.trail.seen
            counts = [
                rule.layer_budget(n, fixed, length, *self.place)
                for n, fixed, length in zip(counts, map(self.settings.fixed, seen), held, strict=True)
            ]
            settings = dataclasses.replace(settings, allocation=UNIFORM)
        return settings, {"n_keep": counts, "forced": forced}

    def attend(self, call: AttentionCall) -> Tensor | None:
        """The attention of a prompt's later chunks, whose mask tells of the chunk alone; else the model's own.

        With `reuse_lse` that of a prompt in one piece too, by the op that sdpa would run.
        """
        if not self.own_chunks or self.prompt is None or self.held is None:
            return self._attend_with_lse(call) if self.bounds.reuse_lse and self.prompt is not None else None
        later = self._new_tokens(call, self.held)
        if later.window is not None or (call.mask is None and not call.causal):
            raise ValueError(
                "attention_mask: expected causal attention inside a prompt's later chunks where layers attend for "
                "themselves, got another pattern, as images have; use decode='model', or read the prompt in one piece"
            )
        held = self._held(call)
        out, lse = attend_chunk_with_lse(call.query, call.key, call.value, held=held, scale=call.scale)
        if self.rehearsing is not None and lse is not None:
            self.hints = out, lse
        return out.transpose(1, 2).contiguous()

    def _new_tokens(self, call: AttentionCall, held: tuple[int, ...]) -> PromptMask:
        """What the mask says of a chunk's own tokens, behind `held` real ones of each row."""
        new, device = call.query.shape[2], call.key.device

        def shown() -> Tensor | None:
            place = torch.arange(call.key.shape[2] - new, device=device)
            return None if self.trail is not None else place >= place.shape[0] - to_device(held, device)[:, None]

        mask = among_new(call.mask, new=new, shown=shown)
        return read_prompt_mask(mask, batch=len(held), kv_len=new, rows=new, device=device, empty=True)

    def _attend_with_lse(self, call: AttentionCall) -> Tensor | None:
        """[B, N, HQ, Dv], and the window's share of it and of the denominators in `hints`; None: the model's own."""
        made: tuple[Tensor, Tensor] | str | None = self._no_lse(call)
        if made is None:
            with torch.no_grad():
                made = attend_with_lse(call.query, call.key, call.value, scale=call.scale)
        self.hints = made
        if isinstance(made, str):
            return None
        out, lse = made
        self.hints = out[:, :, -self.rows :], lse[:, :, -self.rows :]
        return out.transpose(1, 2).contiguous()

    def _no_lse(self, call: AttentionCall) -> str | None:
        """Why a prompt's attention is left to the model, denominators unknown; None where it need not be."""
        reasons = {
            f"the attention is {call.backend!r}, not 'sdpa'": call.backend != "sdpa",
            "the prompt came in chunks": self.deferred,
            "the prompt has a mask, as padded batches have": call.mask is not None,
            "the logits are capped": call.softcap is not None,
            "the softmax has learned sinks": call.sink_logits is not None,
            "the attention is not causal": not call.causal,
            "weights are dropped at random": call.dropout > 0,
            "the model attends twice a layer": self.attends_twice,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _take_hints(self) -> tuple[Tensor, Tensor] | None:
        """What the attention told, once; the record says how often it did, and why not."""
        hints, self.hints = self.hints, None
        if not self.bounds.reuse_lse:
            return None
        if isinstance(hints, tuple):
            self.recorder.count("reused_lse")
            return hints
        reason = hints or "the prompt came in chunks"
        self.recorder.count_reason("without_lse", reason)
        return None

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Of the new tokens alone where the layer knows the older ones itself; see `PromptLayer.get_mask_sizes`."""
        if self.own_chunks and self.prompt is not None:
            return query_length if isinstance(query_length, int) else int(query_length.shape[0]), self.logical
        return super().get_mask_sizes(query_length)

    def _held(self, call: AttentionCall) -> tuple[int, ...]:
        """Real tokens each row stores with this chunk."""
        if not self.own_chunks or self.held is None:
            return real_tokens(call.mask, batch=call.key.shape[0], kv_len=call.key.shape[2], device=call.key.device)
        later = self._new_tokens(call, self.held).lengths
        return tuple(n + call.query.shape[2] if later is None else n + later[row] for row, n in enumerate(self.held))

    def _wait(self, call: AttentionCall) -> None:
        if self.rehearsing is not None:
            hints, self.hints = self.hints, None
            self.rehearsing(self, call, hints if isinstance(hints, tuple) else None)
            return
        first = self.waiting is None
        super()._wait(call)
        if self.own_chunks or (first and self.bounds.own(call.key.device) and self._plain(call)):
            self.held, self.own_chunks = self._held(call), True
            self.seen = PromptMask(None if set(self.held) == {call.key.shape[2]} else self.held, None)
        if self.bounds.max_kv_tokens is not None:
            with without_autocast(call.key.device):
                self._thin(self.bounds.max_kv_tokens)

    def _plain(self, call: AttentionCall) -> bool:
        """Whether a first chunk's attention is one that `attend_chunk` can go on with."""
        if call.backend != "sdpa" or call.softcap is not None or call.sink_logits is not None or not call.causal:
            return False
        batch, kv_len, rows = call.key.shape[0], call.key.shape[2], min(self.rows, call.query.shape[2])
        seen = read_prompt_mask(call.mask, batch=batch, kv_len=kv_len, rows=rows, device=call.key.device, empty=True)
        return seen.window is None

    def _ahead(self, length: int, new: int) -> int:
        if self.rehearsing is not None:
            return 0
        return super()._ahead(length, new) if self.bounds.max_kv_tokens is None else 0

    def read_keys(self) -> Tensor:
        """[B, H, N, D] of a waiting prompt."""
        return self._prompt()[0]

    def go_back(self, length: int) -> None:
        """Forget what came behind a waiting prompt's first `length` tokens."""
        if self.prompt is None or self.logical <= length:
            return
        self.logical, self.hints = length, None
        if self.chunks is not None and self.chunks.length > length:
            self.chunks.crop(self.chunks.length - length)
        keys, values = self.prompt
        self.prompt = keys[:, :, :length], values[:, :, :length]
        self.let_go()

    def let_go(self) -> None:
        """Do not hold on to tensors that the prompt was read into, where it lies elsewhere since."""
        if self.waiting is not None and self.prompt is not None:
            (call, chunk), (keys, values) = self.waiting, self.prompt
            if call.key.shape[1] == keys.shape[1]:
                length = call.key.shape[2]
                call = dataclasses.replace(call, key=keys[:, :, :length], value=values[:, :, :length])
                self.waiting = call, chunk

    @torch.no_grad()
    def _thin(self, most: int) -> None:
        """Keep at most that many of the tokens a waiting prompt has so far."""
        if self.waiting is None:
            return
        (call, chunk), (keys, values) = self.waiting, self._prompt()
        self._expect_stored_heads(call, "max_kv_tokens")
        batch, heads, kv_len = keys.shape[:3]
        held = self.held if self.own_chunks and self.held is not None else self._held(call)
        trail = self.trail or Trail.start(batch, heads, keys.device)
        self.trail = trail.extend(chunk, self.logical, held)
        if kv_len <= most:
            self.seen = self.seen if self.own_chunks else None
            return
        lengths = [max(1, n) for n in held]  # a row of pads so far keeps one of them, which stays hidden
        seen = PromptMask(None if set(lengths) == {kv_len} else tuple(lengths), None)
        spans = self.settings.protect
        forced = self.trail.inside(spans, [self.logical - n for n in self.trail.seen]) if spans else None
        kept = self._round(
            window_of(call, seen, self.rows, self.layer_idx, needs=self.settings.method.needs, rotate=self.rotate),
            lengths,
            [min(n, most) for n in lengths],
            forced,
        )
        with self.recorder.stopwatch.measure("compaction", keys.device):
            self.prompt, self.chunks = gather_kv(keys, values, kept.indices), None
        held = self.held = tuple(min(n, most) for n in held)
        self.trail = self.trail.keep(kept, held)
        self.waiting = (dataclasses.replace(call, key=self.prompt[0], value=self.prompt[1], mask=None), chunk)
        self.seen = PromptMask(None if set(held) == {self.prompt[0].shape[2]} else held, None)

    def _round(self, win: AttentionWindow, lengths: list[int], counts: list[int], forced: Tensor | None) -> Kept:
        self.recorder.count("rounds")
        return choose(
            self.settings, win, lengths=lengths, n_keep=counts, forced=forced, shared=self.shared, peers=self.peers,
            stopwatch=self.recorder.stopwatch,
        )  # fmt: skip

    def _begin_answer(self, call: AttentionCall, lengths: Sequence[int], counts: list[int]) -> None:
        """The prompt is done: remember what later evictions need to know of it."""
        bounds = self.bounds
        if bounds.every is None:
            return
        own, whole, always = bounds.decode_budget, self.settings.budget.tokens, self.settings.rounds_keep()
        if bounds.protect_prompt:
            most = [
                n + max(n if own is None else own, self.settings.method.window + self.settings.sinks) for n in counts
            ]
        else:  # a short prompt is kept whole, and may have had fewer tokens than a round keeps whatever their score
            most = [max(own if own is not None else whole if whole is not None else n, always) for n in counts]
        rows = [(self.logical - n, self.logical, limit) for n, limit in zip(lengths, most, strict=True)]
        self.frame, self.renewed, self.recent = torch.tensor(rows, device="cpu"), self.logical, []
        self._remember(call.query)

    def _remember(self, query: Tensor) -> None:
        """Add new queries and forget those that no window will hold again."""
        new = query[:, :, -self.rows :]
        if self.recent and self.recent[0].shape[2] == self.rows:  # in place, so that a graph can hold it
            held = self.recent[0] = writable(self.recent[0], new)
            held.copy_(torch.cat([held[:, :, new.shape[2] :], new], 2))
        else:
            with torch.inference_mode(False):
                self.recent = [torch.cat([*self.recent, new], 2)[:, :, -self.rows :].clone()]

    def after_attention(self, call: AttentionCall) -> None:
        """The attention is done: decide about a prompt, or, every so many tokens, about all that is stored."""
        answer = self.prompt is None
        super().after_attention(call)
        if answer and self.frame is not None and self.bounds.every is not None:
            self._remember(call.query)
            if self.outside:
                self.noted = CallTerms.of(call)
            elif self.due():
                self.renew(CallTerms.of(call))

    def due(self) -> bool:
        """Whether an answer has come far enough for its next eviction."""
        every = self.bounds.every
        return every is not None and self.frame is not None and self.logical - self.renewed >= every

    @torch.no_grad()
    def renew(self, call: CallTerms) -> None:
        """Evict from prompt and answer alike, as the last queries score them."""
        if self.frame is not None and self.recent:
            with without_autocast(self.recent[0].device):
                self._renew(call, self.frame)

    def _renew(self, call: CallTerms, frame: Tensor) -> None:
        keys, values, held = self._stored(call)
        batch, _, stored = keys.shape[:3]
        self.renewed = self.logical
        starts, ends, most = frame.T.tolist()
        counts = [min(n, limit) for n, limit in zip(held, most, strict=True)]
        if counts == held:
            return
        trail = Trail(self._positions(keys), (0,) * batch, (0,) * batch)
        forced = trail.inside(self.settings.protect, starts) if self.settings.protect else None
        if self.bounds.protect_prompt:
            forced = trail.inside([(0, max(ends))], [0] * batch)
        query, keys, values = alike(torch.cat(self.recent, 2)[:, :, -self.rows :], keys, values)
        win = make_window(
            query, keys, values, scale=call.scale, softcap=call.softcap, sink_logits=call.sink_logits,
            lengths=None if set(held) == {stored} else to_device(held, keys.device), layer_idx=self.layer_idx,
            output_projection=output_projection(call.module, query, values)
            if "W_O" in self.settings.method.needs else None, rotate=self.rotate,
        )  # fmt: skip
        kept = self._round(win, held, counts, forced)
        with self.recorder.stopwatch.measure("compaction", keys.device):
            self._restock(*gather_kv(keys, values, kept.indices), kept)
            self._check_filler(call)
        self.kept = trail.origin(kept)

    def _positions(self, keys: Tensor) -> Tensor:
        """[B, H, S] where the slots of the stored keys [B, H, S, D] come from, FILLER on the left."""
        later = torch.arange(self.logical - self.after_eviction(), self.logical, device=keys.device)
        later = later.expand(*keys.shape[:2], -1)
        if self.kept is None:
            return later
        return torch.cat([self.kept.indices.expand(-1, keys.shape[1], -1), later], 2)

    def until_eviction(self, new: int = 0) -> int:
        """Where answers are evicted, what comes between two evictions; see `PromptLayer.until_eviction`."""
        most = super().until_eviction(new)
        return most if self.bounds.every is None else min(most, self.bounds.every + self.rows)

    def _stored(self, call: CallTerms) -> tuple[Tensor, Tensor, list[int]]:
        """Keys [B, H, S, D] and values [B, H, S, Dv] with each row's real tokens last, and how many those are."""
        if self.store is None:
            raise RuntimeError("the layer stores nothing")
        keys, values = self.store.keys, self.store.values
        mask = None if self.uneven else call.mask  # which then fits another layer's slots; `valid` hides all pads
        held = list(real_tokens(mask, batch=keys.shape[0], kv_len=keys.shape[2], device=keys.device))
        if self.valid is not None:
            hidden = (~self.valid).sum(-1).amax(-1).tolist()
            held = [min(n, keys.shape[2] - int(h)) for n, h in zip(held, hidden, strict=True)]
        return keys, values, held

    def _restock(self, keys: Tensor, values: Tensor, kept: Kept) -> None:
        """Store what a round kept."""
        self.fill(keys, values)
        self.valid = valid_slots(kept)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens, their queries with them; see `PromptLayer.crop`."""
        before = self.logical
        super().crop(tokens_to_remove)
        if self.recent and before > self.logical:
            query = torch.cat(self.recent, 2)
            self.recent = [query[:, :, : max(0, query.shape[2] - before + self.logical)]]
            self.renewed = min(self.renewed, self.logical)

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._each(change)
        self.recent = [change(query) for query in self.recent]
        self.frame = None if self.frame is None else change(self.frame)

    def reset(self) -> None:
        """Empty again."""
        super().reset()
        self.trail = self.frame = self.held = self.hints = self.noted = self.rehearsing = self.rehearsed = None
        self.recent, self.renewed, self.own_chunks = [], 0, False
