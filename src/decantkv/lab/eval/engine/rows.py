"""Evicted copies of prompts as rows of one batch: fed, scored and decoded together."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from decantkv.cache.evicting_cache import cache_argument, text_config
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.decode.fused_ops import Standin
from decantkv.lab.eval.engine.attention import attending
from decantkv.lab.eval.engine.decoding import Decoder
from decantkv.lab.eval.engine.lanes import LaneLayer, gapless
from decantkv.lab.eval.engine.prompt import Reading
from decantkv.lab.eval.engine.quantise import quantise_keys, quantise_values
from decantkv.selection.selector import FILLER, Kept

ALIGN = 16  # slots; attention kernels want rows of masks aligned
QUANTISE_BYTES = 2**28  # float32 numbers that are quantised at once


@dataclass(frozen=True, eq=False)
class Row:
    """One copy of a prompt's cache and what is to be done with it.

    Attributes:
        reading: the prompt.
        cut: how many of its tokens the copy stands for; positions go on from there.
        rest: the prompt's tokens after the cut, still to be fed.
        kept: per layer [layers, H, K], or None for all `cut` tokens.
        bits: numbers of the copy go through this many bits; 0 leaves them alone.
        max_new_tokens: where generation is cut.
        stops: token ids that end the answer.
        answer_first: the first token may not be a stop.
    """

    reading: Reading
    cut: int
    rest: tuple[int, ...]
    kept: Kept | None = None
    bits: int = 0
    max_new_tokens: int = 0
    stops: tuple[int, ...] = ()
    answer_first: bool = False

    @property
    def stored(self) -> int:
        """Slots of the copy."""
        return self.cut if self.kept is None else self.kept.indices.shape[2]

    @property
    def asks(self) -> tuple[object, ...]:
        """Rows that agree in it begin with the same token once their prompt is wholly read."""
        return id(self.reading), self.stops if self.answer_first else ()

    def first_token(self) -> int:
        """Greedy token after a prompt that is wholly read."""
        logits = self.reading.next_logits
        return int(_forbid(logits[None], [self]).argmax(-1)[0])

    def nbytes(self, slots: int) -> int:
        """Bytes of the copy in a batch of that many slots."""
        return self.reading.nbytes // self.reading.length * slots


@dataclass
class Place:
    """The slots [T] int64 of new tokens, which layers of a batch share.

    Layers hold this and not the batch: a cycle of the two would keep their memory until the next garbage collection.
    """

    slots: Tensor


class RowLayer(CacheLayerMixin):
    """One layer's buffers [R, H, S, D]; new tokens go to the slots that the batch says."""

    is_sliding = False

    def __init__(self, place: Place, keys: Tensor, values: Tensor) -> None:
        self.place, self.keys, self.values = place, keys, values
        self.is_initialized = True

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new tokens; all slots are returned, masks hide the unused ones."""
        self.keys.index_copy_(2, self.place.slots, key_states)
        self.values.index_copy_(2, self.place.slots, value_states)
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Slots; positions are given, not derived."""
        return self.keys.shape[2]

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """All slots, no offset."""
        return self.keys.shape[2], 0

    def get_max_length(self) -> int:
        """Slots."""
        return self.keys.shape[2]

    get_max_cache_shape = get_max_length


class RowBatch:
    """Rows side by side, each with its own tokens, masks and positions."""

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        *,
        room: int,
        graphs: bool = False,
        standins: Sequence[Standin] = (),
        lanes: bool = False,
    ) -> None:
        """Gather the rows' tokens.

        Args:
            room: new tokens that a row may get.
            graphs: replay one captured CUDA graph a step.
            standins: take the place of the model's small operations in it.
            lanes: close the gaps before decoding, so that steps read tokens alone and no masks.
        """
        self.model, self.rows, self.graphs, self.standins, self.lanes = model, list(rows), graphs, standins, lanes
        self.device = rows[0].reading.keys[0].device
        self.begin = max(row.stored for row in rows)
        self.slots_total = -(-(self.begin + room) // ALIGN) * ALIGN
        self.used = 0  # new slots
        self.logical = torch.tensor([row.cut for row in rows], device=self.device)
        self.place = Place(torch.zeros(1, dtype=torch.long, device=self.device))
        self.cache = DynamicCache(config=text_config(model))
        self.cache.layer_class_to_replicate = None
        self._name = cache_argument(model)
        index = self._index()
        self.shown = self._read_shown(index)
        filled = zip(self._gather("keys", index), self._gather("values", index), strict=True)
        self.cache.layers = [RowLayer(self.place, keys, values) for keys, values in filled]
        self.masks: list[Tensor] = []
        self.stores: list[RaggedStore] = []  # the layers' tokens once gaps are closed
        self.lengths: Tensor | None = None  # [layers, R, H] of them

    def store_of(self, layer_idx: int) -> RaggedStore | None:
        """Return the store of a layer that attends by itself, or None if layers attend through masks."""
        return self.stores[layer_idx] if self.stores else None

    def mask_of(self, layer_idx: int) -> Tensor:
        """[R, 1 or H, T, S] bool: what the tokens being fed may see."""
        return self.masks[layer_idx % len(self.masks)]

    def _index(self) -> Tensor:
        """[layers, R, H, S] int32: the prompt's token in every slot, FILLER where there is none."""
        layers, heads = len(self.rows[0].reading.keys), self.rows[0].reading.keys[0].shape[1]
        shape = (layers, len(self.rows), heads, self.slots_total)
        index = torch.full(shape, FILLER, dtype=torch.int32, device=self.device)
        every = torch.arange(self.begin, dtype=torch.int32, device=self.device)
        for r, row in enumerate(self.rows):
            index[:, r, :, : row.stored] = every[: row.cut] if row.kept is None else row.kept.indices
        return index

    def _read_shown(self, index: Tensor) -> list[Tensor]:
        """[R, 1 or H, S] bool per layer, which slots hold a token; a single entry where all layers and heads agree."""
        stored = torch.tensor([row.stored for row in self.rows], device=self.device)
        front = (torch.arange(self.slots_total, device=self.device) < stored[:, None])[:, None]  # [R, 1, S]
        # the host knows of most choices that they have no filler; the others are asked once, together
        asked = [
            r for r, row in enumerate(self.rows) if row.kept is not None and set(row.kept.rows or ()) != {row.stored}
        ]
        if not asked or not bool(((index[:, asked] == FILLER) & front[asked]).any()):
            return [front]
        return list(index != FILLER)

    def _gather(self, name: str, index: Tensor) -> list[Tensor]:
        """Per layer [R, H, S, D], one launch for neighbours that share a reading; unused slots hold any token."""
        first = getattr(self.rows[0].reading, name)[0]
        buffers = [first.new_empty(*index.shape[1:], first.shape[3]) for _ in index]
        start = 0
        for _, group in itertools.groupby(self.rows, key=lambda row: id(row.reading)):
            rows = list(group)
            here, start = slice(start, start + len(rows)), start + len(rows)
            whole = getattr(rows[0].reading, name)  # per layer [1, H, N, D]
            heads, length = whole[0].shape[1:3]
            lane = torch.arange(0, heads * length, length, dtype=torch.int32, device=self.device)
            at = index[:, here].clamp_min(0) + lane[:, None]
            for source, into, tokens in zip(whole, buffers, at, strict=True):
                flat = source.reshape(heads * length, -1)
                torch.index_select(flat, 0, tokens.flatten(), out=into[here].view(-1, flat.shape[1]))
        for r, row in enumerate(self.rows):
            if row.bits:
                self._quantise(name, row, [buffer[r] for buffer in buffers])
        return buffers

    def _quantise(self, name: str, row: Row, into: Sequence[Tensor]) -> None:
        """Fill a row's [H, S, D] per layer with what its bits leave of the prompt; as many layers at once as fit."""
        through, whole = quantise_keys if name == "keys" else quantise_values, getattr(row.reading, name)
        number = max(1, QUANTISE_BYTES // (4 * whole[0].numel()))
        for at in range(0, len(whole), number):
            back = through(torch.cat(whole[at : at + number])[:, :, : row.cut], row.bits)
            for one, buffer in zip(back, into[at : at + number], strict=True):
                buffer[:, : row.cut] = one

    @torch.no_grad()
    def feed(self, tokens: Sequence[Sequence[int]], *, keep: int = 1) -> Tensor:
        """Feed each row its tokens (at least one); returns logits [R, keep, V] of the last `keep` of each.

        Shorter rows are padded on the left with slots that no token sees.
        """
        width = max(len(row) for row in tokens)
        padded = torch.tensor([[0] * (width - len(row)) + list(row) for row in tokens], device=self.device)
        lengths = torch.tensor([len(row) for row in tokens], device=self.device)
        real = torch.arange(width, device=self.device) >= (width - lengths)[:, None]
        positions = (self.logical[:, None] + torch.cumsum(real, 1) - 1).clamp_min(0)
        start = self.begin + self.used
        self.place.slots = torch.arange(start, start + width, device=self.device)
        for shown in self.shown:
            shown[:, :, start : start + width] = real[:, None]
        future = torch.arange(self.slots_total, device=self.device) > self.place.slots[:, None]  # [T, S]
        self.masks = [shown[:, :, None] & ~future for shown in self.shown]
        self.used += width
        self.logical = self.logical + lengths
        return self.forward(padded, positions, keep)

    def rewind(self) -> None:
        """Forget all new tokens."""
        for shown in self.shown:
            shown[:, :, self.begin :] = False
        self.used = 0
        self.logical = torch.tensor([row.cut for row in self.rows], device=self.device)

    def close_gaps(self, steps: int) -> None:
        """From now on layers hold what is shown of them alone, and room for so many tokens; nothing is fed any more."""
        layers = [(layer.keys, layer.values) for layer in self.cache.layers]
        self.cache.layers = []  # each is let go of as soon as it has moved
        self.stores, self.lengths = gapless(layers, self.shown, steps)
        self.cache.layers = [LaneLayer(store) for store in self.stores]
        self.shown, self.masks = [], []

    def forget(self, done: Tensor) -> None:
        """Once gaps are closed, rows [R] bool of which nothing is read any more: a step costs what the others hold."""
        if self.lengths is not None:
            self.lengths.masked_fill_(done[:, None], 0)

    def take(self, left: Tensor) -> None:
        """Keep only these rows' memory; their numbers change."""
        self.shown = [shown[left] for shown in self.shown]
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[left], layer.values[left]

    def forward(self, tokens: Tensor, positions: Tensor, keep: int) -> Tensor:
        """Logits [R, keep, V] of one forward over the slots that were chosen."""
        with attending(self.model, self):
            out = self.model(
                tokens, position_ids=positions, use_cache=True, logits_to_keep=keep, **{self._name: self.cache}
            )
        logits: Tensor = out.logits
        return logits

    def forced_logits(self, continuations: Sequence[Sequence[int]]) -> list[Tensor]:
        """Per row [C, V] float32: logits that predict each token of its continuation, given all before it.

        The row's rest is fed first. Where nothing is left to feed, the first token's logits are the prompt's own,
        which no eviction can change.
        """
        keep = max(len(c) for c in continuations)
        fed = [(*row.rest, *c[:-1]) for row, c in zip(self.rows, continuations, strict=True)]
        if not any(fed):
            return [row.reading.next_logits[None] for row in self.rows]
        logits = self.feed([f or (0,) for f in fed], keep=keep)
        self.rewind()
        out = []
        for r, (row, wanted) in enumerate(zip(self.rows, continuations, strict=True)):
            predicted = len(wanted) if row.rest else len(wanted) - 1  # the others are the prompt's own prediction
            own = logits[r, logits.shape[1] - predicted :].float()
            out.append(own if row.rest else torch.cat([row.reading.next_logits[None], own]))
        return out

    @torch.no_grad()
    def generate(self) -> list[list[int]]:
        """Greedy answers of all rows, each ending with its stop token or at its limit."""
        begun = _first_tokens(self.rows)
        first = self.feed([row.rest or b for row, b in zip(self.rows, begun, strict=True)])[:, -1]
        limits = torch.tensor(
            [row.max_new_tokens - len(b) for row, b in zip(self.rows, begun, strict=True)], device=self.device
        )
        tokens = _forbid(first, [None if b else row for row, b in zip(self.rows, begun, strict=True)]).argmax(-1)
        produced = Decoder(self, tokens, limits, _stop_table(self.rows, self.device)).run()
        return [_until_stop([*b, *new], row) for b, new, row in zip(begun, produced.tolist(), self.rows, strict=True)]


def _stop_table(rows: Sequence[Row], device: torch.device) -> Tensor:
    """[R, E] stop ids, −1 where a row has fewer."""
    width = max(1, *(len(row.stops) for row in rows))
    return torch.tensor([[*row.stops, *[FILLER] * (width - len(row.stops))] for row in rows], device=device)


def _forbid(logits: Tensor, rows: Sequence[Row | None]) -> Tensor:
    """Logits [R, V] with the stops at −inf for rows that must answer something first."""
    bound = [(r, row.stops) for r, row in enumerate(rows) if row is not None and row.answer_first and row.stops]
    if bound:
        at = [(r, stop) for r, stops in bound for stop in stops]
        logits = logits.clone()
        logits[tuple(torch.tensor(at, device=logits.device).T)] = -torch.inf
    return logits


def _first_tokens(rows: Sequence[Row]) -> list[list[int]]:
    """Per row the greedy token after a prompt that is wholly read, or nothing where some of it is left to feed."""
    asking: dict[object, Row] = {}
    for row in rows:
        if not row.rest:
            asking.setdefault(row.asks, row)
    if not asking:
        return [[] for _ in rows]
    logits = _forbid(torch.stack([row.reading.next_logits for row in asking.values()]), list(asking.values()))
    first = dict(zip(asking, logits.argmax(-1).tolist(), strict=True))
    return [[] if row.rest else [first[row.asks]] for row in rows]


def _until_stop(tokens: list[int], row: Row) -> list[int]:
    answer = tokens[: row.max_new_tokens]
    for i, token in enumerate(answer):
        if token in row.stops:
            return answer[: i + 1]
    return answer
