"""Read a prompt once, stopping where a regime cuts it, and choose there what every policy keeps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from decantkv.base.options import Need
from decantkv.cache.call_window import window_of
from decantkv.cache.evicting_cache import ATTEND_TWICE, cache_argument, checked_model, text_config
from decantkv.hf import attention_hook
from decantkv.hf.attention_hook import AttentionCall, Hold
from decantkv.hf.chunked_attention import attend_chunk
from decantkv.hf.masks import PromptMask
from decantkv.hf.model_parts import decoder_of, rotation
from decantkv.scoring import streams
from decantkv.scoring.rehearsal import Rehearsal
from decantkv.scoring.window import AttentionWindow, Denominators, Rotate
from decantkv.settings import Settings

_serial = itertools.count()
CAUSAL = PromptMask(None, None)  # of a prompt without pads


@dataclass
class Carried:
    """Taken from one cut of a prompt to the next.

    Attributes:
        column_mass: [layers, H, N] float32 of the newest cut where it was asked for.
    """

    column_mass: Tensor | None = None


class Windows(list[AttentionWindow]):
    """A window per layer, and all layers' as one batch.

    Attributes:
        together: the layers as the batch rows of one window, views of the same memory without what belongs to a layer
            (index, W_O, rotation); None if the layers' attention differs in more than its tensors.
        carried: what later cuts of the prompt need not compute again.
        rehearsed: gives [layers, H, N] scores by the queries of the settings' rehearsal, while the reader stands here.
    """

    def __init__(
        self,
        each: Sequence[AttentionWindow],
        together: AttentionWindow | None,
        carried: Carried,
        rehearsed: Callable[[Settings], Tensor],
    ) -> None:
        super().__init__(each)
        self.together, self.carried, self.rehearsed = together, carried, rehearsed

    @functools.cached_property
    def with_norms(self) -> AttentionWindow | None:
        """The same with ‖W_O v‖₁ of every layer's values, which some methods rank by at every budget."""
        pairs = [(win, win.output_projection) for win in self if win.output_projection is not None]
        if self.together is None or len(pairs) < len(self):
            return None
        return replace(self.together, projected_norm=torch.cat([streams.projected_norm(*pair) for pair in pairs]))


class Stack:
    """One tensor for all layers of a prompt, filled layer by layer and chunk by chunk: nothing is copied twice."""

    def __init__(self, layers: int, length: int) -> None:
        self.layers, self.length = layers, length
        self.whole: Tensor | None = None  # [layers, heads, N, D]

    def put(self, layer: int, start: int, states: Tensor) -> Tensor:
        """Write a layer's [1, heads, n, D] from `start` on; returns its [1, heads, start + n, D] so far.

        Raises:
            ValueError: the layers differ in shape.
        """
        heads, dim = states.shape[1], states.shape[3]
        if self.whole is None:
            self.whole = states.new_empty(self.layers, heads, self.length, dim)
        elif (heads, dim) != (self.whole.shape[1], self.whole.shape[3]):
            raise ValueError(
                f"model: expected the same heads in every layer, got {self.whole.shape[1]}·{self.whole.shape[3]} and, "
                f"in layer {layer}, {heads}·{dim}"
            )
        stop = start + states.shape[2]
        self.whole[layer, :, start:stop] = states[0]
        return self.whole[layer : layer + 1, :, :stop]

    def until(self, stop: int) -> Tensor:
        """[layers, heads, stop, D]."""
        if self.whole is None:
            raise RuntimeError("no prompt was read")
        return self.whole[:, :, :stop]


class WatchedLayer(DynamicLayer):
    """Keeps everything, and beside it the last `rows` queries (None: all) with what the attention call said.

    Args:
        keys, values, queries, lse: where the layer keeps them; queries and softmax denominators only where all of them
            are remembered.
        own: whether a prompt's later chunks attend by `attend_chunk` and not by the model's function.
    """

    def __init__(
        self,
        layer_idx: int,
        cache_id: int,
        rows: int | None,
        keys: Stack,
        values: Stack,
        queries: Stack,
        lse: Stack,
        *,
        own: bool,
    ) -> None:
        super().__init__()
        self.layer_idx, self.cache_id, self.rows, self.own = layer_idx, cache_id, rows, own
        self._keys, self._values, self._queries, self._lse = keys, values, queries, lse
        self.known = (0, 0)  # whose denominators are kept
        self.queries: Tensor | None = None  # [1, HQ, ≤ rows, D]
        self.call: AttentionCall | None = None
        self.plain = True  # so far
        self.passage: Callable[[WatchedLayer, AttentionCall], None] | None = None  # takes the calls of a rehearsal
        self.hints: tuple[Tensor, Tensor] | None = None  # output and denominators of a passage's call

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and announce the attention call that follows."""
        start = self.get_seq_length()
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._keys.put(self.layer_idx, start, key_states)
        self.values = self._values.put(self.layer_idx, start, value_states)
        attention_hook.expect(self, self.keys)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of the chunk alone where its attention knows what is before it: such a causal mask is never built."""
        if self.own:
            return query_length, self.get_seq_length()
        sizes: tuple[int, int] = super().get_mask_sizes(query_length)
        return sizes

    def attend(self, call: AttentionCall) -> Tensor | None:
        """[1, q, HQ, Dv] of a later chunk without a mask, where that is the model's attention; else the model's own."""
        new, kv_len = call.query.shape[2], call.key.shape[2]
        if not self.own or new == kv_len:
            return None
        if not _plain(call):
            raise RuntimeError(f"layer {self.layer_idx}: expected plain causal attention as the layer began with")
        out, lse = attend_chunk(call.query, call.key, call.value, held=[kv_len], scale=call.scale)
        self.hints = None if lse is None or self.passage is None else (out, lse)
        if self.passage is None and self.rows is None and lse is not None:
            self._note(lse, kv_len - new)
        return out.transpose(1, 2).contiguous()

    def _note(self, lse: Tensor, start: int) -> None:
        """Keep the denominators [1, HQ, q] of a chunk's queries, as long as the chunks follow upon one another."""
        begin, end = self.known
        if begin == end or start == end:
            self._lse.put(self.layer_idx, start, lse[..., None])
            self.known = (start if begin == end else begin, start + lse.shape[2])

    def before_attention(self, call: AttentionCall) -> Any:
        """The mask is the model's own."""
        return call.mask

    def after_attention(self, call: AttentionCall) -> None:
        """Keep the newest queries."""
        if self.passage is not None:
            self.passage(self, call)
            return
        self.plain = self.plain and _plain(call)
        if self.rows is None:
            self.queries = self._queries.put(self.layer_idx, call.key.shape[2] - call.query.shape[2], call.query)
        else:
            newest = call.query if self.queries is None else torch.cat([self.queries, call.query], dim=2)
            self.queries = newest[:, :, -self.rows :].clone()
        self.call = replace(call, query=self.queries, key=self.queries, value=self.queries, mask=None)

    def go_back(self, length: int) -> None:
        """Hold the first `length` tokens alone."""
        self.keys, self.values = self.keys[:, :, :length], self.values[:, :, :length]
        self.passage = self.hints = None

    def let_go(self) -> None:
        """Keys and values are what is left of a prompt that was read."""
        self.queries = self.call = None

    def window(self, rows: int, needs: frozenset[Need], rotate: Rotate | None) -> AttentionWindow:
        """The last `rows` queries with all keys and values, as methods receive them."""
        if self.queries is None or self.call is None:
            raise RuntimeError("the layer has not seen a prompt")
        call = replace(self.call, query=self.queries, key=self.keys, value=self.values)
        return window_of(call, CAUSAL, rows, self.layer_idx, needs=needs, rotate=rotate)


@dataclass
class Reading:
    """A prompt in the model's cache.

    Attributes:
        keys, values: per layer [1, H, N, D], all of the prompt's.
        length: N.
        next_logits: [V] float32 after the last token.
    """

    keys: list[Tensor]
    values: list[Tensor]
    length: int
    next_logits: Tensor = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))


class Reader:
    """Reads prompts with one model; every layer must be a full-attention one.

    Args:
        rows: how many of the last queries the policies' methods look at, at most.
        needs: what the methods name as theirs.
        memory: bytes that a forward's activations and mask may take.
        rehearsals: what policies run over prompts.

    Attributes:
        plain: whether the model's attention, tried on two tokens, is causal SDPA and nothing else. Chunks after the
            first then attend by `attend_chunk`, and no mask is built.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        rows: int,
        needs: frozenset[Need] = frozenset(),
        memory: int = 2**34,
        rehearsals: Sequence[Rehearsal] = (),
    ) -> None:
        model = checked_model(model)
        self.model, self.rows, self.memory = model, max(rows, 1), memory
        self._needs, self._rehearsals = needs, rehearsals
        self._rotate = rotation(model) if "rotate" in needs else None
        self._name = cache_argument(model)
        probe = DynamicCache(config=text_config(model)).layers
        others = sorted({type(layer).__name__ for layer in probe if type(layer) is not DynamicLayer})
        if others:
            raise ValueError(
                f"model: expected full attention in every layer, got {', '.join(others)}; "
                "evaluate such a model through attach and generate"
            )
        self._layers = text_config(model).num_hidden_layers
        self.plain = False
        for _ in self.read([0, 0], []):
            pass
        twice = text_config(model).model_type in ATTEND_TWICE  # of whose two calls a layer sees one
        self.plain = not twice and all(layer.plain for layer in self._watched)

    @torch.no_grad()
    def read(self, ids: Sequence[int], cuts: Iterable[int], *, question: int = 0) -> Iterable[tuple[int, Windows]]:
        """Read up to each cut in turn; yields (cut, a window per layer) there.

        The windows see keys up to the cut; `question` is how many tokens a rehearsal may take from the prompt's end.
        After the last yield, `reading()` gives the whole prompt.
        """
        cache_id = next(_serial)
        cache = DynamicCache(config=text_config(self.model))
        remembered = None if "queries" in self._needs else self.rows
        room = max([rehearsal.longest(len(ids)) for rehearsal in self._rehearsals] or [0])
        room = max(room, question) if room else 0
        self._stacks = [Stack(self._layers, len(ids) + room) for _ in range(4)]
        self._carried = Carried()
        self._watched = [
            WatchedLayer(i, cache_id, remembered, *self._stacks, own=self.plain) for i in range(self._layers)
        ]
        cache.layers = list(self._watched)
        cache.layer_class_to_replicate = None
        tokens = torch.tensor([list(ids)], device=self.model.device)
        self.chunk = self.chunk_of(len(ids))
        hold = Hold(self.model)
        try:
            begin = 0
            for cut in sorted({*cuts, len(ids)}):
                begin = self._forward(tokens, begin, cut, cache)
                yield cut, self._windows(cut, functools.partial(self._rehearse, tokens[:, :cut], cache))
        finally:
            attention_hook.forget()
            hold.close()
            for layer in self._watched:  # windows hold what they look at
                layer.let_go()
            self._stacks[2:] = [Stack(0, 0), Stack(0, 0)]

    def chunk_of(self, length: int) -> int:
        """Tokens of one forward of a prompt, so that its activations and mask fit the memory."""
        config = text_config(self.model)
        hidden = int(config.hidden_size)
        wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        width = 4 * (8 * hidden + 3 * wide)  # bytes per token, at most 4 per number
        # bytes per token: a bool, and what a backend makes of it; on a CPU attend_chunk has one as well
        mask = 0 if self.plain and self.model.device.type == "cuda" else 7 * length
        return max(256, min(32768, self.memory // (width + mask)))

    def forget(self) -> None:
        """Hold nothing of the prompt that was read last, or in part."""
        self._stacks, self._watched, self._carried = [], [], Carried()

    def reading(self) -> Reading:
        """The prompt just read."""
        keys = [layer.keys for layer in self._watched]
        values = [layer.values for layer in self._watched]
        return Reading(keys, values, keys[0].shape[2], self._next_logits)

    @torch.no_grad()
    def _rehearse(self, ids: Tensor, cache: DynamicCache, settings: Settings) -> Tensor:
        """[layers, H, N] scores of the tokens read so far, `ids` [1, N], by the queries of the settings' rehearsal."""
        rehearsal, layers, length = settings.rehearsal, self._watched, ids.shape[1]
        if rehearsal is None:
            raise ValueError("settings: expected a rehearsal, got none")
        scores: list[Tensor | None] = [None] * len(layers)

        def passage(weights: Tensor | None, layer: WatchedLayer, call: AttentionCall) -> None:
            needs, rows = settings.method.needs, call.query.shape[2]
            window = window_of(
                call, CAUSAL, rows, layer.layer_idx, needs=needs, rotate=self._rotate, hints=layer.hints
            )  # fmt: skip
            counted = None if weights is None else weights[:, None]
            made = settings.score(replace(window, row_weights=counted))[..., :length]
            before = scores[layer.layer_idx]
            scores[layer.layer_idx] = made.contiguous() if before is None else settings.method.add(before, made)

        keys = [layer.keys for layer in layers] if rehearsal.anchors else []
        mean = not settings.method.takes_largest
        for tokens, weights in rehearsal.passages(ids, keys, mean=mean):
            position = torch.arange(length, length + tokens.shape[1], device=ids.device)[None]
            try:
                for layer in layers:
                    layer.passage = functools.partial(passage, weights)
                decoder_of(self.model).forward(tokens, position_ids=position, use_cache=True, **{self._name: cache})
            finally:
                for layer in layers:
                    layer.go_back(length)
        return torch.cat([x for x in scores if x is not None])

    def _windows(self, cut: int, rehearsed: Callable[[Settings], Tensor]) -> Windows:
        each = [layer.window(self.rows, self._needs, self._rotate) for layer in self._watched]
        first = each[0]
        if any((win.scale, win.softcap) != (first.scale, first.softcap) or win.sink_logits is not None for win in each):
            return Windows(each, None, self._carried, rehearsed)
        keys, values, queries, lse = self._stacks
        every = queries.until(cut) if first.queries is not None else None
        begin, end = self._watched[0].known
        known = Denominators(lse.until(cut)[..., 0], begin, end) if begin < end else None
        together = AttentionWindow(
            torch.cat([win.q for win in each]),
            keys.until(cut),
            values.until(cut),
            first.scale,
            softcap=first.softcap,
            queries=every,
            denominators=known,
            column_mass=self._carried.column_mass,
        )
        return Windows(each, together, self._carried, rehearsed)

    def _forward(self, tokens: Tensor, begin: int, stop: int, cache: DynamicCache) -> int:
        for start in range(begin, stop, self.chunk):
            part = tokens[:, start : min(start + self.chunk, stop)]
            positions = torch.arange(start, start + part.shape[1], device=tokens.device)[None]
            out = self.model(part, position_ids=positions, use_cache=True, logits_to_keep=1, **{self._name: cache})
            self._next_logits = out.logits[0, -1].float()
        return stop


def _plain(call: AttentionCall) -> bool:
    """Return whether an attention call asks for causal SDPA without a mask, which `attend_chunk` can do."""
    changed = any(x is not None for x in (call.mask, call.softcap, call.sink_logits))
    return call.backend == "sdpa" and call.causal and not changed and not call.dropout
