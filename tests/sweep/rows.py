"""The rows of one architecture."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from decantkv.cache.evicting_cache import EvictingCache
from decantkv.lab.provenance import commit
from tests.sweep.architectures import Built, NotBuilt, build
from tests.sweep.settings import SETTINGS, Verdict, describe, is_refusal, judge, untouched_logits


def rows_of(name: str) -> list[dict[str, Any]]:
    """One row for each setting."""
    try:
        verdicts = judge_all(build(name))
    except NotBuilt as error:
        verdicts = dict.fromkeys(SETTINGS, Verdict(f"not built: {error}"))
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "commit": _commit()}
    return [
        {"architecture": name, "setting": label, "outcome": v.outcome, "difference": v.difference, **versions}
        for label, v in verdicts.items()
    ]


@functools.cache
def _commit() -> str | None:
    return commit(mark=True)


def judge_all(built: Built) -> dict[str, Verdict]:
    """What comes of each setting; encoder-decoder models must be refused at the door."""
    model, verdicts = built.model, {}
    if is_encoder_decoder(model):
        return dict.fromkeys(SETTINGS, refused_at_the_door(model))
    untouched: dict[Any, Tensor] = {}
    for label, setting in SETTINGS.items():
        backend = setting.backend or next(iter(built.backends), None)
        if backend not in built.backends:
            verdicts[label] = Verdict(f"not built: transformers has no {backend} for it")
            continue
        model.set_attn_implementation(backend)
        key = (backend, setting.padded, setting.chunk)
        try:
            untouched[key] = untouched[key] if key in untouched else untouched_logits(model, setting)
        except Exception as error:
            verdicts[label] = Verdict(f"not built: the untouched model fails: {describe(error)}")
            continue
        try:
            verdicts[label] = judge(model, setting, untouched[key])
        except Exception as error:
            verdicts[label] = Verdict(f"fault: the judge fails: {describe(error)}")
    return verdicts


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Whether the model's decoder attends to an encoder's output."""
    config = model.config
    return bool(getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False))


def refused_at_the_door(model: PreTrainedModel) -> Verdict:
    """An encoder-decoder model's verdict: its cache is never made."""
    try:
        EvictingCache(model, budget=0.5)
    except Exception as error:
        return Verdict(f"{'refused' if is_refusal(error) else 'fault'}: {describe(error)}")
    return Verdict("fault: an encoder-decoder model is accepted")
