"""One full-cache reading of a prompt: scores and weights while it is read, and what its answers attend to after."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from decantkv import scoring
from decantkv.cache.evicting_cache import cache_argument, replace_layers, text_config
from decantkv.cache.layer import PromptLayer, window_of
from decantkv.hf import attention_hook
from decantkv.hf.attention_hook import AttentionCall, Hold
from decantkv.hf.masks import PromptMask
from decantkv.scoring.window import make_window

OnPrompt = Callable[[int, AttentionCall, PromptMask], None]

_serial = itertools.count()


class WatchedCache(DynamicCache):  # type: ignore[misc]  # transformers' caches are untyped
    """A full cache that shows each layer's prompt once and adds up the attention of every later token."""

    def __init__(self, model: PreTrainedModel, on_prompt: OnPrompt, *, rows: int) -> None:
        """Prepare empty layers.

        Args:
            on_prompt: called with (layer, its attention call, its mask) while the prompt is read.
            rows: queries that the mask is read for.
        """
        super().__init__(config=text_config(model))
        self.answer: dict[int, Tensor] = {}  # by layer, [H, N] float64 summed weight of the answer's rows
        self.answer_rows = 0
        cache_id = next(_serial)
        replace_layers(self, model, lambda layer_idx: _WatchedLayer(layer_idx, cache_id, rows, on_prompt, self))
        self._hold = Hold(model)

    def prompt_layers(self) -> list[int]:
        """The layers that hold a full prompt, which are those that eviction acts on."""
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, _WatchedLayer)]

    def add(self, layer_idx: int, call: AttentionCall) -> None:
        """Add the new rows' attention to the prompt."""
        rows = call.query.shape[2]
        win = make_window(
            call.query,
            call.key,
            call.value,
            scale=call.scale,
            softcap=call.softcap,
            sink_logits=call.sink_logits,
            layer_idx=layer_idx,
        )
        mass = scoring.compute("attention_mass", win)[0].double()  # [H, N + answer so far]
        total = self.answer.get(layer_idx)
        self.answer[layer_idx] = mass[:, : self.prompt_len] + (0.0 if total is None else total)
        if layer_idx == self.prompt_layers()[0]:
            self.answer_rows += rows

    @property
    def prompt_len(self) -> int:
        """N."""
        layer = self.layers[self.prompt_layers()[0]]
        return int(layer.read)

    def take_answer(self) -> dict[int, Tensor]:
        """[H, N] by layer: the mean weight that the answer's rows so far gave each prompt token; then start anew."""
        mean = {layer: mass / max(self.answer_rows, 1) for layer, mass in self.answer.items()}
        self.answer, self.answer_rows = {}, 0
        return mean

    def forget_answer(self) -> None:
        """Back to the prompt alone."""
        for i in self.prompt_layers():
            layer = self.layers[i]
            layer.crop(layer.read - layer.logical)


class _WatchedLayer(PromptLayer):
    def __init__(self, layer_idx: int, cache_id: int, rows: int, on_prompt: OnPrompt, cache: WatchedCache) -> None:
        super().__init__(layer_idx, cache_id, rows)
        self.on_prompt, self.cache, self.read = on_prompt, cache, 0

    def keep(self, call: AttentionCall, seen: PromptMask, rows: int) -> None:
        self.on_prompt(self.layer_idx, call, seen)
        self.read = self.logical
        self.store_all()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        if self.prompt is None:
            attention_hook.expect(self, keys)
        return keys, values

    def after_attention(self, call: AttentionCall) -> None:
        if self.prompt is None:
            self.cache.add(self.layer_idx, call)
        else:
            super().after_attention(call)


def attend(model: PreTrainedModel, cache: WatchedCache, answer: Sequence[int]) -> dict[int, Tensor]:
    """[H, N] float64 by layer: the mean weight an answer's tokens give the prompt's, had nothing been evicted.

    The answer is read after the prompt in one forward and taken back again.
    """
    cache.take_answer()
    if answer:
        ids = torch.tensor([list(answer)], device=model.device)
        with torch.inference_mode():
            model(ids, **{cache_argument(model): cache}, use_cache=True, logits_to_keep=1)
        cache.forget_answer()
    return cache.take_answer()


def window_call(call: AttentionCall, seen: PromptMask, rows: int, layer_idx: int, **needs: Any) -> Any:
    """The prompt's window for a method with its own number of rows."""
    own = seen if seen.window is None else PromptMask(seen.lengths, seen.window[:, :, -rows:])
    return window_of(call, own, rows, layer_idx, **needs)
