"""Read a prompt once into cache layers that wait, stopping where a regime cuts it; evict copies of it from there."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from decantkv.base.options import Need
from decantkv.cache.bounds import Bounds
from decantkv.cache.call_window import window_of
from decantkv.cache.chunked_reading import defer, evicting_layers
from decantkv.cache.evicting_cache import (
    EvictingCache,
    cache_argument,
    checked_model,
    new_recorder,
    replace_layers,
    text_config,
)
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.phases import Waiting
from decantkv.cache.policy import Policy
from decantkv.cache.rehearsal import note_read, rehearse_prompt
from decantkv.cache.stores.dense import DenseStore
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.hf import attention_hook
from decantkv.hf.attention_hook import Hold
from decantkv.hf.masks import PromptMask
from decantkv.hf.model_parts import rotation
from decantkv.lab.eval.engine.quantise import quantise_keys, quantise_values
from decantkv.methods import Method
from decantkv.methods.h2o import H2O
from decantkv.scoring.window import AttentionWindow, Rotate
from decantkv.selection.selector import Kept
from decantkv.settings import Settings

CAUSAL = PromptMask(None, None)  # of a prompt without pads
OWN = Bounds(decode="own")  # layers attend by themselves, so that rows that keep other tokens need no masks
EVERYTHING = Settings.parse("recent", budget=1.0)


@dataclass(frozen=True, eq=False)
class Watching(Policy):
    """Hold a prompt with the queries that every contestant looks at; nothing is decided."""

    rows: int
    every_query: bool
    bounds: Bounds


@dataclass(frozen=True)
class Copy:
    """The kept part of one prompt.

    Attributes:
        stores: per layer, packed: every slot holds a token.
        kept: 0-dimensional, the mean number of tokens per head.
    """

    stores: list[RaggedStore]
    kept: Tensor


@dataclass(eq=False)
class Cut:
    """A prompt as it was read up to a cut, from where it can be evicted by any settings.

    Attributes:
        ids: [1, N] token ids.
        layers: the phase of each layer, whose keys and values later cuts share.
        rotate: turns keys by positions; None if no method needs it.
        scores: settings' `score_key` -> per layer [1, H, N] float32.
        earlier: the scores of the cut before this one.
    """

    model: PreTrainedModel = field(repr=False)
    ids: Tensor = field(repr=False)
    layers: Sequence[Waiting] = field(repr=False)
    rotate: Rotate | None = field(default=None, repr=False)
    scores: dict[Hashable, list[Tensor]] = field(default_factory=dict, repr=False)
    earlier: Mapping[Hashable, list[Tensor]] = field(default_factory=dict, repr=False)

    @property
    def length(self) -> int:
        """N."""
        return self.ids.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the scores."""
        return sum(x.nbytes for each in self.scores.values() for x in each)

    def window(self, layer: int, rows: int, needs: frozenset[Need] = frozenset()) -> AttentionWindow:
        """The last `rows` queries of a layer with all keys and values, as methods receive them."""
        return window_of(self.layers[layer].call, CAUSAL, rows, layer, needs=needs, rotate=self.rotate)

    @torch.no_grad()
    def score(self, settings: Settings) -> list[Tensor]:
        """Per layer [1, H, N] float32 before pooling, computed once for all settings that differ in selection alone."""
        key = score_key(settings)
        if key not in self.scores:
            if settings.rehearsal is None:
                windows = [self.window(i, settings.rows, settings.method.needs) for i in range(len(self.layers))]
                if type(settings.method).score is H2O.score and key in self.earlier:  # which are sums over queries
                    pairs = zip(windows, self.earlier[key], strict=True)
                    windows = [dataclasses.replace(window, column_mass=known) for window, known in pairs]
                self.scores[key] = [settings.score(window) for window in windows]
            else:
                self.scores[key] = self._rehearse(settings)
        return self.scores[key]

    def _rehearse(self, settings: Settings) -> list[Tensor]:
        """The scores by the queries of the settings' rehearsal; to be called before more of the prompt is read."""
        cache = self._fork(settings, None)
        note_read(cache, {"input_ids": self.ids}, begins=True, checked=True)
        rehearse_prompt(cache, settings.rehearsal)  # type: ignore[arg-type]  # the caller has looked
        return [layer.rehearsed()[0] for layer in evicting_layers(cache)]

    def evict(self, settings: Settings) -> EvictingCache:
        """A cache that keeps of the prompt what these settings choose, layer by layer."""
        cache = self._fork(settings, self.score(settings))
        for layer in evicting_layers(cache):
            layer.finish()
        return cache

    @torch.no_grad()
    def copy(self, settings: Settings | None, bits: int = 0) -> Copy:
        """Return what these settings keep.

        Args:
            settings: None for the whole prompt; `bits` that each of its numbers then goes through, or 0.
        """
        if settings is None:
            return Copy([_whole(prompt, bits) for prompt in self.layers], torch.tensor(float(self.length)))
        rule, method = settings.allocation, settings.method
        if rule.by_layer or rule.over_layers or method.renumbers or _two_sources(settings) or _two_stages(method):
            layers = evicting_layers(self.evict(settings))
            counts = torch.cat([layer.kept.counts for layer in layers])  # type: ignore[union-attr]  # all have decided
            return Copy([layer.store for layer in layers], counts.float().mean())  # type: ignore[misc]  # of OWN
        kept = settings.choose(torch.cat(self.score(settings)))  # layers differ in their scores alone: all at once
        stores = [_stored(prompt, kept, i) for i, prompt in enumerate(self.layers)]
        return Copy(stores, kept.counts.float().mean())

    def _fork(self, settings: Settings, scores: Sequence[Tensor] | None) -> EvictingCache:
        """A cache by other settings of the same prompt, which waits; nothing is copied."""
        cache = EvictingCache.of(self.model, settings, new_recorder(settings, OWN), OWN)
        for i, (layer, prompt) in enumerate(zip(evicting_layers(cache), self.layers, strict=True)):
            layer.phase = dataclasses.replace(prompt, rehearsed=() if scores is None else (scores[i],))
            layer.logical = self.length
        return cache


def _two_stages(method: Method) -> bool:
    """Return whether the method looks at a layer once more when it selects."""
    return type(method).rank is not Method.rank


def _two_sources(settings: Settings) -> bool:
    """Return whether scores by a rehearsal are put beside those of the prompt's own window."""
    return settings.rehearsal is not None and settings.rehearsal.window


def _stored(prompt: Waiting, kept: Kept, layer: int) -> RaggedStore:
    """Return the store of one layer, which is a row of `kept`."""
    here, rows = slice(layer, layer + 1), kept.rows
    one = Kept(kept.indices[here], kept.counts[here], None if rows is None else rows[here])
    if rows is None:
        return RaggedStore.from_kept(prompt.keys, prompt.values, one)
    return RaggedStore.of_dense(DenseStore.from_kept(prompt.keys, prompt.values, one, announced=0))


def _whole(prompt: Waiting, bits: int) -> RaggedStore:
    """All of a layer's prompt, its numbers through so many bits, or 0 for as they are."""
    keys, values = prompt.keys, prompt.values
    if bits:
        keys, values = quantise_keys(keys, bits), quantise_values(values, bits)
    return RaggedStore.of_dense(DenseStore(keys, values))


def score_key(settings: Settings) -> Hashable:
    """Settings with equal keys have equal scores, which a method gives unpooled."""
    unpooled = dataclasses.replace(settings.method, pool="none", kernel_size=1, pool_scope="all")
    return unpooled, settings.impl, settings.rehearsal


@dataclass(frozen=True, eq=False)
class Reading:
    """A prompt that was read to its end.

    Attributes:
        cuts: where copies of it can be evicted, by length; the last is the whole prompt.
        next_logits: [V] float32 after the last token.
    """

    cuts: dict[int, Cut]
    next_logits: Tensor = field(repr=False)

    @property
    def whole(self) -> Cut:
        """All of the prompt."""
        return self.cuts[max(self.cuts)]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return sum(x[:, :, :1].nbytes for prompt in self.whole.layers for x in (prompt.keys, prompt.values))

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.token_bytes * self.whole.length


class Reader:
    """Reads prompts with one model; every layer must be a full-attention one.

    Args:
        rows: how many of the last queries the policies' methods look at, at most.
        needs: what the methods name as theirs.
        memory: bytes that a forward's activations and mask may take.

    Attributes:
        plain: whether layers attend to a prompt's later chunks by themselves, so that no mask is built.
    """

    def __init__(
        self, model: PreTrainedModel, *, rows: int, needs: frozenset[Need] = frozenset(), memory: int = 2**34
    ) -> None:
        self.model, self.memory = checked_model(model), memory
        probe = DynamicCache(config=text_config(self.model)).layers
        others = sorted({type(layer).__name__ for layer in probe if type(layer) is not DynamicLayer})
        if others:
            raise ValueError(
                f"model: expected full attention in every layer, got {', '.join(others)}; "
                "evaluate such a model through attach and generate"
            )
        if EvictingCache.of(self.model, EVERYTHING, new_recorder(EVERYTHING), OWN).bounds != OWN:
            raise ValueError(
                f"model: expected one attention call per layer, over its own keys, got {type(model).__name__}; "
                "evaluate such a model through attach and generate"
            )
        self._policy = Watching(max(rows, 1), "queries" in needs, OWN)
        self._rotate = rotation(self.model) if "rotate" in needs else None
        self._name = cache_argument(self.model)
        self._cuts: dict[int, Cut] = {}
        self.plain = False
        for cut in self.read([0, 0], []):
            plain = all(prompt.held for prompt in cut.layers)
        self.plain = plain

    @torch.no_grad()
    def read(self, ids: Sequence[int], cuts: Iterable[int]) -> Iterator[Cut]:
        """Read up to each cut in turn; yields it, to be scored before more is read.

        After the last yield, `reading` gives the whole prompt.
        """
        cache = DynamicCache(config=text_config(self.model))
        replace_layers(cache, self.model, self._policy)
        layers = evicting_layers(cache)
        layers[0].cache.expected = len(ids)
        defer(cache)
        tokens = torch.tensor([list(ids)], device=self.model.device)
        self.chunk, self._cuts = self.chunk_of(len(ids)), {}
        hold, begin = Hold(self.model), 0
        try:
            for length in sorted({*cuts, len(ids)}):
                for start in range(begin, length, self.chunk):
                    self._forward(tokens[:, start : min(start + self.chunk, length)], start, cache)
                begin = length
                cut = Cut(self.model, tokens[:, :length], [_waiting(layer) for layer in layers], self._rotate)
                cut.earlier = next((before.scores for before in reversed(self._cuts.values())), {})
                yield cut
                cut.earlier = {}
                cut.layers = [self._trimmed(prompt) for prompt in cut.layers]
                self._cuts[length] = cut
            for cut in self._cuts.values():
                cut.layers = [
                    _until(cut.length, prompt, layer) for prompt, layer in zip(cut.layers, layers, strict=True)
                ]
        finally:
            attention_hook.forget()
            hold.close()

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
        self._cuts = {}

    def reading(self) -> Reading:
        """The prompt just read."""
        return Reading(self._cuts, self._next_logits)

    def _forward(self, part: Tensor, start: int, cache: DynamicCache) -> None:
        positions = torch.arange(start, start + part.shape[1], device=part.device)[None]
        out = self.model(part, position_ids=positions, use_cache=True, logits_to_keep=1, **{self._name: cache})
        self._next_logits = out.logits[0, -1].float()

    def _trimmed(self, prompt: Waiting) -> Waiting:
        """The phase of a scored prompt, which needs few queries, and no keys until all is read."""
        few = prompt.call.query[:, :, -self._policy.rows :].clone()
        return dataclasses.replace(
            prompt, buffer=DenseStore(few, few), call=dataclasses.replace(prompt.call, query=few, key=few, value=few)
        )


def _waiting(layer: EvictingLayer) -> Waiting:
    """The layer's phase after a forward.

    Raises:
        ValueError: it attends to other keys than it stores.
    """
    phase = layer.phase
    if not isinstance(phase, Waiting):
        raise RuntimeError("the layer has not seen a prompt")
    if phase.call.key.shape != phase.keys.shape:
        raise ValueError(
            f"model: expected attention to the keys that are stored, got {phase.call.attention_class}; "
            "evaluate such a model through attach and generate"
        )
    return phase


def _until(length: int, prompt: Waiting, layer: EvictingLayer) -> Waiting:
    """The phase at a cut, over the keys and values of a layer that has read on."""
    whole = _waiting(layer)
    keys, values = whole.keys[:, :, :length], whole.values[:, :, :length]
    return dataclasses.replace(
        prompt, buffer=DenseStore(keys, values), call=dataclasses.replace(prompt.call, key=keys, value=values)
    )
