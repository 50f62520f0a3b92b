"""Watch a prompt's attention without evicting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from decantkv.base.options import expect_int
from decantkv.cache.call_window import window_of
from decantkv.cache.evicting_cache import cache_bytes, checked_model, replace_layers, text_config
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.phases import Prompt
from decantkv.cache.policy import Policy
from decantkv.hf.attention_hook import AttentionCall, Hold
from decantkv.hf.masks import PromptMask
from decantkv.scoring.window import AttentionWindow

Observer = Callable[[AttentionWindow], None]


@dataclass(frozen=True, eq=False)
class Observing(Policy):
    """Show each prompt's attention window to an observer, and keep everything."""

    observer: Observer
    rows: int

    def decide(self, layer: EvictingLayer, prompt: Prompt, call: AttentionCall, seen: PromptMask) -> None:
        """Call the observer while the layer's queries, keys and values are at hand."""
        self.observer(window_of(call, seen, self.rows, layer.layer_idx))
        layer.hold_all(prompt)


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
        replace_layers(self, model, Observing(observer, rows))
        self._hold = Hold(model)

    def nbytes(self) -> int:
        """Bytes of all keys and values held, by their distinct storages."""
        return cache_bytes(self)
