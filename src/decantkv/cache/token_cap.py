"""The cap on a prompt's tokens while it comes in chunks (`max_kv_tokens`): more are evicted after each chunk."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from decantkv.cache.call_window import window_of
from decantkv.cache.own_attention import real_with_chunk
from decantkv.cache.phases import Waiting
from decantkv.cache.positions import Trail
from decantkv.cache.stores.dense import DenseStore, gather_kv
from decantkv.hf.attention_hook import AttentionCall
from decantkv.hf.masks import PromptMask

if TYPE_CHECKING:
    from decantkv.cache.eviction import Eviction
    from decantkv.cache.layer import EvictingLayer


@torch.no_grad()
def thin(policy: Eviction, layer: EvictingLayer, prompt: Waiting, call: AttentionCall, most: int) -> Waiting:
    """Keep at most `most` of the tokens that a prompt has so far; `call`: its last chunk's."""
    policy.check_stored_heads(call, prompt, "max_kv_tokens")
    keys, values = prompt.keys, prompt.values
    batch, heads, kv_len = keys.shape[:3]
    held = prompt.held or real_with_chunk(call, prompt)
    trail = prompt.slots if isinstance(prompt.slots, Trail) else Trail.start(batch, heads, keys.device)
    trail = trail.extend(prompt.new, layer.logical, held)
    if kv_len <= most:
        return dataclasses.replace(prompt, slots=trail)
    lengths = [max(1, n) for n in held]  # a row of pads so far keeps one of them, which stays hidden
    seen = PromptMask(None if set(lengths) == {kv_len} else tuple(lengths), None)
    spans, needs = policy.settings.protect, policy.settings.method.needs
    forced = trail.inside(spans, [layer.logical - n for n in trail.given]) if spans else None
    win = window_of(prompt.call, seen, policy.rows, layer.layer_idx, needs=needs, rotate=policy.rotate)
    kept = policy.choose_round(win, lengths, [min(n, most) for n in lengths], forced)
    with policy.recorder.stopwatch.measure("compaction", keys.device):
        buffer = DenseStore(*gather_kv(keys, values, kept.indices))
    held = tuple(min(n, most) for n in held)
    mask = PromptMask(None if set(held) == {buffer.length} else held, None)
    last = dataclasses.replace(prompt.call, key=buffer.keys, value=buffer.values, mask=mask)
    left = trail.keep(kept, held)
    return dataclasses.replace(prompt, buffer=buffer, call=last, held=held if prompt.held else (), slots=left)
