"""The ten settings in which each architecture is judged, and the judgement."""

from __future__ import annotations

import traceback
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import decantkv
from decantkv.cache.evicting_cache import EvictingCache, EvictingLayer, cache_argument, deferred
from tests.support.judge import hiding

LENGTH, CHUNK = 80, 30
STEPS = ((7,), (11, 5, 3), (9,))  # a turn of three tokens between single ones
TOLERANCE = 1e-4  # of the largest logit
SOURCES = str(Path(decantkv.__file__).parent)


@dataclass(frozen=True)
class Setting:
    """How a prompt is read and evicted; each of `ways` is judged, and the setting is as good as the worst of them."""

    ways: tuple[dict[str, Any], ...]
    backend: str | None = None  # None: sdpa where the architecture has it
    padded: bool = False
    chunk: int | None = None


def _both(**options: Any) -> tuple[dict[str, Any], ...]:
    return {"budget": 0.2, "decode": "model", **options}, {"budget": 0.2, "decode": "own", **options}


SETTINGS: dict[str, Setting] = {
    "sdpa": Setting(({"budget": 0.2},), backend="sdpa"),
    "eager": Setting(({"budget": 0.2},), backend="eager"),
    "heads": Setting(({"budget": 0.2, "allocation": "heads"},)),
    "shared": Setting(({"budget": 0.2, "allocation": "shared"},)),
    "own": Setting(({"budget": 0.2, "decode": "own"},)),
    "two-stage": Setting(({"budget": 0.6, "method": "criticalkv"},)),
    "padded": Setting(_both(), padded=True),
    "chunks": Setting(_both(), chunk=CHUNK),
    "reuse": Setting(({"budget": 0.2, "reuse_lse": True},), backend="sdpa"),
    "every": Setting(_both(every=2)),
}


@dataclass
class Verdict:
    """What came of an architecture in a setting."""

    outcome: str
    difference: float | None = None  # the largest, relative to the largest logit


@dataclass
class Reading:
    """Logits of the new tokens, and which tokens were kept when each step began."""

    logits: Tensor
    kept: list[dict[int, Tensor]] = field(default_factory=list)


def prompt(padded: bool) -> dict[str, Tensor]:
    """Ids [1, N], or [2, N] of which the second row begins with pads, with their mask."""
    ids = torch.randint(1, 199, (2 if padded else 1, LENGTH), generator=torch.Generator().manual_seed(1))
    if not padded:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1, : LENGTH // 3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def untouched_logits(model: PreTrainedModel, setting: Setting) -> Tensor:
    """The new tokens' logits without decantkv."""
    return read(model, DynamicCache(config=text_config(model)), setting).logits


def judge(model: PreTrainedModel, setting: Setting, untouched: Tensor) -> Verdict:
    """Compare every way of a setting with the judge, and budget 1.0 with the untouched model."""
    worst = Verdict("equal", 0.0)
    for way in setting.ways:
        verdict = judge_way(model, setting, way, untouched)
        if verdict.outcome != "equal":
            return verdict
        worst = max(worst, verdict, key=lambda v: v.difference or 0.0)
    return worst


def judge_way(model: PreTrainedModel, setting: Setting, way: dict[str, Any], untouched: Tensor) -> Verdict:
    """Compare one way of a setting."""
    label = f"decode={way['decode']}: " if len(setting.ways) > 1 else ""
    try:
        whole = read(model, EvictingCache(model, **{**way, "budget": 1.0, **whole_answers(way)}), setting).logits
        cache = EvictingCache(model, **way)
        evicted = read(model, cache, setting)
    except Exception as error:
        kind = "refused" if is_refusal(error) else "fault"
        return Verdict(f"{kind}: {label}{describe(error)}")
    size = float(untouched.abs().max())
    if (off := distance(whole, untouched) / size) > TOLERANCE:
        return Verdict(f"fault: {label}budget 1.0 differs from the untouched model", off)
    if not any(evicted.kept):
        return Verdict(f"fault: {label}nothing was evicted")
    judged = read(model, DynamicCache(config=text_config(model)), setting, evicted.kept).logits
    if (off := distance(evicted.logits, judged) / size) > TOLERANCE:
        return Verdict(f"fault: {label}differs from the judge", off)
    if (least := distance(untouched, judged) / size) < 10 * TOLERANCE:
        return Verdict(f"blind: {label}hiding the dropped tokens changes no more than {least:.0e}", off)
    return Verdict("equal", off)


def whole_answers(way: dict[str, Any]) -> dict[str, Any]:
    """At budget 1.0 nothing is to be dropped from the answer either."""
    return {"every": 50} if "every" in way else {}


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite where something is not finite or the shapes differ."""
    if a.shape != b.shape or not bool(a.isfinite().all()):
        return float("inf")
    return float((a - b).abs().max())


@torch.no_grad()
def read(
    model: PreTrainedModel, cache: DynamicCache, setting: Setting, hidden: list[dict[int, Tensor]] | None = None
) -> Reading:
    """Read the prompt, then the steps; `hidden` says for each step what it may see of the tokens before it."""
    inputs, name = prompt(setting.padded), cache_argument(model)
    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    logits, kept = [], []

    def forward(tokens: Tensor) -> None:
        given: dict[str, Any] = {"input_ids": tokens, name: cache, "use_cache": True}
        if mask is not None:
            given["attention_mask"] = mask[:, :seen]
            given["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)[:, seen - tokens.shape[1] : seen]
        logits.append(model(**given).logits)

    evicting = isinstance(cache, EvictingCache)
    seen = 0
    with deferred(cache) if setting.chunk and evicting else nullcontext():
        for chunk in ids.split(setting.chunk or LENGTH, dim=1):
            seen += chunk.shape[1]
            forward(chunk)
    logits = [logits[-1][:, -1:]]
    for i, step in enumerate(STEPS):
        tokens = torch.tensor([step]).expand(ids.shape[0], -1)
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)
        if evicting:
            kept.append(kept_now(cache))
        seen += tokens.shape[1]
        with hiding(model, hidden[i]) if hidden else nullcontext():
            forward(tokens)
    return Reading(torch.cat(logits, 1).float(), kept)


def kept_now(cache: EvictingCache) -> dict[int, Tensor]:
    """[B, H, n] bool per layer that has evicted: which of the first n tokens it holds."""
    masks = {}
    for layer in cache.layers:
        if isinstance(layer, EvictingLayer) and layer.kept is not None:
            length = getattr(layer.answer, "renewed", LENGTH)
            masks[layer.layer_idx] = layer.kept.mask(length)
    return masks


def text_config(model: PreTrainedModel) -> Any:
    """The configuration that transformers' caches are made from."""
    return model.config.get_text_config(decoder=True)


def is_refusal(error: BaseException) -> bool:
    """Whether decantkv raised the error itself, in its own form."""
    if not isinstance(error, (ValueError, TypeError)):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(SOURCES) and ": expected" in str(error)


def describe(error: BaseException) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
