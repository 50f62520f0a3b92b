"""One full-cache reading of a prompt: scores and weights while it is read, and what its answers attend to after."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from decantkv import scoring
from decantkv.cache.call_window import window_of
from decantkv.cache.evicting_cache import cache_argument, replace_layers, text_config
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.phases import Prompt
from decantkv.cache.policy import Policy
from decantkv.hf.attention_hook import AttentionCall, Hold
from decantkv.hf.masks import PromptMask

OnPrompt = Callable[[int, AttentionCall, PromptMask], None]


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
        self.prompt_len = 0  # N
        replace_layers(self, model, _Watching(rows, on_prompt, self))
        self._hold = Hold(model)

    def prompt_layers(self) -> list[int]:
        """The layers that hold a full prompt, which are those that eviction acts on."""
        return [i for i, layer in enumerate(self.layers) if isinstance(layer, EvictingLayer)]

    def add(self, layer_idx: int, call: AttentionCall) -> None:
        """Add the new rows' attention to the prompt."""
        rows = call.query.shape[2]
        win = window_of(call, PromptMask(None, None), rows, layer_idx)
        mass = scoring.compute("attention_mass", win)[0].double()  # [H, N + answer so far]
        total = self.answer.get(layer_idx)
        self.answer[layer_idx] = mass[:, : self.prompt_len] + (0.0 if total is None else total)
        if layer_idx == self.prompt_layers()[0]:
            self.answer_rows += rows

    def take_answer(self) -> dict[int, Tensor]:
        """[H, N] by layer: the mean weight that the answer's rows so far gave each prompt token; then start anew."""
        mean = {layer: mass / max(self.answer_rows, 1) for layer, mass in self.answer.items()}
        self.answer, self.answer_rows = {}, 0
        return mean

    def forget_answer(self) -> None:
        """Back to the prompt alone."""
        for i in self.prompt_layers():
            layer = self.layers[i]
            layer.crop(self.prompt_len - layer.logical)


class _Watching(Policy):
    listens = True

    def __init__(self, rows: int, on_prompt: OnPrompt, cache: WatchedCache) -> None:
        self.rows, self.on_prompt, self.cache = rows, on_prompt, cache

    def decide(self, layer: EvictingLayer, prompt: Prompt, call: AttentionCall, seen: PromptMask) -> None:
        self.on_prompt(layer.layer_idx, call, seen)
        self.cache.prompt_len = layer.logical
        layer.hold_all(prompt)

    def attended(self, layer: EvictingLayer, call: AttentionCall) -> None:
        self.cache.add(layer.layer_idx, call)


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
