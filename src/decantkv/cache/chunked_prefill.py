"""A prompt that comes in chunks: they are put together until the last one is in, and nothing is decided before."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from decantkv.cache.own_attention import attends_to_chunks, real_with_chunk
from decantkv.cache.phases import Prompt, Reading, Waiting
from decantkv.cache.stores.dense import DenseStore
from decantkv.hf.attention_hook import AttentionCall
from decantkv.hf.masks import PromptMask

if TYPE_CHECKING:
    from decantkv.cache.layer import EvictingLayer

Chunks = Literal["none", "more", "last"]


def with_chunk(layer: EvictingLayer, prompt: Waiting, keys: Tensor, values: Tensor) -> Waiting:
    """Return the prompt with one more chunk appended, in a buffer that doubles up to the expected length."""
    buffer, new = prompt.buffer, keys.shape[2]
    ahead = max(0, buffer.length - new)
    if layer.policy.bounds.max_kv_tokens is not None:
        ahead = 0
    elif layer.cache.expected:
        ahead = min(ahead, layer.announced(new))
    buffer.update(keys, values, reserve=ahead)
    return dataclasses.replace(prompt, new=new)


def attended(layer: EvictingLayer, prompt: Prompt, call: AttentionCall) -> Waiting:
    """The prompt after a chunk's attention: its last queries, which may reach back over several chunks, are kept."""
    query, policy = call.query, layer.policy
    if isinstance(prompt, Reading):
        buffer, own = DenseStore(prompt.keys, prompt.values), attends_to_chunks(layer, call)
    else:
        buffer, own = prompt.buffer, bool(prompt.held)
        query = torch.cat([prompt.call.query, query], dim=2)
    held = real_with_chunk(call, prompt) if own else ()
    rows = call.key.shape[2] if policy.every_query else policy.rows
    tail = dataclasses.replace(call, query=query[:, :, -rows:].clone())
    if held:
        tail = dataclasses.replace(tail, mask=PromptMask(None if set(held) == {call.key.shape[2]} else held, None))
    return policy.thinned(layer, Waiting(buffer, prompt.new, tail, held, prompt.slots), call)
