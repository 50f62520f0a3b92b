"""The judge of eviction: a full cache in which the dropped tokens are hidden, layer by layer and head by head.

It never touches the evicting code: attention is written out again here, over all keys, with a mask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, modeling_utils

from decantkv.cache.evicting_cache import EvictingCache, EvictingLayer, cache_argument


def kept_masks(cache: EvictingCache, length: int) -> dict[int, Tensor]:
    """[B, H, n] bool per evicting layer: which of the prompt's tokens it kept."""
    masks = {}
    for layer in cache.layers:
        if isinstance(layer, EvictingLayer):
            assert layer.kept is not None, "the layer evicted nothing"
            masks[layer.layer_idx] = layer.kept.mask(length)
    return masks


def plain_attention(module: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor, kw: dict[str, Any]) -> Tensor:
    """softmax(qk) v with scale, soft cap and learned sinks as the model gives them; [B, q, HQ, Dv]."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    s = query @ key.mT * (kw.get("scaling") or query.shape[-1] ** -0.5)
    if kw.get("softcap") is not None:
        s = torch.tanh(s / kw["softcap"]) * kw["softcap"]
    s = s.masked_fill(~seen.repeat_interleave(query.shape[1] // seen.shape[1], 1), -torch.inf)
    if kw.get("s_aux") is not None:
        sink = kw["s_aux"].view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        return (torch.cat([s, sink], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2).contiguous()
    return (s.softmax(-1) @ value).transpose(1, 2).contiguous()


def model_sees(module: Any, mask: Any, new: int, key: Tensor, kw: dict[str, Any]) -> Tensor:
    """[B or 1, 1, new, N] bool: what the model's own mask shows the new tokens of a full cache."""
    if isinstance(mask, Tensor) and mask.dim() == 4:
        return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    rows = torch.ones(1, 1, new, key.shape[2], dtype=torch.bool, device=key.device)
    causal = kw.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    return rows.tril(key.shape[2] - new) if causal else rows


@contextmanager
def hiding(model: PreTrainedModel, kept: dict[int, Tensor]) -> Iterator[None]:
    """While open, tokens after the prompt cannot see what is not in `kept`."""
    backend = model.config.get_text_config(decoder=True)._attn_implementation
    interface = modeling_utils.ALL_ATTENTION_FUNCTIONS
    homes: list[tuple[Any, str]] = []
    if backend == "eager":
        names = {type(part).__module__ for part in model.modules()}
        homes = [(vars(sys.modules[n]), "eager_attention_forward") for n in names]
        homes = [(home, name) for home, name in homes if name in home]
    else:
        homes = [(interface._global_mapping, backend)]
    before = [home[name] for home, name in homes]
    filled: list[tuple[Tensor, int]] = []  # keys and their cache layer: some models run one module for several

    def update(cache: DynamicCache, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kw: Any) -> Any:
        read = fill(cache, keys, values, layer_idx, *args, **kw)
        filled.append((read[0], layer_idx))
        return read

    def wrap(original: Any) -> Any:
        def attention(
            module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *args: Any, **kw: Any
        ) -> Any:
            latest = filled[-1][1] if filled else None  # also where heads are made from what is stored
            layer = next((i for keys, i in filled if keys is key), latest)
            new = query.shape[2]
            if layer not in kept or key.shape[2] <= kept[layer].shape[2] or kw.get("sliding_window"):
                return original(module, query, key, value, attention_mask, *args, **kw)
            hidden = kept[layer].expand(query.shape[0], -1, -1)
            hidden = hidden if key.shape[1] % hidden.shape[1] == 0 else hidden[:, :1]
            later = hidden.new_ones(*hidden.shape[:2], key.shape[2] - hidden.shape[2])
            seen = torch.cat([hidden, later], -1)[:, :, None] & model_sees(module, attention_mask, new, key, kw)
            return plain_attention(module, query, key, value, seen, kw), None

        return attention

    for home, name in homes:
        home[name] = wrap(home[name])
    fill, DynamicCache.update = DynamicCache.update, update
    try:
        yield
    finally:
        DynamicCache.update = fill
        for (home, name), original in zip(homes, before, strict=True):
            home[name] = original


@torch.no_grad()
def logits_with(model: PreTrainedModel, cache: DynamicCache, inputs: dict[str, Tensor], steps: list[Tensor]) -> Tensor:
    """Read the prompt, then the given tokens step by step; logits of every new token [B, Σ steps, V]."""
    name = cache_argument(model)
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    out = model(**inputs, **{name: cache}, position_ids=(real.cumsum(-1) - 1).clamp_min(0))
    collected, seen = [out.logits[:, -1:]], real
    for tokens in steps:
        seen = torch.cat([seen, torch.ones_like(tokens)], -1)
        position = (seen.cumsum(-1) - 1)[:, -tokens.shape[1] :]
        out = model(input_ids=tokens, attention_mask=seen, position_ids=position, **{name: cache})
        collected.append(out.logits)
    return torch.cat(collected, 1)


def evicted_and_judged(
    model: PreTrainedModel, inputs: dict[str, Tensor], steps: list[Tensor], **settings: Any
) -> tuple[Tensor, Tensor, EvictingCache]:
    """Logits of the evicting cache, logits of the full cache with the same tokens hidden, and the cache."""
    cache = EvictingCache(model, **settings)
    evicted = logits_with(model, cache, inputs, steps)
    kept = kept_masks(cache, inputs["input_ids"].shape[1])
    text = model.config.get_text_config(decoder=True)
    with hiding(model, kept):
        judged = logits_with(model, DynamicCache(config=text), inputs, steps)
    return evicted, judged, cache
