"""Evicting layers whose heads keep different numbers of tokens: ragged storage, read by attention of our own.

transformers sees only the new tokens of such a layer and builds its mask for them alone; everything older is the
store's to know.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decantkv.cache.evicting_layer import EvictingLayer
from decantkv.cache.report import storage_bytes
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.hf import attention_hook
from decantkv.hf.attention_hook import AttentionCall, CallTerms, interrupted
from decantkv.hf.masks import PromptMask, among_new, padded_turn, read_prompt_mask
from decantkv.scoring.window import AttentionWindow, Rotate
from decantkv.selection.allocation import Contest
from decantkv.selection.selector import Kept, Order
from decantkv.selection.topk import FILLER, highest


class RaggedLayer(EvictingLayer):
    """Keeps its kept tokens in a `RaggedStore` where heads keep different numbers, or where it attends for itself."""

    lanes: RaggedStore | None = None
    contest: LayerContest | None = None  # the running contest with the other layers, where layers compete
    unmasked = False  # new tokens are all real, whatever the mask says: set for steps that a graph holds
    _fresh: tuple[Tensor, Tensor] | None = None  # new tokens whose attention call is still to come
    _shares: Tensor | None = None  # [S] each stored slot's share, while the contest runs

    @property
    def stored(self) -> int:
        """The most tokens any head stores."""
        return super().stored if self.lanes is None else int(self.lanes.lens.max())

    def _tensors(self) -> tuple[Tensor | None, Tensor | None]:
        return super()._tensors() if self.lanes is None else (self.lanes.keys, self.lanes.values)

    @attention_hook.uncompiled
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the new tokens' keys and values; after the prompt they alone are returned, and `attend` reads the rest.

        Raises:
            UnsupportedModelError: the attention call before this one never came.
        """
        if self.lanes is None:
            return super().update(key_states, value_states, *args, **kwargs)
        if self._fresh is not None:
            raise interrupted(self.layer_idx)
        self._fresh = key_states, value_states
        attention_hook.expect(self, key_states)
        return self._fresh

    @torch.no_grad()
    def attend(self, call: AttentionCall) -> Tensor | None:
        """Store the new tokens and attend to all that is stored: [B, q, HQ, Dv]."""
        if self.lanes is None or self._fresh is None:
            return super().attend(call)
        if call.query.requires_grad:
            raise ValueError("model: expected a forward without gradients (torch.no_grad()), got one with")
        keys, values = self._fresh
        batch, new = keys.shape[0], keys.shape[2]
        columns = self.lanes.columns
        mask = None
        if not self.unmasked:
            mask = among_new(call.mask, new=new, shown=lambda: columns() if self.kept is None else None)
        seen = read_prompt_mask(mask, batch=batch, kv_len=new, rows=new, device=keys.device)
        if seen.window is not None or (new > 1 and mask is None and not call.causal):
            raise ValueError("attention_mask: expected causal attention among new tokens, got another pattern")
        if seen.lengths is not None and self.frame is not None:
            raise padded_turn()
        self.lanes.append(keys, values, _real(seen.lengths, new, keys.device), reserve=self.reserve(new))
        self._fresh = None
        self.logical += new
        out = self.lanes.attend(call.query, scale=call.scale, softcap=call.softcap, sink_logits=call.sink_logits)
        return out.transpose(1, 2).contiguous()  # some models view it

    def _stored(self, call: CallTerms) -> tuple[Tensor, Tensor, list[int]]:
        """As `EvictingLayer._stored`; heads of a row hold equally many tokens where answers are evicted."""
        if self.lanes is None:
            return super()._stored(call)
        keys, values = self.lanes.right_aligned()
        return keys, values, self.lanes.lens.view(self.lanes.batch, -1)[:, 0].tolist()

    def _positions(self, keys: Tensor) -> Tensor:
        """As `EvictingLayer._positions`; lanes hold no pads."""
        if self.lanes is None:
            return super()._positions(keys)
        heads, stored = keys.shape[1:3]
        later = torch.arange(self.logical - self.lanes.appended, self.logical, device=keys.device)
        later = torch.where(self.lanes.columns(), later, FILLER)[:, None].expand(-1, heads, -1)
        kept = [] if self.kept is None else [self.kept.indices.expand(-1, heads, -1)]
        return torch.cat([*kept, later], 2).sort(-1).values[..., -stored:]

    def _restock(self, keys: Tensor, values: Tensor, kept: Kept) -> None:
        """As `EvictingLayer._restock`, in the lanes that are there."""
        if self.lanes is None:
            super()._restock(keys, values, kept)
        else:
            self.lanes.refill(keys, values, kept.counts.flatten())

    def forget_new(self) -> None:
        """A step failed: its tokens are not waited for any more."""
        self._fresh = None

    def get_seq_length(self, *args: Any) -> int:
        """Every token ever given, those included whose attention call is still to come."""
        return self.logical + (0 if self._fresh is None else self._fresh[0].shape[2])

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Of the new tokens alone."""
        if self.lanes is None:
            return super().get_mask_sizes(query_length)
        return query_length if isinstance(query_length, int) else int(query_length.shape[0]), self.logical

    def keep(self, call: AttentionCall, seen: PromptMask, rows: int) -> None:
        """Score, select, compact, and from then on attend to what is stored without the model's masks."""
        super().keep(call, seen, rows)
        same_heads = self.prompt is not None and call.key.shape[1] == self.prompt[0].shape[1]
        if same_heads and call.causal and not self.attends_twice and self.bounds.own(call.key.device):
            self.attend_alone()

    def attend_alone(self) -> None:
        """Move what is stored for every head alike into lanes, in place where memory is laid out for it."""
        if self.store is None:
            return
        keys, values = self.store.keys.contiguous(), self.store.values.contiguous()
        batch, heads, stored = keys.shape[:3]
        lanes = torch.arange(batch * heads, device=keys.device)
        filler = torch.zeros_like(lanes)
        if self.valid is not None:
            filler = (~self.valid).sum(-1).expand(-1, heads).flatten()
        self.lanes = RaggedStore(
            keys.view(-1, keys.shape[3]), values.view(-1, values.shape[3]), lanes * stored + filler, stored - filler,
            batch=batch, appended=0 if self.kept is not None else stored,
        )  # fmt: skip
        if self.kept is None and self.valid is not None:
            self.lanes.real = self.valid[:, 0]
        self.store = self.valid = None

    def store_kept(self, kept: Kept) -> None:
        """Keep the chosen tokens of the prompt, each head its own number."""
        if not self.settings.allocation.ragged:
            super().store_kept(kept)
            return
        keys, values = self._prompt()
        self.lanes, self.kept = RaggedStore.from_kept(keys, values, kept), kept

    def _renumber(self, kept: Kept, rotate: Rotate) -> None:
        if self.lanes is None:
            super()._renumber(kept, rotate)
            return
        ends = (self.lanes.starts + self.lanes.lens)[self.lanes.lanes()]
        behind = ends - torch.arange(ends.shape[0], device=ends.device)  # 1 at a lane's last slot
        ahead = self.logical - behind - kept.indices[kept.valid()]
        self.lanes.keys = rotate(self.lanes.keys[None, None], ahead[None])[0, 0]

    def _select(
        self, scores: Tensor, win: AttentionWindow, lengths: Sequence[int] | None, shared: bool, counts: list[int]
    ) -> Kept:
        if self.contest is None:
            return super()._select(scores, win, lengths, shared, counts)
        settings, terms = self._terms(counts)
        order = settings.order(scores, win=win, lengths=lengths, layer=self.place, shared=shared, **terms)
        kept = self.contest.enter(self, order)
        slots = kept.indices.clamp_min(0)
        self._shares = order.priority.gather(2, slots)[kept.valid()]
        return kept

    def shrink(self, counts: Tensor) -> None:
        """Give back all but the `counts[b, h]` highest of each head's tokens."""
        if self.lanes is None or self.kept is None or self._shares is None:
            raise RuntimeError("the layer takes part in no contest")
        lane = self.lanes.lanes()
        order = self._shares.argsort(descending=True, stable=True)
        order = order[lane[order].argsort(stable=True)]
        rank = torch.empty_like(order)
        rank[order] = torch.arange(order.shape[0], device=order.device) - self.lanes.starts[lane[order]]
        keep = rank < counts.to(lane.device).flatten()[lane]
        if bool(keep.all()):
            return
        self.lanes.shrink(keep)
        self._shares = self._shares[keep]
        left = torch.zeros_like(self.kept.valid()).masked_scatter_(self.kept.valid(), keep)
        indices = self.kept.indices.masked_fill(~left, FILLER).sort(-1).values
        held = left.sum(-1)
        self.kept = Kept(indices[..., indices.shape[2] - int(held.max()) :].contiguous(), held)

    def record(self, lengths: Sequence[int], counts: Tensor, bytes_before: int) -> None:
        """Note what was kept, at once or when the contest is over."""
        if self.contest is None or self.lanes is None:
            super().record(lengths, counts, bytes_before)
            return
        self.contest.records.append((weakref.ref(self), lengths, bytes_before))
        if self.place[0] == self.place[1] - 1:
            self.contest.close()

    def settle(self, lengths: Sequence[int], bytes_before: int) -> None:
        """The contest is over: what is kept now stays."""
        self._shares = None
        if self.kept is not None:
            super().record(lengths, self.kept.counts, bytes_before)

    def crop(self, tokens_to_remove: int) -> None:
        """As `PromptLayer.crop`; new tokens that an interrupted forward never attended to go in any case."""
        self.forget_new()
        super().crop(tokens_to_remove)

    def after_eviction(self) -> int:
        """How many tokens came, pads included, after what the last eviction left."""
        return super().after_eviction() if self.lanes is None else self.lanes.appended

    def _take_back(self, number: int) -> None:
        if self.lanes is None:
            super()._take_back(number)
        else:
            self.lanes.crop(number)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in a new order, as beam search wants them."""
        self._rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if self.lanes is None:
            super().batch_repeat_interleave(repeats)
        else:
            self._rows(torch.arange(self.lanes.batch, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows: their numbers, or True for each that stays."""
        if self.lanes is None:
            super().batch_select_indices(indices)
        else:
            chosen = indices.cpu() if isinstance(indices, Tensor) else indices
            self._rows(torch.arange(self.lanes.batch, device="cpu")[chosen])

    def _rows(self, rows: Tensor) -> None:
        if self.lanes is not None:
            self.lanes.select_rows(rows)
        self._each(lambda x: x.index_select(0, rows.to(x.device)))

    def offload(self) -> None:
        """Kept tokens to the CPU."""
        if self.lanes is None:
            super().offload()
        else:
            self.lanes.to("cpu")

    def prefetch(self) -> None:
        """Kept tokens back to where the prompt was."""
        if self.lanes is None:
            super().prefetch()
        elif self.kept is not None:
            self.lanes.to(self.kept.indices.device)

    def reset(self) -> None:
        """Empty again."""
        super().reset()
        self.lanes = self._fresh = self._shares = None

    def store_tensors(self) -> list[Tensor]:
        """Keys and values of the kept tokens."""
        return super().store_tensors() if self.lanes is None else [self.lanes.keys, self.lanes.values]

    def kept_bytes(self) -> int:
        """Bytes of the kept tokens' keys and values; lanes have no room before the first new token."""
        return super().kept_bytes() if self.lanes is None else storage_bytes(self.store_tensors())

    def tensors(self) -> list[Tensor]:
        """Everything the layer holds in memory."""
        return super().tensors() if self.lanes is None else self.lanes.tensors()


class LayerContest:
    """One budget over the layers of a cache: each enters when its prompt has been read, earlier ones give back."""

    def __init__(self) -> None:
        # weak, as layers hold their contest: an interrupted prompt's cache must go with its last reference
        self.records: list[tuple[weakref.ref[RaggedLayer], Sequence[int], int]] = []
        self._layers: list[weakref.ref[RaggedLayer]] = []
        self._contest = Contest([])
        self._width = 0

    def enter(self, layer: RaggedLayer, order: Order) -> Kept:
        """What the layer keeps for now; later layers may still win some of it.

        Raises:
            ValueError: a token of this layer takes another number of bytes than one of the first.
        """
        index, number = layer.place
        keys, values = layer._prompt()
        width, heads = keys.shape[3] + values.shape[3], keys.shape[1]
        if index == 0:
            self.records, self._layers, self._width = [], [], width
            free = [n - always for n, always in zip(order.n_keep, order.fixed, strict=True)]
            self._contest = Contest([number * heads * n for n in free])
        if width != self._width:
            raise ValueError(
                f"allocation: expected layers of equal head_dim under {order.rule.name!r}, which trades tokens between "
                f"them, got {width} after {self._width}; use 'ada' or 'uniform'"
            )
        fixed = torch.tensor(order.fixed, device="cpu")[:, None]
        counts = [fixed + won for won in self._contest.enter(order.priority)]
        for held, count in zip(self._layers, counts[:-1], strict=True):
            if (earlier := held()) is not None:
                earlier.shrink(count)
        self._layers.append(weakref.ref(layer))
        own = counts[-1].to(order.priority.device)
        return Kept(highest(order.priority, own, int(counts[-1].max())), own)

    def close(self) -> None:
        """The last layer has entered."""
        for held, lengths, bytes_before in self.records:
            if (layer := held()) is not None:
                layer.settle(lengths, bytes_before)
        self.records, self._layers, self._contest = [], [], Contest([])


def _real(lengths: Sequence[int] | None, new: int, device: torch.device) -> Tensor | None:
    """[B, new] bool: which new tokens are no pads; None when all are."""
    if lengths is None:
        return None
    return torch.arange(new, device=device) >= new - torch.tensor(lengths, device=device)[:, None]
