"""Attention over rows that each hold other tokens: lanes, or a mask per row and head; KV heads never repeated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from decantkv.cache.evicting_cache import text_config
from decantkv.cache.stores.ragged import RaggedStore

NAME = "decantkv_rows"


class Masks(Protocol):
    """The decoding batch: it knows what each row and head of a layer may see."""

    def mask_of(self, layer_idx: int) -> Tensor:
        """Return [R, 1 or H, T, S] bool, True where a new token sees a slot."""

    def store_of(self, layer_idx: int) -> RaggedStore | None:
        """Return the store that the layer attends to by itself, or None if it attends through a mask."""


_now = threading.local()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [R, HQ, T, D], key and value [R, H, S, D]; returns [R, T, HQ, Dv]."""
    store = _now.masks.store_of(module.layer_idx)
    if store is not None:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        return store.attend(query, scale=scale, softcap=softcap, sink_logits=s_aux).transpose(1, 2), None
    seen: Tensor = _now.masks.mask_of(module.layer_idx)
    num_heads, new = query.shape[1:3]
    group = num_heads // key.shape[1]
    grouped = query.unflatten(1, (-1, group)).flatten(2, 3)  # [R, H, g·T, D]
    mask = _grouped(seen, group)
    if softcap is None and s_aux is None:
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=_bias(mask, query.dtype), scale=scaling)
    else:
        out = _eager(grouped, key, value, mask, scaling, softcap, s_aux, group)
    return out.unflatten(2, (group, new)).flatten(1, 2).transpose(1, 2), None


def _grouped(seen: Tensor, group: int) -> Tensor:
    """[R, 1 or H, g·T, S] bool, made once a forward where layers share a mask."""
    if _now.seen is not seen:
        _now.seen, _now.bias = seen, None
        _now.mask = seen[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    mask: Tensor = _now.mask
    return mask


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The newest mask as what is added to logits, which SDPA would make of it in every layer."""
    if _now.bias is None:
        _now.bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    bias: Tensor = _now.bias
    return bias


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    group: int,
) -> Tensor:
    logits = (query @ key.mT).float() * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.float().view(1, -1, group, 1).repeat_interleave(query.shape[2] // group, dim=2)
        logits = torch.cat([logits, sink.expand(logits.shape[0], -1, -1, -1)], dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


def _no_mask(*args: object, **kwargs: object) -> None:
    """transformers need not build a mask: rows bring their own."""


@contextmanager
def attending(model: PreTrainedModel, masks: Masks) -> Iterator[None]:
    """While inside, the model attends by `attend` with `masks`; the model's own choice is restored afterwards."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    config = text_config(model)
    before = config._attn_implementation
    config._attn_implementation, _now.masks, _now.seen = NAME, masks, None
    try:
        yield
    finally:
        config._attn_implementation = before
        _now.masks = _now.seen = _now.mask = _now.bias = None
