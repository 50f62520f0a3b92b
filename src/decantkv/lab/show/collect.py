"""Everything the page shows about one prompt: what each method kept, scored, cost and missed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decantkv.cache.evicting_cache import EvictingCache, cache_argument, new_recorder
from decantkv.cache.layer import EvictingLayer
from decantkv.hf.attention_hook import AttentionCall
from decantkv.hf.masks import PromptMask
from decantkv.hf.model_parts import rotation
from decantkv.lab.show.observe import WatchedCache, attend, window_call
from decantkv.lab.show.spans import SpanCost, pooled, span_costs
from decantkv.scoring import reference
from decantkv.scoring.window import AttentionWindow
from decantkv.settings import Settings

TOP = 40  # dropped tokens that are named
_CHUNK = 16_384  # keys at a time, so that rows × keys × head_dim stays small


@dataclass(frozen=True)
class Detail:
    """One layer's numbers per KV head and prompt token.

    Attributes:
        weight: [H, N] float32 mean softmax weight of the token over the window's rows.
        distance: [H, N] float32 mean ‖a − v‖ over the same rows.
        scores: by method, [H, N] float32 unpooled.
        ranks: by method, [H, N] uint32, 0 = the highest pooled score; ties to the earlier token.
    """

    weight: np.ndarray
    distance: np.ndarray
    scores: tuple[np.ndarray, ...]
    ranks: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Missed:
    """A dropped token that the answer would have attended to.

    Attributes:
        token: prompt position.
        weight: its mean weight over the answer's rows and all heads, counted only in heads that dropped it.
        layer, head: where it weighs most among those.
        there: its weight there.
    """

    token: int
    weight: float
    layer: int
    head: int
    there: float


@dataclass(frozen=True)
class MethodView:
    """One method on the prompt.

    Attributes:
        name: settings as text. short: the method's name.
        kept: by layer, [H, N] bool.
        answer: what the model says with this cache.
        missed: the dropped tokens that this answer would have attended to, heaviest first.
        missed_weight: [N] float32, every token's `Missed.weight`.
        missed_share: share of the answer's weight on the prompt that falls on dropped tokens, mean over the heads.
        spans: what protection cost.
    """

    name: str
    short: str
    kept: tuple[np.ndarray, ...]
    answer: str
    missed: tuple[Missed, ...]
    missed_weight: np.ndarray
    missed_share: float
    spans: tuple[SpanCost, ...]


@dataclass(frozen=True)
class View:
    """A prompt and what was made of it.

    Attributes:
        model: its name.
        pieces: the prompt's text, one piece a token; together they are the prompt.
        layers: the layers that evict.
        num_kv_heads: H.
        budget: as text. n_keep: tokens per head.
        full_answer: what the model says with the full cache.
        methods: at least one.
        details: by layer.
    """

    model: str
    pieces: tuple[str, ...]
    layers: tuple[int, ...]
    num_kv_heads: int
    budget: str
    n_keep: int
    full_answer: str
    methods: tuple[MethodView, ...]
    details: tuple[Detail, ...]


def collect(
    model: PreTrainedModel,
    tokenizer: Any,
    input_ids: Tensor,
    pieces: Sequence[str],
    settings: Sequence[Settings],
    *,
    model_name: str,
    max_new_tokens: int,
    progress: Callable[[str], None] = lambda _: None,
) -> View:
    """Read the prompt once with a full cache and once per method, answer each time, and compare.

    Args:
        input_ids: [1, N] int64 on the model's device.
        pieces: the prompt's text by token.
        settings: the methods; all share one budget.

    Raises:
        ValueError: a batch, or no method.
    """
    if input_ids.dim() != 2 or input_ids.shape[0] != 1:
        raise ValueError(f"input_ids: expected one prompt [1, tokens], got {list(input_ids.shape)}")
    if not settings:
        raise ValueError("method: expected at least one, got none")
    n = input_ids.shape[1]
    details: dict[int, Detail] = {}

    def on_prompt(layer_idx: int, call: AttentionCall, seen: PromptMask) -> None:
        progress(f"reading, layer {layer_idx}")
        details[layer_idx] = _layer(model, settings, layer_idx, call, seen)

    full = WatchedCache(model, on_prompt, rows=max(s.rows for s in settings))
    full_ids = _generate(model, input_ids, full, max_new_tokens)
    full.forget_answer()
    views = []
    for i, chosen in enumerate(settings):
        progress(f"answering with {chosen.method.name}")
        cache = EvictingCache.of(model, chosen, new_recorder(chosen))
        answer = _generate(model, input_ids, cache, max_new_tokens)
        kept = [_kept(cache.layers[layer], details[layer].weight.shape) for layer in full.prompt_layers()]
        weight = attend(model, full, answer)
        missed, per_token, share = _missed(weight, full.prompt_layers(), kept, n)
        views.append(
            MethodView(
                name=chosen.method.describe(),
                short=chosen.method.name,
                kept=tuple(kept),
                answer=tokenizer.decode(answer, skip_special_tokens=True),
                missed=missed,
                missed_weight=per_token,
                missed_share=share,
                spans=span_costs(chosen, [d.scores[i] for d in details.values()], kept),
            )
        )
    first = settings[0]
    return View(
        model=model_name,
        pieces=tuple(pieces),
        layers=tuple(full.prompt_layers()),
        num_kv_heads=len(details[full.prompt_layers()[0]].weight),
        budget=str(first.budget),
        n_keep=first.n_keep([n])[0],
        full_answer=tokenizer.decode(full_ids, skip_special_tokens=True),
        methods=tuple(views),
        details=tuple(details[layer] for layer in full.prompt_layers()),
    )


def _generate(model: PreTrainedModel, input_ids: Tensor, cache: Any, max_new_tokens: int) -> list[int]:
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            **{cache_argument(model): cache},
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
    ids: list[int] = output[0, input_ids.shape[1] :].tolist()
    return ids


def _kept(layer: EvictingLayer, shape: tuple[int, ...]) -> np.ndarray:
    """[H, N] bool: what a layer stored of its prompt."""
    if layer.kept is None:
        return np.ones(shape, dtype=bool)
    mask: np.ndarray = layer.kept.mask(shape[1])[0].cpu().numpy()
    return np.broadcast_to(mask, shape)  # a latent cache stores one head for all


def _layer(
    model: PreTrainedModel, settings: Sequence[Settings], layer_idx: int, call: AttentionCall, seen: PromptMask
) -> Detail:
    scores, ranks = [], []
    for chosen in settings:
        rotate = rotation(model) if "rotate" in chosen.method.needs else None
        win = window_call(call, seen, chosen.rows, layer_idx, needs=chosen.method.needs, rotate=rotate)
        score = chosen.score(win).float()[0]
        order = torch.sort(pooled(chosen, score), dim=-1, descending=True, stable=True).indices
        place = torch.arange(win.kv_len, device=order.device).expand_as(order)
        scores.append(score.cpu().numpy())
        ranks.append(torch.empty_like(order).scatter_(1, order, place).cpu().numpy().astype(np.uint32))
    widest = window_call(call, seen, max(s.rows for s in settings), layer_idx)
    weight, distance = _weight_and_distance(widest)
    return Detail(weight, distance, tuple(scores), tuple(ranks))


def _weight_and_distance(win: AttentionWindow) -> tuple[np.ndarray, np.ndarray]:
    """[H, N] each: mean weight and mean ‖a − v‖ over a KV head's rows, a head at a time."""
    weights, distances = [], []
    group = win.group_size
    for h in range(win.num_kv_heads):
        heads = slice(h * group, (h + 1) * group)
        one = replace(
            win,
            q=win.q[:, heads],
            k=win.k[:, h : h + 1],
            v=win.v[:, h : h + 1],
            sink_logits=None if win.sink_logits is None else win.sink_logits[heads],
            out=None,
            lse=None,
        )
        rows = reference.softmax(one)
        weights.append(rows.p[0, 0].mean((0, 1)).cpu().numpy())
        a = rows.a[0, 0].flatten(0, 1)
        parts = [torch.cdist(a, part.to(a.dtype)).mean(0) for part in one.v[0, 0].split(_CHUNK)]
        distances.append(torch.cat(parts).cpu().numpy())
    return np.stack(weights).astype(np.float32), np.stack(distances).astype(np.float32)


def _missed(
    weight: dict[int, Tensor], layers: Sequence[int], kept: Sequence[np.ndarray], n: int
) -> tuple[tuple[Missed, ...], np.ndarray, float]:
    """(the heaviest dropped tokens, every token's missed weight [N], the share of weight that is missed)."""
    if not weight:
        return (), np.zeros(n, dtype=np.float32), 0.0
    lost = np.stack([weight[layer].cpu().numpy() * ~mask for layer, mask in zip(layers, kept, strict=True)])
    whole = np.stack([weight[layer].cpu().numpy() for layer in layers])  # [layers, H, N]
    share = float(np.mean(lost.sum(-1) / np.maximum(whole.sum(-1), np.finfo(float).tiny)))
    per_token = lost.mean((0, 1))
    heaviest = np.argsort(-per_token, kind="stable")[:TOP]
    found = []
    for token in heaviest[per_token[heaviest] > 0]:
        at, head = np.unravel_index(int(np.argmax(lost[:, :, token])), lost.shape[:2])
        there = float(lost[at, head, token])
        found.append(Missed(int(token), float(per_token[token]), int(layers[int(at)]), int(head), there))
    return tuple(found), per_token.astype(np.float32), share
