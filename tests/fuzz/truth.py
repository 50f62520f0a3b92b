"""What is true of a cache, kept beside it: all tokens it was given, which of them it still sees, and a full cache.

`read` takes from a cache what it says it kept, and fails where that is not what its settings allow.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from decantkv.cache.bounds import Bounds
from decantkv.cache.evicting_cache import EvictingLayer
from decantkv.cache.positions import STRAIGHT
from decantkv.settings import Settings

FP8 = torch.float8_e4m3fn


class FullLayer(DynamicLayer):
    """Every token's keys and values, rounded as a store in fp8 rounds them where there are `scales`."""

    scales: tuple[Tensor, Tensor] | None = None

    def rounded(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self.scales is None:
            return keys, values
        most = torch.finfo(FP8).max
        pairs = zip((keys, values), self.scales, strict=True)
        k, v = ((x / scale).clamp(-most, most).to(FP8).float() * scale for x, scale in pairs)
        return k, v

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return super().update(*self.rounded(key_states, value_states), *args, **kwargs)


def full_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = FullLayer
    return cache


@dataclass
class Truth:
    """All of one cache's tokens.

    Attributes:
        ids: [B, N]; real: [B, N] bool.
        full: every token's keys and values.
        kept: by evicting layer [B, H, N] bool: what it may still look at.
        said: by layer, the kept indices that were last read from it, and the columns at that eviction.
        named: by layer, those indices as a mask.
        prompt: columns of the prompt; 0 while it is being read.
        prompt_kept: by layer, what the prompt's eviction left; most: [B] tokens that later evictions leave at most.
        renewed: by layer, columns at the last eviction.
        joined: whether it came out of `cat`, whose prompts may differ.
    """

    ids: Tensor
    real: Tensor
    full: DynamicCache = field(default_factory=full_cache)
    kept: dict[int, Tensor] = field(default_factory=dict)
    said: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    prompt: int = 0
    prompt_kept: dict[int, Tensor] = field(default_factory=dict)
    renewed: dict[int, int] = field(default_factory=dict)
    named: dict[int, Tensor] = field(default_factory=dict)
    most: dict[int, Tensor] = field(default_factory=dict)
    joined: bool = False

    @classmethod
    def empty(cls, batch: int) -> Truth:
        return cls(torch.zeros(batch, 0, dtype=torch.long), torch.zeros(batch, 0, dtype=torch.bool))

    @property
    def batch(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def fork(self) -> Truth:
        return copy.deepcopy(self)

    def grow(self, ids: Tensor, real: Tensor) -> None:
        """New tokens, which everything behind them may look at."""
        self.ids, self.real = torch.cat([self.ids, ids], 1), torch.cat([self.real, real], 1)
        self.kept = {i: F.pad(x, (0, ids.shape[1]), value=True) for i, x in self.kept.items()}

    def crop(self, number: int) -> None:
        self.ids, self.real = self.ids[:, :-number], self.real[:, :-number]
        self.kept = {i: x[..., :-number] for i, x in self.kept.items()}
        self.renewed = {i: min(at, self.length) for i, at in self.renewed.items()}
        self.prompt = min(self.prompt, self.length)
        self.prompt_kept = {i: x[..., : self.prompt] for i, x in self.prompt_kept.items()}
        for layer in self.full.layers:
            layer.keys, layer.values = layer.keys[:, :, :-number], layer.values[:, :, :-number]

    def rows(self, rows: Tensor) -> None:
        """Batch rows in a new order, repeated or left out."""
        self.ids, self.real = self.ids[rows], self.real[rows]
        for name in ("kept", "prompt_kept", "named", "most"):
            setattr(self, name, {i: x[rows] for i, x in getattr(self, name).items()})
        for layer in self.full.layers:
            layer.keys, layer.values = layer.keys[rows], layer.values[rows]

    @classmethod
    def cat(cls, parts: list[Truth]) -> Truth:
        """Rows of several caches, shorter ones padded on the left."""
        longest = max(part.length for part in parts)

        def left(x: Tensor, part: Truth, dim: int, value: Any = 0) -> Tensor:
            pad = [0, 0] * (x.dim() - 1 - dim) + [longest - part.length, 0]
            return F.pad(x, pad, value=value)

        joined = cls(
            torch.cat([left(part.ids, part, 1) for part in parts]),
            torch.cat([left(part.real, part, 1, False) for part in parts]),
            joined=True,
            prompt=max(part.prompt for part in parts),
        )
        for i, layer in enumerate(parts[0].full.layers):
            keys = torch.cat([left(part.full.layers[i].keys, part, 2) for part in parts])
            values = torch.cat([left(part.full.layers[i].values, part, 2) for part in parts])
            joined.full.update(keys, values, i)
            joined.full.layers[i].scales = layer.scales
        for i in parts[0].kept:
            heads = max(part.kept[i].shape[1] for part in parts)
            joined.kept[i] = torch.cat([left(part.kept[i].expand(-1, heads, -1), part, 2, False) for part in parts])
        return joined


class Reader:
    """Reads what a cache kept, by settings that say what it may keep."""

    def __init__(self, settings: Settings, bounds: Bounds) -> None:
        self.settings, self.bounds = settings, bounds

    def read(self, cache: Any, truth: Truth, *, moved: bool = False) -> None:
        """Bring `truth` up to what the cache keeps now.

        Args:
            moved: rows or files were moved about since: nothing may have been evicted.
        """
        changed: list[int] = []
        layers = [(i, layer) for i, layer in enumerate(cache.layers) if isinstance(layer, EvictingLayer)]
        for i, layer in layers:
            length = layer.get_seq_length()
            assert length == truth.length, f"layer {i} says {length} tokens, it was given {truth.length}"
            if length == 0:
                continue
            heads = 1 if layer.kept is None else layer.kept.indices.shape[1]
            before = truth.kept.get(i)
            if before is None:
                before = torch.ones(truth.batch, heads, truth.length, dtype=torch.bool)
            if layer.reading:
                truth.kept[i] = self._waiting(layer, truth, before)
                continue
            if self._same(layer, truth, i):
                truth.kept[i] = before
                continue
            now = self._said(layer, truth, before)
            if moved:
                named = truth.named.get(i)
                agreed = now <= before if named is None else now == F.pad(named, (0, truth.length - named.shape[2]))
                assert bool(agreed.all()), f"layer {i}: kept tokens changed without an eviction"
                truth.kept[i] = before
            else:
                assert not bool((now & ~before).any()), f"layer {i}: dropped tokens are said to be kept"
                self._check(truth, i, now, before)
                truth.kept[i] = now
                changed.append(i)
            truth.named[i] = now
            truth.said[i] = layer.kept.indices.clone(), self._at(layer)
        if truth.prompt == 0 and layers and all(not layer.reading and layer.logical for _, layer in layers):
            truth.prompt = truth.length
            self._check_prompt(truth, [i for i, _ in layers])
            for place, (i, _) in enumerate(layers):
                truth.prompt_kept[i], truth.renewed[i] = truth.kept[i].clone(), truth.length
                if self.bounds.every is not None:
                    truth.most[i] = self._most(self._held(truth, i).amax(1), (place, len(layers)))
        for i in changed:
            truth.renewed[i] = truth.length
        self._check_rounds(truth, [i for i, _ in layers])
        if self.bounds.store == "fp8" and truth.length:
            for i, layer in layers:
                self._round(layer, truth.full.layers[i])

    def _waiting(self, layer: EvictingLayer, truth: Truth, before: Tensor) -> Tensor:
        """What a prompt's chunks left so far."""
        trail = layer.phase.slots
        if trail is STRAIGHT:
            return before
        places = trail.positions
        slots = torch.where(places >= 0, places, truth.length)
        now = torch.zeros(*places.shape[:2], truth.length + 1, dtype=torch.bool).scatter_(2, slots, True)[..., :-1]
        now &= truth.real[:, None]
        assert not bool((now & ~before).any()), f"layer {layer.layer_idx}: dropped tokens wait again"
        most = self.bounds.max_kv_tokens
        assert most is None or int(now.sum(-1).max()) <= most, f"layer {layer.layer_idx}: over max_kv_tokens"
        self._check_forced(truth, layer.layer_idx, now, self.settings.protect)
        return now | (before & ~truth.real[:, None])

    def _same(self, layer: EvictingLayer, truth: Truth, i: int) -> bool:
        said = truth.said.get(i)
        if layer.kept is None:
            assert said is None, f"layer {i} forgot what it kept"
            return True
        # a later eviction may name the same tokens again, and drop all that came since
        return said is not None and said[1] == self._at(layer) and torch.equal(said[0], layer.kept.indices)

    def _at(self, layer: EvictingLayer) -> int:
        """How many columns there were at the layer's last eviction."""
        return layer.get_seq_length() - layer.store.appended

    def _said(self, layer: EvictingLayer, truth: Truth, before: Tensor) -> Tensor:
        """[B, H, N]: tokens named as kept, and those behind the last of them that came later."""
        kept = layer.kept
        now = kept.mask(truth.length)
        assert bool((now.sum(-1) == kept.counts.expand(now.shape[:2])).all()), "counts and indices differ"
        ascending = kept.indices[..., 1:] > kept.indices[..., :-1]
        assert bool((ascending | ~kept.valid()[..., :-1]).all()), "kept indices are not ascending"
        assert not bool((now & ~truth.real[:, None]).any()), f"layer {layer.layer_idx} keeps pads"
        return now

    def _forced(self, truth: Truth, protect: Any) -> Tensor:
        """[B, N] bool: window, sinks and protected spans, counted in each row's real tokens."""
        place = truth.real.long().cumsum(-1) - 1
        lengths = truth.real.sum(-1, keepdim=True)
        forced = (place < self.settings.sinks) | (place >= lengths - self.settings.method.window)
        for start, stop in protect or ():
            forced |= (place >= start) & (place < stop)
        return forced & truth.real

    def _check_forced(self, truth: Truth, i: int, now: Tensor, protect: Any) -> None:
        forced = self._forced(truth, protect)[:, None]
        assert not bool((forced & ~now).any()), f"layer {i}: window, sinks or protected tokens are gone"

    def _check(self, truth: Truth, i: int, now: Tensor, before: Tensor) -> None:
        """One eviction: what must stay is there."""
        if not truth.joined:
            self._check_forced(truth, i, now, self.settings.protect)
        if truth.prompt and self.bounds.protect_prompt and i in truth.prompt_kept:
            prompt = truth.prompt_kept[i] & truth.real[:, None, : truth.prompt]
            assert not bool((prompt & ~now[..., : truth.prompt]).any()), f"layer {i}: tokens of the prompt are gone"

    def _held(self, truth: Truth, i: int) -> Tensor:
        """[B, H] real tokens kept."""
        return (truth.kept[i] & truth.real[:, None]).sum(-1)

    def _check_prompt(self, truth: Truth, layers: list[int]) -> None:
        """The prompt is done: budgets are met to the token."""
        if truth.length == 1:
            return
        lengths = truth.real.sum(-1).tolist()
        wanted = torch.tensor(self.settings.n_keep(lengths))
        rule = self.settings.allocation
        held = {i: self._held(truth, i) for i in layers}
        heads = max(x.shape[1] for x in held.values())
        if self.bounds.max_kv_tokens is not None:
            total = sum(x.expand(-1, heads).sum(-1) for x in held.values())
            assert bool((total <= wanted * heads * len(layers)).all()), f"kept {held}, more than {wanted}"
            return
        if not rule.ragged and not rule.by_layer:
            assert all(bool((x == wanted[:, None]).all()) for x in held.values()), f"kept {held}, not {wanted}"
        elif rule.by_layer or rule.over_layers:
            total = sum(x.expand(-1, heads).sum(-1) for x in held.values())
            most = wanted * heads * len(layers)
            assert bool((total <= most).all()), f"kept {total} of {most}"
        else:
            for x in held.values():
                assert bool((x.expand(-1, heads).sum(-1) == wanted * heads).all()), f"kept {x}, not {wanted} on average"

    def _check_rounds(self, truth: Truth, layers: list[int]) -> None:
        """Answers are evicted when they are due, and down to their limit."""
        every = self.bounds.every
        if every is None:
            for i in layers:
                if truth.prompt and i in truth.renewed:
                    assert truth.renewed[i] <= truth.prompt, f"layer {i} evicted after the prompt"
            return
        if truth.joined or truth.prompt <= 1:
            return
        for i in layers:
            if i not in truth.renewed or truth.length - truth.renewed[i] < every:
                continue
            held = self._held(truth, i).amax(1)
            assert bool((held <= truth.most[i]).all()), f"layer {i} holds {held} tokens, more than {truth.most[i]}"
            truth.renewed[i] = truth.length

    def _most(self, prompt: Tensor, place: tuple[int, int]) -> Tensor:
        """[B] tokens that an eviction of the answer leaves at most in a layer, of `prompt` [B] that the prompt's left.

        A budget in tokens is spread over the layers as for a long prompt, however short this one was.
        """
        own, whole = self.bounds.decode_budget, self.settings.budget.tokens
        always = self.settings.method.window + self.settings.sinks
        if self.bounds.protect_prompt:
            return prompt + (prompt.clamp_min(always) if own is None else own)
        forced = len(set(range(self.settings.sinks)).union(*(range(*p) for p in self.settings.protect)))
        forced += self.settings.method.window
        if own is None and whole is not None:
            own = self.settings.allocation.layer_budget(max(whole, forced), forced, 10**9, *place)
        return (prompt if own is None else torch.full_like(prompt, own)).clamp_min(forced)

    def _round(self, layer: EvictingLayer, full: FullLayer) -> None:
        """Round the full cache's tokens as the store rounds its own."""
        inner = getattr(layer.store, "_layer", None)
        scales = None if inner is None else (inner._quantized_keys[1], inner._quantized_values[1])
        if scales is not None and (full.scales is None or not all(map(torch.equal, full.scales, scales))):
            full.scales = scales
            full.keys, full.values = full.rounded(full.keys, full.values)
        full.scales = scales
