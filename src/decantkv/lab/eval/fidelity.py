"""How far eviction moves a model, without any labels: its next-token distributions and its layers' outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decantkv import scoring
from decantkv.cache.chunked_reading import evicting_layers
from decantkv.cache.evicting_cache import EvictingCache
from decantkv.lab.eval.ruler.haystack import Haystack
from decantkv.lab.eval.sample import Sample
from decantkv.scoring.reference import logits as reference_logits
from decantkv.scoring.window import AttentionWindow

CONTINUATION = 64  # tokens of the text that follow the prompt
LATE = 64  # tokens at the prompt's end that the question-agnostic regime has not seen when it evicts
ROWS = 8  # last queries whose outputs are compared


@dataclass(frozen=True)
class Passages:
    """Slices of a text: a prompt of `length` tokens, of which the last 64 stand for a question, and what follows.

    Attributes:
        text: to slice.
        length: tokens of a prompt.
        tokenizer: a fast transformers tokenizer.
    """

    text: Haystack
    length: int
    tokenizer: Any

    def sample(self, index: int) -> Sample:
        """Slice number `index`, from its own part of the text.

        Raises:
            ValueError: the text is too short for that many slices.
        """
        encode, decode = self.tokenizer, self.tokenizer.decode
        begin = self.text.opening(index) + index // self.text.openings * self.length * 2
        words = self.text.words[begin : begin + self.length * 2]
        ids = encode(" ".join(words), add_special_tokens=False)["input_ids"]
        if len(ids) < self.length + CONTINUATION:
            raise ValueError(
                f"samples: expected a text of {begin + self.length * 2} words for {index + 1} slices, "
                f"got {len(self.text.words)}"
            )
        end = self.length - 1  # a tokenizer may put one token before the text
        return Sample(
            suite="fidelity",
            task="text",
            length=self.length,
            index=index,
            context=decode(ids[: end - LATE]),
            question=decode(ids[end - LATE : end]),
            answer_prefix="",
            references=(decode(ids[end : end + CONTINUATION]),),
            max_new_tokens=0,
            metric="string_match_all",
            chat=False,
            details={"haystack": self.text.name},
        )


def compare(full: Tensor, other: Tensor) -> dict[str, float]:
    """Next-token distributions against the full cache's.

    Args:
        full, other: logits [C, V].

    Returns:
        kl: mean KL(full ‖ other) in nats; tv: mean total variation ½ Σ |p − q|, the largest difference that any set of
        tokens' probability can have; top1: share of positions with the same most likely token, the others being flips.
    """
    p, q = full.float().log_softmax(-1), other.float().log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).clamp_min(0).mean()
    tv = (p.exp() - q.exp()).abs().sum(-1).mean() / 2
    same = (p.argmax(-1) == q.argmax(-1)).float().mean()
    return {"kl": round(float(kl), 6), "tv": round(float(tv), 6), "top1": round(float(same), 5)}


def costs(windows: Sequence[AttentionWindow]) -> list[Tensor]:
    """Per layer [1, H, N]: each key's own cost to the last eight rows' outputs."""
    return [scoring.compute("perturbation", window.last(ROWS)) for window in windows]


def kept_mask(cache: EvictingCache, kv_len: int) -> Tensor:
    """[layers, H, N] bool: which tokens of one prompt a cache kept."""
    chosen = [layer.kept.mask(kv_len) for layer in evicting_layers(cache) if layer.kept is not None]
    return torch.cat(chosen)


def output_shift(windows: Sequence[AttentionWindow], kept: Tensor, costs: Sequence[Tensor]) -> dict[str, list[float]]:
    """Per layer, how far evicting moves the attention outputs of the last eight rows, relative to their size.

    Args:
        kept: of `kept_mask`; costs: of `costs`.

    Returns:
        real: √(Σ ‖a − a′‖² / Σ ‖a‖²) with the kept keys renormalised; predicted: the same with the evicted keys' own
        costs added up, as if each left alone and in a direction of its own.
    """
    real, predicted = [], []
    for window, one, cost in zip(windows, kept, costs, strict=True):
        win, mask = window.last(ROWS), one[None]
        s = reference_logits(win, torch.float32)  # [1, H, g, w, N]
        v = win.v.float()[:, :, None]
        a = s.softmax(-1) @ v
        left = s.masked_fill(~mask[:, :, None, None], -torch.inf).softmax(-1) @ v
        size = a.square().sum()
        real.append(float(((a - left).square().sum() / size).sqrt()))
        lost = cost.masked_fill(mask, 0.0).sum() * win.group_size
        predicted.append(float((lost / size).sqrt()))
    return {"real": [round(x, 5) for x in real], "predicted": [round(x, 5) for x in predicted]}


def overlaps(masks: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Share of one method's kept tokens that another keeps too, over all layers and heads: name -> name -> share.

    Args:
        masks: name -> `kept_mask`.
    """
    return {
        one: {other: round(float((mask & masks[other]).sum() / mask.sum()), 4) for other in masks if other != one}
        for one, mask in masks.items()
    }
