"""The layer of an evicting cache: transformers' cache layer on one side, the attention hook on the other.

A layer holds the prompt's full keys and values until its own attention call is over, keeps what its policy chooses, and
from then on hands everything to a store. Its *logical* length counts every token, so positions stay right; its
*stored* length counts slots, so masks do.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from decantkv.base.precision import without_autocast
from decantkv.cache import chunked_prefill, own_attention
from decantkv.cache.phases import (
    EMPTY,
    KEPT_WHOLE,
    Answer,
    Empty,
    Evicted,
    Listening,
    Phase,
    Prompt,
    Reading,
    Rehearsing,
    Waiting,
    Whole,
)
from decantkv.cache.policy import CacheState, Policy
from decantkv.cache.stores import from_state
from decantkv.cache.stores.dense import DenseStore
from decantkv.cache.stores.ragged import Mark, RaggedStore
from decantkv.cache.stores.store import Store, check
from decantkv.hf import attention_hook
from decantkv.hf.attention_hook import AttentionCall, CallTerms, interrupted
from decantkv.hf.masks import PromptMask, read_prompt_mask
from decantkv.selection.selector import FILLER, Kept

RESERVE = 4096  # tokens that a growing store takes room for at once, however many are still to come


class LayerMark(NamedTuple):
    """Lengths and contents of a layer between two steps, for a step that is taken back."""

    logical: int
    store: Mark
    answer: Tensor | None


class EvictingLayer(CacheLayerMixin):
    """A full-attention layer that sees its prompt's attention call and then stores what its policy keeps.

    Attributes:
        phase: where the layer is in its life.
        logical: tokens ever given.
        chunks: whether the prompt comes in one piece, or more chunks are to come, or the last one.
        unmasked: new tokens are all real, whatever the mask says: set for steps that a graph holds.
        postponed: the answer is evicted between forwards, by the code that set this.
        noted: the terms of the last attention call, which they need.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, layer_idx: int, place: tuple[int, int], policy: Policy, cache: CacheState) -> None:
        """An empty layer; `place`: which of how many evicting layers of its cache."""
        self.layer_idx, self.cache_id, self.place = layer_idx, cache.cache_id, place
        self.policy, self.cache = policy, cache
        self.phase: Phase = EMPTY
        self.logical = 0
        self.chunks: chunked_prefill.Chunks = "none"
        self.unmasked = self.postponed = False
        self.noted: CallTerms | None = None

    # -- what is held

    @property
    def is_initialized(self) -> bool:
        """Return whether the layer has seen a prompt."""
        return self.logical > 0

    @property
    def reading(self) -> bool:
        """Return whether a prompt is being read and nothing of it was evicted yet."""
        return isinstance(self.phase, Reading | Waiting | Rehearsing)

    @property
    def store(self) -> Store | None:
        """The store of kept tokens; None before a prompt was read."""
        return self.phase.store if isinstance(self.phase, Whole) else None

    @property
    def kept(self) -> Kept | None:
        """The tokens that the last eviction left; None if nothing was evicted."""
        return self.phase.kept if isinstance(self.phase, Evicted) else None

    @property
    def answer(self) -> Answer | None:
        """The answer's state, for later evictions; None before a prompt was read."""
        return self.phase.answer if isinstance(self.phase, Whole) else None

    @property
    def keys(self) -> Tensor | None:
        """[B, H, stored, D], or flat where heads store different numbers; None before a prompt."""
        held = self._held()
        return None if held is None else held.keys

    @property
    def values(self) -> Tensor | None:
        """[B, H, stored, Dv], or flat where heads store different numbers; None before a prompt."""
        held = self._held()
        return None if held is None else held.values

    def _held(self) -> Store | Reading | Waiting | Rehearsing | None:
        if isinstance(self.phase, Empty):
            return None
        return self.phase.store if isinstance(self.phase, Whole) else self.phase

    @property
    def stored(self) -> int:
        """Slots in memory of the head that holds most, filler included."""
        if isinstance(self.phase, Whole):
            return self.phase.store.stored
        return 0 if isinstance(self.phase, Empty) else self.phase.keys.shape[2]

    def tensors(self) -> list[Tensor]:
        """Return all tensors that the layer holds for keys and values."""
        if isinstance(self.phase, Whole):
            return self.phase.store.tensors()
        return [] if isinstance(self.phase, Empty) else [self.phase.keys, self.phase.values]

    def hold_all(self, prompt: Prompt) -> None:
        """Hold the prompt as it is from now on."""
        self.hold(DenseStore.of_all(prompt.keys, prompt.values, None, announced=0), KEPT_WHOLE, None)

    def hold(self, store: Store, answer: Answer, kept: Kept | None) -> None:
        """Hold this store from now on; `kept`: the tokens that an eviction left in it, None if there was none."""
        self.phase = Whole(store, answer) if kept is None else Evicted(store, answer, kept)

    # -- what transformers calls

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: shapes are known at the first update."""

    @attention_hook.uncompiled
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the new tokens' keys and values; return what the attention must read.

        Raises:
            UnsupportedModelError: the attention call before this one never came.
        """
        phase, new = self.phase, key_states.shape[2]
        if isinstance(phase, Whole):
            if phase.store.staged:
                raise interrupted(self.layer_idx)
            keys, values = phase.store.update(key_states, value_states, reserve=self.reserve(new))
            if not phase.store.attends:
                self.logical += new
            if (
                phase.store.attends or phase.store.hides or self.policy.uneven or self.policy.listens
                or isinstance(phase, Evicted)
            ):  # fmt: skip
                attention_hook.expect(self, keys)
            return keys, values
        if isinstance(phase, Reading):
            raise interrupted(self.layer_idx)
        if isinstance(phase, Rehearsing):
            phase.prompt.buffer.update(key_states, value_states)
            self.phase = dataclasses.replace(phase, new=new)
        elif isinstance(phase, Waiting):
            self.phase = chunked_prefill.with_chunk(self, phase, key_states, value_states)
        else:
            self.phase = Reading(key_states, value_states, new)
        self.logical += new
        keys, values = self.phase.keys, self.phase.values
        attention_hook.expect(self, keys)
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of all tokens ever given, which positions count."""
        return self.logical + (self.phase.store.staged if isinstance(self.phase, Whole) else 0)

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return stored slots plus new tokens, and the distance between logical and stored positions.

        Of the new tokens alone where the layer attends to the older ones itself.
        """
        new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        alone = self.phase.store.attends if isinstance(self.phase, Whole) else bool(getattr(self.phase, "held", ()))
        if alone:
            return new, self.logical
        stored = self.stored
        return stored + new, self.logical - stored

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens: −k removes k; a positive number is the length to go back to.

        New tokens that an interrupted forward never attended to go in any case.

        Raises:
            ValueError: as `checked_crop`.
        """
        self.forget_new()
        remove = self.checked_crop(tokens_to_remove)
        if remove == self.logical:
            self.reset()
        elif remove and isinstance(self.phase, Whole):
            self.phase.store.crop(remove)
            self.logical -= remove
            self.phase.answer.crop(remove, self.logical)

    def checked_crop(self, tokens_to_remove: int) -> int:
        """Return the number of tokens that `crop` would take back, at most all of them; change nothing.

        Raises:
            ValueError: that reaches into what the prompt's eviction left, or into a prompt that comes in chunks.
        """
        remove = -tokens_to_remove if tokens_to_remove <= 0 else self.logical - tokens_to_remove
        if remove <= 0:
            return 0
        if self.reading:
            raise ValueError("crop: expected a prompt that was read to its end, got one that comes in chunks")
        if isinstance(self.phase, Evicted) and remove > self.phase.store.appended:
            raise ValueError(
                f"crop: expected to remove at most the {self.phase.store.appended} tokens after the evicted prompt, "
                f"got {remove}"
            )
        return min(remove, self.logical)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in a new order, as beam search wants them."""
        if isinstance(self.phase, Whole):
            self.phase.store.select_rows(beam_idx)
            self.phase.answer.select_rows(beam_idx)
        if isinstance(self.phase, Evicted):
            self.phase = Evicted(self.phase.store, self.phase.answer, self.phase.kept.select_rows(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if isinstance(self.phase, Whole):
            self.reorder_cache(torch.arange(self.phase.store.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows: their numbers, or True for each that stays."""
        if isinstance(self.phase, Whole):
            chosen = indices.cpu() if isinstance(indices, Tensor) else indices
            self.reorder_cache(torch.arange(self.phase.store.batch, device="cpu")[chosen])

    def offload(self) -> None:
        """Kept tokens to the CPU; a prompt stays, since its attention is still to come."""
        if isinstance(self.phase, Whole):
            self.phase.store.to("cpu")

    def prefetch(self) -> None:
        """Kept tokens back to their device."""
        if isinstance(self.phase, Whole):
            self.phase.store.to(self.phase.store.home)

    def reset(self) -> None:
        """Empty again."""
        self.phase, self.logical, self.noted = EMPTY, 0, None

    # -- what the attention hook calls

    attend = own_attention.attend

    def before_attention(self, call: AttentionCall) -> Any:
        """Return the call's mask, with filler slots hidden from new tokens."""
        if isinstance(self.phase, Whole):
            return self.phase.store.mask(call, uneven=self.policy.uneven)
        return call.mask

    def after_attention(self, call: AttentionCall) -> None:
        """The tokens have been attended to: decide what to store of a prompt. A failure leaves the layer empty."""
        phase = self.phase
        if isinstance(phase, Whole):
            self.policy.attended(self, call)
        elif isinstance(phase, Rehearsing):
            self._check(phase.new, call)
            phase.listen(self, call, phase.lse)
        elif not isinstance(phase, Empty):
            try:
                self._check(phase.new, call)
                if self.chunks == "none":
                    self._decide(phase, call, self._read_mask(call, call.query.shape[2]))
                    return
                self.phase = chunked_prefill.attended(self, phase, call)
                if self.chunks == "last" and self.policy.rehearsal is None:
                    self.finish()
            except BaseException:
                self.reset()
                raise

    def _check(self, new: int, call: AttentionCall) -> None:
        """Raise unless the call is one of inference, by the cache's model, of the tokens whose keys came last."""
        if call.key.requires_grad:
            raise ValueError("model: expected a forward without gradients (torch.no_grad()), got one with")
        model = self.cache.owner()
        if model is None or not any(call.module is part for part in model.modules()):
            name = "model" if model is None else type(model).__name__
            raise ValueError(f"cache: expected the {name} it was made for, got another model's {call.attention_class}")
        if call.query.shape[2] != new:  # an image's keys are another's
            raise attention_hook.UnsupportedModelError(
                f"model: expected attention among a prompt's tokens, got {call.attention_class} in layer "
                f"{self.layer_idx} with {new} keys for {call.query.shape[2]} tokens"
            )

    def _read_mask(self, call: AttentionCall, queries: int) -> PromptMask:
        if isinstance(call.mask, PromptMask):
            return call.mask
        batch, _, kv_len, _ = call.key.shape
        rows = min(self.policy.rows, queries)
        return read_prompt_mask(call.mask, batch=batch, kv_len=kv_len, rows=rows, device=call.key.device)

    @torch.no_grad()
    def _decide(self, prompt: Prompt, call: AttentionCall, seen: PromptMask) -> None:
        with without_autocast(call.key.device):
            self.policy.decide(self, prompt, call, seen)

    # -- a prompt in chunks

    def defer(self) -> None:
        """A prompt may come in chunks from now on."""
        self.chunks = "none" if isinstance(self.phase, Whole) else "more"

    def expect_last(self) -> None:
        """The next chunk is the prompt's last."""
        self.chunks = "none" if self.chunks == "none" else "last"

    def give_up(self) -> None:
        """No more chunks are to come."""
        self.chunks = "none"

    def finish(self) -> None:
        """The last chunk is in: decide now. Does nothing unless a prompt waits."""
        self.give_up()
        if not isinstance(self.phase, Waiting):
            return
        try:
            chunk, call = self.phase.new, self.phase.call
            seen = self._read_mask(call, chunk)
            if seen.window is not None and chunk < min(self.policy.rows, call.query.shape[2]):
                raise ValueError(
                    "prefill_chunk_size: expected a causal mask, got another, which short chunks cannot follow"
                )
            self._decide(self.phase, call, seen)
        except BaseException:
            self.reset()
            raise

    # -- a passage that is run over a waiting prompt

    def rehearse(self, listen: Listening, *, own: bool) -> None:
        """Give the attention calls of what comes now to `listen`; see `Rehearsing`."""
        if isinstance(self.phase, Waiting):
            self.phase = Rehearsing(self.phase, listen, own)

    def rehearsed(self) -> tuple[Tensor, ...]:
        """Return the scores of the prompt's keys by the passages so far; () before one."""
        prompt = self.phase.prompt if isinstance(self.phase, Rehearsing) else self.phase
        return prompt.rehearsed if isinstance(prompt, Waiting) else ()

    def note_rehearsed(self, scores: tuple[Tensor, ...]) -> None:
        """Put these in their place, and hold on to no tensor that the prompt lay in before its buffer grew."""
        if isinstance(self.phase, Rehearsing):
            prompt = dataclasses.replace(self.phase.prompt, rehearsed=scores, call=self._call(self.phase.prompt))
            self.phase = dataclasses.replace(self.phase, prompt=prompt, lse=())

    def go_back(self, length: int) -> None:
        """Forget the passage: the prompt has `length` tokens."""
        if not isinstance(self.phase, Rehearsing):
            return
        prompt, self.logical = self.phase.prompt, length
        if prompt.buffer.length > length:
            prompt.buffer.crop(prompt.buffer.length - length)
        self.phase = dataclasses.replace(prompt, call=self._call(prompt))

    @staticmethod
    def _call(prompt: Waiting) -> AttentionCall:
        """Return the prompt's last call with its keys and values where they lie now."""
        call, length = prompt.call, prompt.call.key.shape[2]
        if call.key.shape[1] != prompt.keys.shape[1]:
            return call
        return dataclasses.replace(call, key=prompt.keys[:, :, :length], value=prompt.values[:, :, :length])

    # -- room

    def announced(self, new: int = 0) -> int:
        """Return the number of tokens still to come behind `new` ones; 0 if unknown."""
        return max(0, self.cache.expected - self.logical - new)

    def until_eviction(self, new: int = 0) -> int:
        """Return the number of tokens still to come before the next eviction, of the answer if it is evicted."""
        every, most = self.policy.bounds.every, max(0, self.cache.expected - self.logical - new)
        return most if every is None else min(most, every + self.policy.rows)

    def reserve(self, new: int) -> int:
        """Return the number of further tokens for which a growing store takes room at once."""
        return min(self.until_eviction(new), RESERVE)

    # -- steps that are taken back, or counted without being run

    def mark(self) -> LayerMark:
        """Return the layer's state before a step that may have to be taken back without moving anything."""
        if not isinstance(self.phase, Whole) or not isinstance(self.phase.store, RaggedStore):
            raise RuntimeError("the layer does not attend by itself")
        return LayerMark(self.logical, self.phase.store.mark(), self.phase.answer.mark())

    def back_to(self, mark: LayerMark) -> None:
        """Take back what came since."""
        if isinstance(self.phase, Whole) and isinstance(self.phase.store, RaggedStore):
            self.phase.store.back_to(mark.store)
            self.phase.answer.back_to(mark.answer)
            self.logical = mark.logical

    def count(self, new: int) -> None:
        """Count tokens that a recorded step stored."""
        if isinstance(self.phase, Whole) and isinstance(self.phase.store, RaggedStore):
            self.logical += new
            self.phase.store.count(new)

    # -- state

    def forget_new(self) -> None:
        """A forward failed: its tokens' attention is not waited for any more."""
        if isinstance(self.phase, Whole):
            self.phase.store.forget_staged()

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The layer as numbers, which JSON can hold, and tensors.

        Raises:
            ValueError: a prompt is being read.
        """
        if self.reading:
            raise ValueError(
                f"cache: expected a prompt that is read to its end, got one in chunks in layer {self.layer_idx}"
            )
        numbers: dict[str, Any] = {"logical": self.logical}
        if not isinstance(self.phase, Whole):
            return numbers, {}
        state = {f"store.{name}": x for name, x in self.phase.store.state().items()}
        state |= {f"answer.{name}": x for name, x in self.phase.answer.state().items()}
        if isinstance(self.phase, Evicted):
            kept = self.phase.kept
            numbers["rows"] = kept.rows
            state |= {"kept.indices": kept.indices, "kept.counts": kept.counts}
        return numbers, state

    def load_state(self, numbers: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Hold what `state` described.

        Raises:
            KeyError, ValueError: the state contradicts itself.
        """
        parts: dict[str, dict[str, Tensor]] = {"store": {}, "answer": {}, "kept": {}}
        for name, x in tensors.items():
            part, _, rest = name.partition(".")
            check(part in parts, f"tensors of layer {self.layer_idx}", f"of {', '.join(parts)}")
            parts[part][rest] = x
        self.logical = numbers["logical"]
        if not tensors:
            check(self.logical == 0, f"layer {self.layer_idx}", "with keys and values")
            return
        store = from_state(parts["store"], self.policy.bounds.store, announced=self.until_eviction())
        check(store.appended <= self.logical >= store.stored, f"layer {self.layer_idx}", "of tokens that were read")
        kept = self._kept_of(parts["kept"], numbers["rows"], store) if parts["kept"] else None
        self.hold(store, self.policy.answer_of(parts["answer"], store.batch, self.logical), kept)

    def _kept_of(self, state: dict[str, Tensor], rows: list[int] | None, store: Store) -> Kept:
        indices, counts, heads = state["indices"], state["counts"], store.held().shape[1]
        name = f"kept positions of layer {self.layer_idx}"
        fits = indices.dim() == 3 and indices.shape[0] == store.batch and not indices.is_floating_point()
        check(fits and (indices.shape[1] == 1 or heads in (1, indices.shape[1])), name, "[B, 1 or H, K]")
        inside = not bool(((indices < FILLER) | (indices >= self.logical)).any())
        check(inside, name, f"below {self.logical}, which were read")
        slots = indices.shape[2] + store.appended
        check(store.stored <= slots if store.attends else store.stored == slots, name, "as many as are stored")
        held = (indices != FILLER).sum(-1)
        same = counts.dim() == 2 and not bool((counts != held).any()) and (rows is None or len(rows) == store.batch)
        check(same, f"counts of layer {self.layer_idx}", "of the positions kept")
        return Kept(indices, counts, None if rows is None else tuple(rows))
