"""Attention that layers compute themselves: to ragged stores, to a prompt's later chunks, or for its denominators."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from decantkv.base.transfer import to_device
from decantkv.cache.phases import Evicted, Reading, Rehearsing, Waiting, Whole
from decantkv.cache.positions import STRAIGHT
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.hf.attention_hook import AttentionCall
from decantkv.hf.chunked_attention import attend_chunk
from decantkv.hf.masks import PromptMask, among_new, padded_turn, read_prompt_mask, real_tokens
from decantkv.hf.sdpa import attend_with_lse

if TYPE_CHECKING:
    from decantkv.cache.layer import EvictingLayer


def attend(layer: EvictingLayer, call: AttentionCall) -> Tensor | None:
    """Return the attention's output [B, q, HQ, Dv], or None if the model's own attention is to compute it."""
    phase = layer.phase
    if isinstance(phase, Whole):
        return _attend_to_store(layer, phase, phase.store, call) if isinstance(phase.store, RaggedStore) else None
    if isinstance(phase, Waiting) and phase.held:
        return _attend_to_chunks(phase, call)[0]
    if isinstance(phase, Rehearsing) and phase.held:
        out, *lse = _attend_to_chunks(phase.prompt, call)
        layer.phase = dataclasses.replace(phase, lse=tuple(lse))
        return out
    if isinstance(phase, Reading | Waiting) and layer.policy.bounds.reuse_lse:
        return _attend_with_lse(layer, phase, call)
    return None


# -- what was kept


@torch.no_grad()
def _attend_to_store(layer: EvictingLayer, phase: Whole, store: RaggedStore, call: AttentionCall) -> Tensor | None:
    """Store the new tokens and attend to all that is stored."""
    if not store.fresh:
        return None
    if call.query.requires_grad:
        raise ValueError("model: expected a forward without gradients (torch.no_grad()), got one with")
    keys, values = store.fresh
    batch, new = keys.shape[0], keys.shape[2]
    mask = None
    if not layer.unmasked:
        shown = None if isinstance(phase, Evicted) else store.columns
        mask = among_new(call.mask, new=new, shown=lambda: None if shown is None else shown())
    seen = read_prompt_mask(mask, batch=batch, kv_len=new, rows=new, device=keys.device)
    if seen.window is not None or (new > 1 and mask is None and not call.causal):
        raise ValueError("attention_mask: expected causal attention among new tokens, got another pattern")
    if seen.lengths is not None and phase.answer.evicted:
        raise padded_turn()
    store.append(keys, values, _real(seen.lengths, new, keys.device), reserve=layer.reserve(new))
    store.forget_staged()
    layer.logical += new
    out = store.attend(call.query, scale=call.scale, softcap=call.softcap, sink_logits=call.sink_logits)
    return out.transpose(1, 2).contiguous()  # some models view it


def _real(lengths: Sequence[int] | None, new: int, device: torch.device) -> Tensor | None:
    """Return [B, new] bool, True where a new token is no pad, or None if none is a pad."""
    if lengths is None:
        return None
    return torch.arange(new, device=device) >= new - torch.tensor(lengths, device=device)[:, None]


# -- a prompt's later chunks


def attends_to_chunks(layer: EvictingLayer, call: AttentionCall) -> bool:
    """Return whether the layer can compute the attention of later chunks itself, given the first chunk's."""
    if not layer.policy.bounds.own(call.key.device):
        return False
    if call.backend != "sdpa" or call.softcap is not None or call.sink_logits is not None or not call.causal:
        return False
    batch, kv_len, rows = call.key.shape[0], call.key.shape[2], min(layer.policy.rows, call.query.shape[2])
    seen = read_prompt_mask(call.mask, batch=batch, kv_len=kv_len, rows=rows, device=call.key.device, empty=True)
    return seen.window is None


def _attend_to_chunks(prompt: Waiting, call: AttentionCall) -> tuple[Tensor, ...]:
    """The attention of a later chunk, whose mask tells of the chunk alone.

    Returns:
        The output [B, q, HQ, Dv]; where they cost nothing, also the output [B, HQ, q, Dv] and its log-sum-exp.
    """
    later = _new_tokens(call, prompt)
    if later.window is not None or (call.mask is None and not call.causal):
        raise ValueError(
            "attention_mask: expected causal attention inside a prompt's later chunks where layers attend for "
            "themselves, got another pattern, as images have; use decode='model', or read the prompt in one piece"
        )
    held = real_with_chunk(call, prompt)
    out, lse = attend_chunk(call.query, call.key, call.value, held=held, scale=call.scale)
    attended = out.transpose(1, 2).contiguous()
    return (attended,) if lse is None else (attended, out, lse)


def real_with_chunk(call: AttentionCall, prompt: Reading | Waiting) -> tuple[int, ...]:
    """Return the real tokens that each row stores with this chunk."""
    if isinstance(prompt, Reading) or not prompt.held:
        return real_tokens(call.mask, batch=call.key.shape[0], kv_len=call.key.shape[2], device=call.key.device)
    later, new = _new_tokens(call, prompt).lengths, call.query.shape[2]
    return tuple(n + new if later is None else n + later[row] for row, n in enumerate(prompt.held))


def _new_tokens(call: AttentionCall, prompt: Waiting) -> PromptMask:
    """Return the mask of a chunk's own tokens, behind `prompt.held` real ones of each row."""
    new, device = call.query.shape[2], call.key.device

    def shown() -> Tensor | None:
        place = torch.arange(call.key.shape[2] - new, device=device)
        whole = prompt.slots is STRAIGHT
        return place >= place.shape[0] - to_device(prompt.held, device)[:, None] if whole else None

    mask = among_new(call.mask, new=new, shown=shown)
    return read_prompt_mask(mask, batch=len(prompt.held), kv_len=new, rows=new, device=device, empty=True)


# -- a prompt in one piece, with its softmax denominators


def _attend_with_lse(layer: EvictingLayer, prompt: Reading | Waiting, call: AttentionCall) -> Tensor | None:
    """The attention by the op that sdpa would run, which leaves the window's share of it with the prompt."""
    made: tuple[Tensor, Tensor] | str | None = _no_lse(layer, call)
    if made is None:
        with torch.no_grad():
            made = attend_with_lse(call.query, call.key, call.value, scale=call.scale)
    out = None
    if not isinstance(made, str):
        out, rows = made[0].transpose(1, 2).contiguous(), layer.policy.rows
        made = made[0][:, :, -rows:], made[1][:, :, -rows:]
    if isinstance(prompt, Reading):
        layer.phase = dataclasses.replace(prompt, lse=made)
    return out


def _no_lse(layer: EvictingLayer, call: AttentionCall) -> str | None:
    """Return why a prompt's denominators cannot be had with its attention, or None if they can."""
    reasons = {
        f"the attention is {call.backend!r}, not 'sdpa'": call.backend != "sdpa",
        "the prompt came in chunks": layer.chunks != "none",
        "the prompt has a mask, as padded batches have": call.mask is not None,
        "the logits are capped": call.softcap is not None,
        "the softmax has learned sinks": call.sink_logits is not None,
        "the attention is not causal": not call.causal,
        "weights are dropped at random": call.dropout > 0,
        "the model attends twice a layer": layer.policy.attends_twice,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
