"""Read a prompt once, stopping where a regime cuts it, and choose there what every policy keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from decantkv import interface
from decantkv.cache import cache_argument, check_model, text_config
from decantkv.interface import AttentionCall, Hold
from decantkv.scoring.window import AttentionWindow, make_window
from decantkv.selection import Kept
from decantkv.settings import Settings

_serial = itertools.count()


class WatchedLayer(DynamicLayer):
    """Keeps everything, and beside it the last `rows` queries with what the model's attention call said."""

    def __init__(self, layer_idx: int, cache_id: int, rows: int) -> None:
        super().__init__()
        self.layer_idx, self.cache_id, self.rows = layer_idx, cache_id, rows
        self.queries: Tensor | None = None  # [1, HQ, ≤ rows, D]
        self.call: AttentionCall | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and announce the attention call that follows."""
        interface.expect(self)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

    def before_attention(self, mask: Any, **_: Any) -> Any:
        """The mask is the model's own."""
        return mask

    def after_attention(self, call: AttentionCall) -> None:
        """Keep the newest queries."""
        newest = call.query if self.queries is None else torch.cat([self.queries, call.query], dim=2)
        self.queries = newest[:, :, -self.rows :].clone()
        self.call = AttentionCall(**{**vars(call), "query": self.queries, "key": None, "value": None, "mask": None})

    def window(self, rows: int) -> AttentionWindow:
        """The last queries with all keys and values, as methods receive them."""
        if self.queries is None or self.call is None:
            raise RuntimeError("the layer has not seen a prompt")
        return make_window(
            self.queries[:, :, -rows:],
            self.keys,
            self.values,
            scale=self.call.scale,
            softcap=self.call.softcap,
            sink_logits=self.call.sink_logits,
            layer_idx=self.layer_idx,
        )


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
        chunk: tokens of one forward.
    """

    def __init__(self, model: PreTrainedModel, *, rows: int, chunk: int = 32768) -> None:
        check_model(model)
        self.model, self.rows, self.chunk = model, max(rows, 1), chunk
        self._name = cache_argument(model)
        probe = DynamicCache(config=text_config(model)).layers
        others = sorted({type(layer).__name__ for layer in probe if type(layer) is not DynamicLayer})
        if others:
            raise ValueError(
                f"model: expected full attention in every layer, got {', '.join(others)}; "
                "evaluate such a model through attach and generate"
            )
        self._layers = text_config(model).num_hidden_layers

    @torch.no_grad()
    def read(self, ids: Sequence[int], cuts: Iterable[int]) -> Iterable[tuple[int, list[AttentionWindow]]]:
        """Read up to each cut in turn; yields (cut, a window per layer) there.

        The windows see keys up to the cut. After the last yield, `reading()` gives the whole prompt.
        """
        cache_id = next(_serial)
        cache = DynamicCache(config=text_config(self.model))
        self._watched = [WatchedLayer(i, cache_id, self.rows) for i in range(self._layers)]
        cache.layers = list(self._watched)
        cache.layer_class_to_replicate = None
        tokens = torch.tensor([list(ids)], device=self.model.device)
        hold = Hold(self.model)
        try:
            begin = 0
            for cut in sorted({*cuts, len(ids)}):
                begin = self._forward(tokens, begin, cut, cache)
                yield cut, [layer.window(self.rows) for layer in self._watched]
        finally:
            interface.forget()
            hold.close()

    def reading(self) -> Reading:
        """The prompt just read."""
        keys = [layer.keys for layer in self._watched]
        values = [layer.values for layer in self._watched]
        return Reading(keys, values, keys[0].shape[2], self._next_logits)

    def _forward(self, tokens: Tensor, begin: int, stop: int, cache: DynamicCache) -> int:
        for start in range(begin, stop, self.chunk):
            part = tokens[:, start : min(start + self.chunk, stop)]
            positions = torch.arange(start, start + part.shape[1], device=tokens.device)[None]
            out = self.model(part, position_ids=positions, use_cache=True, logits_to_keep=1, **{self._name: cache})
            self._next_logits = out.logits[0, -1].float()
        return stop


def choose(windows: Sequence[AttentionWindow], settings: Settings, scores: Tensor) -> Kept:
    """What a policy keeps in every layer, from the stacked scores [layers, H, N]; indices are [layers, H, K]."""
    return settings.choose(scores, lengths=None)


def score(windows: Sequence[AttentionWindow], settings: Settings) -> Tensor:
    """[layers, H, N] float32: the method's scores in every layer."""
    return torch.cat([settings.score(_narrow(window, settings.rows)) for window in windows])


def _narrow(window: AttentionWindow, rows: int) -> AttentionWindow:
    if window.window <= rows:
        return window
    return make_window(
        window.q[:, :, -rows:],
        window.k,
        window.v,
        scale=window.scale,
        softcap=window.softcap,
        sink_logits=window.sink_logits,
        layer_idx=window.layer_idx,
    )
