"""Watch a prompt's attention without evicting, and decode many evictions of one prompt as rows of one batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache

from decantkv.base.options import expect_int
from decantkv.cache.evicting_cache import (
    PromptLayer,
    cache_bytes,
    checked_model,
    gather,
    replace_layers,
    text_config,
    window_of,
)
from decantkv.hf.attention_hook import AttentionCall, Hold
from decantkv.hf.masks import PromptMask
from decantkv.scoring.window import AttentionWindow
from decantkv.selection.selector import FILLER, Kept

Observer = Callable[[AttentionWindow], None]

_serial = itertools.count()


class ObservingLayer(PromptLayer):
    """Shows its prompt's attention window to an observer and keeps everything."""

    def __init__(self, layer_idx: int, cache_id: int, rows: int, observer: Observer) -> None:
        super().__init__(layer_idx, cache_id, rows)
        self.observer = observer

    def keep(self, call: AttentionCall, seen: PromptMask, rows: int) -> None:
        """Call the observer while the layer's queries, keys and values are at hand."""
        self.observer(window_of(call, seen, rows, self.layer_idx))
        self.store_all()


class ObservingCache(DynamicCache):
    """A full cache that shows every full-attention layer's last queries with all keys and values.

    ```python
    cache = ObservingCache(model, lambda win: print(win.layer_idx, score_of(win)), rows=8)
    with torch.no_grad():
        model(**inputs, past_key_values=cache)
    ```
    """

    def __init__(self, model: PreTrainedModel, observer: Observer, *, rows: int) -> None:
        """Prepare empty layers; `observer` is called once per layer and prompt with at most `rows` queries.

        Raises:
            TypeError, ValueError: an argument out of its range.
            UnsupportedModelError: a model whose attention cannot be followed.
        """
        model = checked_model(model)
        expect_int("rows", rows, at_least=1)
        super().__init__(config=text_config(model))
        cache_id = next(_serial)
        replace_layers(self, model, lambda layer_idx: ObservingLayer(layer_idx, cache_id, rows, observer))
        self._hold = Hold(model)

    def nbytes(self) -> int:
        """Bytes of all keys and values held, by their distinct storages."""
        return cache_bytes(self)


class KeptLayer(PromptLayer):
    """A layer that starts out with kept tokens of a prompt somebody else read."""

    def __init__(self, layer_idx: int, cache_id: int, keys: Tensor, values: Tensor, kept: Kept, logical: int) -> None:
        super().__init__(layer_idx, cache_id, rows=1)
        self.fill(keys, values)
        self.logical = logical
        valid = kept.valid()
        self.valid, self.kept = None if bool(valid.all()) else valid, kept


class KeptCache(DynamicCache):
    """Several evictions of one prompt side by side, a batch row each; filler is masked, not freed.

    For comparing methods: one prefill serves them all. Memory is what the largest choice needs, times the rows.
    """

    def __init__(self, model: PreTrainedModel, full: DynamicCache, choices: Sequence[Sequence[Kept]]) -> None:
        """Gather each choice's tokens from a full cache of one prompt.

        Args:
            model: that read the prompt.
            full: its full cache, batch 1; layers that are not full attention are repeated for every row.
            choices: per row, a `Kept` [1, H, K] for every full-attention layer in order.

        Raises:
            ValueError: a choice without exactly one `Kept` per full-attention layer.
        """
        super().__init__(config=text_config(model))
        cache_id, rows = next(_serial), len(choices)
        layers: list[CacheLayerMixin] = []
        seen = 0
        for i, layer in enumerate(full.layers):
            if not isinstance(layer, PromptLayer):
                raise ValueError(f"full: expected only full-attention layers, got {type(layer).__name__} as layer {i}")
            kept = stack([choice[seen] for choice in choices])
            seen += 1
            keys, values = layer.tensors()
            layers.append(
                KeptLayer(
                    i,
                    cache_id,
                    gather(keys.expand(rows, -1, -1, -1), kept.indices),
                    gather(values.expand(rows, -1, -1, -1), kept.indices),
                    kept,
                    layer.logical,
                )
            )
        if any(len(choice) != seen for choice in choices):
            raise ValueError(f"choices: expected {seen} layers in each, got {[len(c) for c in choices]}")
        self.layers = layers
        self._hold = Hold(model)

    def nbytes(self) -> int:
        """Bytes of all keys and values held, filler included."""
        return cache_bytes(self)


def stack(kept: Sequence[Kept]) -> Kept:
    """Choices of several rows as one batch, filled up on the left to the longest."""
    most = max(k.indices.shape[2] for k in kept)
    indices = [F.pad(k.indices, (most - k.indices.shape[2], 0), value=FILLER) for k in kept]
    return Kept(torch.cat(indices), torch.cat([k.counts for k in kept]))
