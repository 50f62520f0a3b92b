"""The architectures that transformers' own mappings name, and a tiny random model of each."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.sweep.quirks import QUIRKS, SPECIAL, VARIANTS
from tests.sweep.shrink import shrink

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
)
MOST_PARAMETERS = 50_000_000


class NotBuilt(Exception):
    """No tiny model of the architecture: the message says why."""


@dataclass(frozen=True)
class Built:
    """A tiny model and the attention backends it has."""

    model: PreTrainedModel
    backends: tuple[str, ...]


def names() -> list[str]:
    """Class names of all architectures that generate text, encoder-decoder models included, in alphabetical order."""
    found: set[str] = set()
    for mapping in MAPPINGS:
        for classes in getattr(modeling_auto, mapping, {}).values():
            found.update([classes] if isinstance(classes, str) else classes)
    return sorted([*found, *(name for name, (kind, _) in VARIANTS.items() if kind in found)])


def build(name: str) -> Built:
    """A tiny random model of the architecture, in evaluation mode, the same for the same name.

    Raises:
        NotBuilt: its configuration could not be shrunk, or transformers lacks what it needs.
    """
    try:
        kind_name, quirks = VARIANTS.get(name, (name, QUIRKS.get(name, {})))
        kind = getattr(transformers, kind_name)
        config = SPECIAL[name]() if name in SPECIAL else configuration(kind, quirks)
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(copy.deepcopy(config)).parameters())
        if size > MOST_PARAMETERS:
            raise NotBuilt(f"{size:,} parameters")
        torch.manual_seed(0)
        logging.disable(logging.WARNING)
        model = kind(config).eval()
    except NotBuilt:
        raise
    except Exception as error:
        raise NotBuilt(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]) from error
    finally:
        logging.disable(logging.NOTSET)
    randomise(model)
    return Built(model, tuple(backend for backend in ("sdpa", "eager") if _supports(model, backend)))


def configuration(kind: type[PreTrainedModel], quirks: dict[str, Any]) -> Any:
    """The model class's default configuration, shrunk."""
    config_class: Any = kind.config_class
    return config_class(**shrink(config_class().to_dict(), quirks))


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Weights that make attention uneven, so that single tokens matter and mistakes show."""
    generator = torch.Generator().manual_seed(0)

    def normal(x: Tensor, deviation: float) -> None:
        x.copy_(torch.randn(x.shape, generator=generator) * deviation)

    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all() or parameter.abs().max() > 1e3:  # transformers left the memory as it was
            parameter.fill_(1.0)
        if parameter.dim() < 2 or "A_log" in name:
            continue
        if "embed" in name or "wte" in name:
            normal(parameter, 1.0)
        elif parameter.dim() == 2:
            normal(parameter, 1.5 * min(parameter.shape) ** -0.5)


def _supports(model: PreTrainedModel, backend: str) -> bool:
    try:
        model.set_attn_implementation(backend)
    except (ValueError, ImportError):
        return False
    return model.config.get_text_config(decoder=True)._attn_implementation == backend
