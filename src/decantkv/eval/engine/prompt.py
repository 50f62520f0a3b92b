"""Read a prompt once, stopping where a regime cuts it, and choose there what every policy keeps."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from decantkv import interface
from decantkv.cache import cache_argument, check_model, text_config
from decantkv.interface import AttentionCall, Hold
from decantkv.needs import output_projection, rotation
from decantkv.options import Need
from decantkv.scoring.window import AttentionWindow, Rotate, make_window

_serial = itertools.count()


class WatchedLayer(DynamicLayer):
    """Keeps everything, and beside it the last `rows` queries (None: all) with what the attention call said."""

    def __init__(self, layer_idx: int, cache_id: int, rows: int | None) -> None:
        super().__init__()
        self.layer_idx, self.cache_id, self.rows = layer_idx, cache_id, rows
        self.queries: Tensor | None = None  # [1, HQ, ≤ rows, D]
        self.call: AttentionCall | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and announce the attention call that follows."""
        interface.expect(self)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return keys, values

    def attend(self, call: AttentionCall) -> None:
        """The model's own attention reads everything."""

    def before_attention(self, mask: Any, **_: Any) -> Any:
        """The mask is the model's own."""
        return mask

    def after_attention(self, call: AttentionCall) -> None:
        """Keep the newest queries."""
        newest = call.query if self.queries is None else torch.cat([self.queries, call.query], dim=2)
        self.queries = newest if self.rows is None else newest[:, :, -self.rows :].clone()
        self.call = replace(call, query=self.queries, key=self.queries, value=self.queries, mask=None)

    def window(self, rows: int, needs: frozenset[Need], rotate: Rotate | None) -> AttentionWindow:
        """The last `rows` queries with all keys and values, as methods receive them."""
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
            queries=self.queries if self.rows is None else None,
            output_projection=output_projection(self.call.module, self.queries, self.values)
            if "W_O" in needs
            else None,
            rotate=rotate,
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
        needs: what the methods name as theirs.
        memory: bytes that a forward's activations and mask may take.
    """

    def __init__(
        self, model: PreTrainedModel, *, rows: int, needs: frozenset[Need] = frozenset(), memory: int = 2**34
    ) -> None:
        check_model(model)
        self.model, self.rows, self.memory = model, max(rows, 1), memory
        self._needs = needs
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

    @torch.no_grad()
    def read(self, ids: Sequence[int], cuts: Iterable[int]) -> Iterable[tuple[int, list[AttentionWindow]]]:
        """Read up to each cut in turn; yields (cut, a window per layer) there.

        The windows see keys up to the cut. After the last yield, `reading()` gives the whole prompt.
        """
        cache_id = next(_serial)
        cache = DynamicCache(config=text_config(self.model))
        remembered = None if "queries" in self._needs else self.rows
        self._watched = [WatchedLayer(i, cache_id, remembered) for i in range(self._layers)]
        cache.layers = list(self._watched)
        cache.layer_class_to_replicate = None
        tokens = torch.tensor([list(ids)], device=self.model.device)
        self.chunk = self.chunk_of(len(ids))
        hold = Hold(self.model)
        try:
            begin = 0
            for cut in sorted({*cuts, len(ids)}):
                begin = self._forward(tokens, begin, cut, cache)
                yield cut, [layer.window(self.rows, self._needs, self._rotate) for layer in self._watched]
        finally:
            interface.forget()
            hold.close()

    def chunk_of(self, length: int) -> int:
        """Tokens of one forward of a prompt, so that its activations and mask fit the memory."""
        config = text_config(self.model)
        hidden = int(config.hidden_size)
        wide = int(getattr(config, "intermediate_size", None) or 4 * hidden)
        width = 4 * (8 * hidden + 3 * wide)  # bytes a token, at most 4 a number
        mask = 7 * length  # bytes a token: a bool, and what a backend makes of it
        return max(256, min(32768, self.memory // (width + mask)))

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
