"""The layers of an evicting cache: they tell how much was said apart from how much is stored.

A layer holds the prompt's full keys and values until its own attention call is over, keeps the chosen ones, and from
then on hands everything to an inner store. Its *logical* length counts every token, so positions stay right; its
*stored* length counts slots, so masks do.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import CacheLayerMixin

from decantkv.base.options import Need
from decantkv.base.precision import alike, without_autocast
from decantkv.base.transfer import to_device
from decantkv.base.versions import kernels_run_on
from decantkv.cache.identity import Adapters
from decantkv.cache.stores.dense import SlackStore
from decantkv.cache.stores.inner import Inner, make_store
from decantkv.hf import attention_hook
from decantkv.hf.attention_hook import AttentionCall, interrupted
from decantkv.hf.masks import PromptMask, hide_filler, read_prompt_mask, refit
from decantkv.hf.model_parts import output_projection
from decantkv.scoring.rehearsal import Rehearsal
from decantkv.scoring.window import AttentionWindow, Rotate, make_window
from decantkv.selection.selector import FILLER, Kept

RESERVE = 4096  # tokens that a growing store takes room for at once, however many were announced


class PromptLayer(CacheLayerMixin):
    """A full-attention layer that sees its prompt's attention call once and then decides what to store.

    Subclasses implement `keep`. Before the prompt `store` is None; `prompt` holds the full keys and values from
    `update` until `after_attention`.
    """

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False
    wants_every_query = False  # a method looks at all of the prompt's queries
    inner: Inner = "plain"  # where kept tokens live
    uneven = False  # layers of one cache may store different numbers of tokens
    rehearsal: Rehearsal | None = None  # what is run over a prompt before it is decided what to keep

    def __init__(self, layer_idx: int, cache_id: int, rows: int) -> None:
        self.layer_idx, self.cache_id, self.rows = layer_idx, cache_id, rows
        self.store: SlackStore | None = None
        self.expected = 0  # the length that prompt and answer may reach, where the caller said so
        self.prompt: tuple[Tensor, Tensor] | None = None
        self.chunks: SlackStore | None = None  # where a prompt that comes in chunks is put together
        self.valid: Tensor | None = None  # [B, 1 or H, K] bool; None while every kept slot holds a token
        self.logical = 0
        self.kept: Kept | None = None
        self.deferred = False  # a prompt that comes in chunks is decided on after the last
        self.closing = False  # the next chunk is the prompt's last
        self.waiting: tuple[AttentionCall, int] | None = None  # with the tail of queries, and the last chunk's length
        self.seen: PromptMask | None = None  # of a waiting prompt, where its mask no longer tells
        self._new = 0  # tokens of the last update of a prompt
        self.listens = False  # wants every attention call, also when nothing is hidden
        self.holds: tuple[object, ...] = ()  # keep what the layer needs in place, whatever cache it is moved to
        self.owner: weakref.ref[nn.Module] | None = None  # the model this cache is for, if it was told
        self.adapters: Adapters = ()  # of the model when it read the prompt; the cache's first such layer knows them

    @property
    def is_initialized(self) -> bool:
        """Whether the layer has seen a prompt."""
        return self.logical > 0

    @property
    def keys(self) -> Tensor | None:
        """[B, H, stored, D], or None before a prompt."""
        return self._tensors()[0]

    @property
    def values(self) -> Tensor | None:
        """[B, H, stored, Dv], or None before a prompt."""
        return self._tensors()[1]

    def _tensors(self) -> tuple[Tensor | None, Tensor | None]:
        if self.store is not None:
            return self.store.keys, self.store.values
        return self.prompt if self.prompt is not None else (None, None)

    @property
    def stored(self) -> int:
        """Slots in memory, filler included."""
        keys = self.keys
        return 0 if keys is None else keys.shape[-2]

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare: shapes are known at the first update."""

    @attention_hook.uncompiled
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the new tokens' keys and values; return what the attention must read.

        Raises:
            UnsupportedModelError: the prompt's attention call never came.
        """
        if self.prompt is not None and self.waiting is None:
            raise interrupted(self.layer_idx)
        new = key_states.shape[-2]
        if self.store is None:
            self.prompt = self._with_older(key_states, value_states)
            self.logical, self._new = self.logical + new, new
            attention_hook.expect(self, self.prompt[0])
            return self.prompt
        keys, values = self.store.update(key_states, value_states, reserve=self.reserve(new))
        self.logical += new
        if self.valid is not None or self.uneven or self.kept is not None or self.listens:
            attention_hook.expect(self, keys)
        return keys, values

    def _with_older(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """A prompt's chunk behind the earlier ones, in a buffer that doubles, up to the length that was announced."""
        if self.prompt is None:
            return keys, values
        if self.chunks is None:
            self.chunks = SlackStore(*self.prompt)
        return self.chunks.update(keys, values, reserve=self._ahead(self.chunks.length, keys.shape[-2]))

    def _ahead(self, length: int, new: int) -> int:
        """Tokens of a prompt to take room for behind `new` of them when its buffer grows from `length`."""
        doubled = max(0, length - new)
        return min(doubled, self.announced(new)) if self.expected else doubled

    def forget_new(self) -> None:
        """A forward failed: what it was about to store is not waited for any more."""

    def attend(self, call: AttentionCall) -> Tensor | None:
        """None: the model's own attention reads what `update` returned."""
        return None

    def before_attention(self, call: AttentionCall) -> Any:
        """The call's mask, with filler slots hidden from new tokens."""
        mask, query, kv_len = call.mask, call.query, call.key.shape[2]
        if self.uneven and self.prompt is None:
            settled = self.kept.indices if self.kept is not None else self.valid
            later = kv_len - (0 if settled is None else settled.shape[2])
            mask = refit(mask, q_len=query.shape[2], kv_len=kv_len, later=later)
        if self.kept is not None and isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] != kv_len:
            raise ValueError(
                f"attention_mask: expected a 2-D mask of all tokens after eviction, got a 4-D one over "
                f"{mask.shape[-1]} keys where {kv_len} are stored"
            )
        if self.valid is None:
            return mask
        return hide_filler(mask, self.valid, query=query, kv_len=kv_len, backend=call.backend, causal=call.causal)

    def after_attention(self, call: AttentionCall) -> None:
        """The prompt has been attended to: decide what to store. A failure leaves the layer empty."""
        if self.prompt is None:
            return
        try:
            if call.key.requires_grad:
                raise ValueError("model: expected a forward without gradients (torch.no_grad()), got one with")
            self._check_owner(call)
            self._check_tokens(call)
            if self.deferred:
                self._wait(call)
                if self.closing and self.rehearsal is None:
                    self.finish()
                return
            self._keep(call, self._read_mask(call, min(self.rows, call.query.shape[2])))
        except BaseException:
            self.reset()
            raise
        self.prompt = self.chunks = None

    def _check_owner(self, call: AttentionCall) -> None:
        if self.owner is None:
            return
        model = self.owner()
        if model is None or not any(call.module is part for part in model.modules()):
            name = "model" if model is None else type(model).__name__
            raise ValueError(f"cache: expected the {name} it was made for, got another model's {call.attention_class}")

    def _check_tokens(self, call: AttentionCall) -> None:
        """Raise unless the tokens that attend are those whose keys came last: an image's keys are another's."""
        if call.query.shape[2] != self._new:
            raise attention_hook.UnsupportedModelError(
                f"model: expected attention among a prompt's tokens, got {call.attention_class} in layer "
                f"{self.layer_idx} with {self._new} keys for {call.query.shape[2]} tokens"
            )

    def _wait(self, call: AttentionCall) -> None:
        """One chunk of the prompt: remember the last queries, which may reach back over several chunks."""
        chunk = call.query.shape[2]
        query = call.query if self.waiting is None else torch.cat([self.waiting[0].query, call.query], dim=2)
        keep = call.key.shape[2] if self.wants_every_query else self.rows
        self.waiting = (dataclasses.replace(call, query=query[:, :, -keep:].clone()), chunk)

    def finish(self) -> None:
        """The last chunk is in: decide now. Does nothing unless a prompt waits."""
        self.deferred = self.closing = False
        if self.waiting is None:
            return
        call, chunk = self.waiting
        try:
            seen = self._read_mask(call, min(self.rows, chunk)) if self.seen is None else self.seen
            if seen.window is not None and chunk < min(self.rows, call.query.shape[2]):
                raise ValueError(
                    "prefill_chunk_size: expected a causal mask, got another, which short chunks cannot follow"
                )
            self._keep(call, seen)
        except BaseException:
            self.reset()
            raise
        self.prompt = self.chunks = self.waiting = self.seen = None

    def _read_mask(self, call: AttentionCall, rows: int) -> PromptMask:
        batch, _, kv_len, _ = call.key.shape
        return read_prompt_mask(call.mask, batch=batch, kv_len=kv_len, rows=rows, device=call.key.device)

    @torch.no_grad()
    def _keep(self, call: AttentionCall, seen: PromptMask) -> None:
        with without_autocast(call.key.device):
            self.keep(call, seen, min(self.rows, call.query.shape[2]))

    def keep(self, call: AttentionCall, seen: PromptMask, rows: int) -> None:
        """Fill `store` (and `valid`) from the prompt."""
        raise NotImplementedError

    def store_all(self) -> None:
        """Keep the prompt as it is."""
        keys, values = self._prompt()
        self.fill(_owned(keys), _owned(values))

    def store_kept(self, kept: Kept) -> None:
        """Keep the chosen tokens of the prompt; heads that the cache does not tell apart share one choice."""
        keys, values = self._prompt()
        self.fill(*gather_kv(keys, values, kept.indices))
        self.valid = valid_slots(kept)
        self.kept = kept

    def fill(self, keys: Tensor, values: Tensor) -> None:
        """Make keys [B, H, K, D] and values [B, H, K, Dv] the layer's storage, without another copy."""
        self.store = make_store(keys, values, self.inner, announced=self.until_eviction())

    def announced(self, new: int = 0) -> int:
        """Tokens that are still to come behind `new` ones; 0 where nobody said how many."""
        return max(0, self.expected - self.logical - new)

    def until_eviction(self, new: int = 0) -> int:
        """How many of them come before what is stored is evicted again: all, unless answers are."""
        return self.announced(new)

    def reserve(self, new: int) -> int:
        """How many of those a store that grows takes room for at once."""
        return min(self.until_eviction(new), RESERVE)

    def _prompt(self) -> tuple[Tensor, Tensor]:
        if self.prompt is None:
            raise RuntimeError("the layer holds no prompt")
        return self.prompt

    def get_seq_length(self, *args: Any) -> int:
        """Every token ever given, which is what positions count."""
        return self.logical

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Stored slots plus new tokens, and the distance between logical and stored positions."""
        new = query_length if isinstance(query_length, int) else int(query_length.shape[0])
        return self.stored + new, self.logical - self.stored

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    get_max_cache_shape = get_max_length

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens: −k removes k; a positive number is the length to go back to.

        Raises:
            ValueError: as `checked_crop`.
        """
        remove = self.checked_crop(tokens_to_remove)
        if remove == self.logical:
            self.reset()
        elif remove:
            self._take_back(remove)
            self.logical -= remove

    def checked_crop(self, tokens_to_remove: int) -> int:
        """How many tokens `crop` would take back, at most all of them; nothing is changed.

        Raises:
            ValueError: that reaches into what the prompt's eviction left, or into a prompt that comes in chunks.
        """
        remove = -tokens_to_remove if tokens_to_remove <= 0 else self.logical - tokens_to_remove
        if remove <= 0:
            return 0
        if self.prompt is not None:
            raise ValueError("crop: expected a prompt that was read to its end, got one that comes in chunks")
        if self.kept is not None and remove > self.after_eviction():
            raise ValueError(
                f"crop: expected to remove at most the {self.after_eviction()} tokens after the evicted prompt, "
                f"got {remove}"
            )
        return min(remove, self.logical)

    def after_eviction(self) -> int:
        """How many tokens came, pads included, after what the last eviction left."""
        return self.stored if self.kept is None else self.stored - self.kept.indices.shape[2]

    def _take_back(self, number: int) -> None:
        if self.store is None:
            return
        self.store.crop(number)
        if self.valid is not None:
            self.valid = self.valid[:, :, : self.store.length]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in a new order, as beam search wants them."""
        self._each(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        self._each(lambda x: x[indices.to(x.device) if isinstance(indices, Tensor) else indices, ...])

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.store is not None:
            self.store.each(change)
        if self.valid is not None:
            self.valid = change(self.valid)
        if self.kept is not None:
            self.kept = Kept(change(self.kept.indices), change(self.kept.counts))

    def offload(self) -> None:
        """Kept tokens to the CPU; a prompt stays, since its attention is still to come."""
        if self.store is not None:
            self.store.offload()

    def prefetch(self) -> None:
        """Kept tokens back to their device."""
        if self.store is not None:
            self.store.prefetch()

    def reset(self) -> None:
        """Empty again."""
        self.store = self.prompt = self.chunks = self.valid = self.kept = self.waiting = self.seen = None
        self.logical = 0

    def tensors(self) -> list[Tensor]:
        """Everything the layer holds in memory for keys and values."""
        return list(self.prompt or ()) if self.store is None else self.store.buffers()


def window_of(
    call: AttentionCall,
    seen: PromptMask,
    rows: int,
    layer_idx: int,
    *,
    needs: frozenset[Need] = frozenset(),
    rotate: Rotate | None = None,
    hints: tuple[Tensor, Tensor] | None = None,
) -> AttentionWindow:
    """The attention call of a prompt as the methods receive it, with the last `rows` queries and what they need.

    `hints`: those rows' output [B, HQ, w, Dv] and log-sum-exp [B, HQ, w], where the attention gave them.
    """
    lengths = None if seen.lengths is None else to_device(seen.lengths, call.key.device)
    query, key, value = alike(call.query[:, :, -rows:], call.key, call.value)
    return make_window(
        query,
        key,
        value,
        scale=call.scale,
        lengths=lengths,
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        mask=seen.window,
        out=None if hints is None else hints[0],
        lse=None if hints is None else hints[1],
        layer_idx=layer_idx,
        queries=call.query if "queries" in needs and call.query.shape[2] == call.key.shape[2] else None,
        output_projection=output_projection(call.module, call.query, call.value) if "W_O" in needs else None,
        rotate=rotate,
    )


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """[B, H, N, D] at [B, H, K] indices, as new memory; filler slots get zeros."""
    slots = indices.clamp_min(0)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, slots).masked_fill_((indices == FILLER)[..., None], 0.0)


def gather_kv(keys: Tensor, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values at the indices [B, H, K] as new memory: one launch on CUDA, `gather` twice elsewhere."""
    if not (keys.stride(-1) == values.stride(-1) == 1 and kernels_run_on(keys.device)):
        return gather(keys, indices), gather(values, indices)
    from decantkv import kernels

    return kernels.gather_kv(keys, values, indices)


def valid_slots(kept: Kept) -> Tensor | None:
    """[B, 1 or H, K] bool, which slots hold a token; None when all do. Free of waiting where the host knows."""
    if kept.rows is not None and set(kept.rows) == {kept.indices.shape[2]}:
        return None
    valid = kept.valid()
    if kept.rows is not None:
        return valid[:, :1]
    same = kept.counts.shape[1] == 1 or bool((kept.counts == kept.counts[:, :1]).all())
    return None if bool(valid.all()) else valid[:, :1] if same else valid


def _owned(x: Tensor) -> Tensor:
    """The tensor alone in its storage: a view of something larger would keep all of that alive."""
    whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if whole else x.clone(memory_format=torch.contiguous_format)
