"""Check a model before eviction starts: what cannot be followed is refused by name, before a forward."""

from __future__ import annotations

import inspect
from typing import Any

import transformers
from torch import nn
from transformers import PreTrainedModel

from decantkv.hf.attention_hook import UnsupportedModelError, modeling_files
from decantkv.hf.model_parts import decoder_of, takes_a_cache

# their later layers attend to the keys that an earlier layer's cache returned in the same forward
READ_AGAIN = frozenset({"gemma3n_text", "gemma4_text", "gemma4_unified_text"})


def checked_model(model: object) -> PreTrainedModel:
    """Return the transformers model inside `model`, if eviction can follow its attention.

    `torch.compile`, PEFT and data parallelism wrap a model in one of another type, whose calls reach it all the same.

    Raises:
        TypeError: no transformers model, nor one in a wrapper.
        UnsupportedModelError: one whose attention cannot be followed.
    """
    given = model
    while not isinstance(model, PreTrainedModel):
        inner = _wrapped(model)
        if inner is None:
            raise TypeError(f"model: expected a transformers PreTrainedModel, got {type(given).__name__}")
        model = inner
    if not modeling_files(model):
        raise refused(model, "one that attends through transformers' attention interface", "")
    if hasattr(model, "_supports_default_dynamic_cache") and not model._supports_default_dynamic_cache():
        needs = f"which in transformers {transformers.__version__} needs a cache of its own"
        raise refused(model, "one that works with transformers' own caches", needs)
    config = text_config(model)
    if _any(model, config, "is_encoder_decoder"):
        raise refused(model, "a decoder that reads the prompt itself", "whose prompt is read by an encoder")
    if _any(model, config, "add_cross_attention"):
        raise refused(model, "a decoder without cross-attention", "which caches an encoder's keys as well")
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise refused(model, "one decoder of num_hidden_layers layers", f"with a {type(config).__name__}")
    _check_sharing(model, config)
    if not takes_a_cache(decoder_of(model)):
        raise refused(model, "one whose forward takes a cache", "which hands its prompts to a part; give that part")
    return model


def refused(model: nn.Module, expected: str, got: str) -> UnsupportedModelError:
    """Return the error for a model that cannot be followed: what was expected, and how this model differs."""
    return UnsupportedModelError(
        f"model: expected {expected}, got {type(model).__name__}" + (f", {got}" if got else "")
    )


def text_config(model: PreTrainedModel) -> Any:
    """Return the configuration of the model's text decoder.

    Raises:
        UnsupportedModelError: the model has several decoders.
    """
    try:
        return model.config.get_text_config(decoder=True)
    except ValueError as error:  # transformers finds more than one
        raise refused(model, "one text decoder", "with several") from error


def reads_again(model: PreTrainedModel) -> bool:
    """Return whether layers of the model read an earlier layer's keys by attention calls that no cache layer sees."""
    config = text_config(model)
    return config.model_type in READ_AGAIN and bool(getattr(config, "num_kv_shared_layers", 0))


def _any(model: PreTrainedModel, config: Any, name: str) -> bool:
    return any(getattr(c, name, False) is True for c in (model.config, config))


def _check_sharing(model: PreTrainedModel, config: Any) -> None:
    """Raise where layers share keys in a way that is not known to read only what the cache returned."""
    kinds = {type(part) for part in model.modules()}
    shares = getattr(config, "num_kv_shared_layers", 0) or any(
        "shared_kv_states" in inspect.signature(kind.forward).parameters for kind in kinds
    )
    if shares and config.model_type not in READ_AGAIN:
        raise refused(model, "layers that attend to keys of their own", "whose layers read one another's keys")


def _wrapped(model: object) -> object | None:
    """Return the model that `torch.compile`, data parallelism or PEFT wrapped, or None if this is no such wrapper."""
    if not isinstance(model, nn.Module):
        return None
    for name in ("_orig_mod", "module"):
        if isinstance(within := getattr(model, name, None), nn.Module):
            return within
    base = getattr(model, "get_base_model", None)
    inner: object = base() if callable(base) else None
    return inner
