"""Refusals: what the plug-in does not support, each in one sentence, checked before vLLM starts anything."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from decantkv.engines.common.asked import Asked
from decantkv.engines.vllm import compat

PLAIN = ("auto", "float16", "bfloat16", "float32", "half", "float")
LEAST_CHUNK = 4  # tokens that a step must be able to read of a prompt


def check(config: Any, asked: Asked, version: str | None) -> None:
    """Raise if eviction could not be exact, or would not happen.

    Args:
        config: vLLM's `VllmConfig`.

    Raises:
        ValueError: one sentence that names what was expected and what came.
    """
    compat.seams(version)
    if gone := compat.missing(version):
        raise ValueError(f"vllm: expected {gone[0]} in version {version}, got none")
    for sentence in (*_model(config), *_parallel(config), *_engine(config), *_settings(config, asked)):
        raise ValueError(sentence)


def _model(config: Any) -> Iterator[str]:
    model, text = config.model_config, config.model_config.hf_text_config
    if model.use_mla:
        yield "model: expected heads with keys and values of their own, got multi-head latent attention (MLA)"
    if model.runner_type != "generate":
        yield f"model: expected one that generates, got the runner type {model.runner_type!r}"
    if model.is_encoder_decoder:
        yield "model: expected a decoder alone, got an encoder and a decoder"
    if getattr(model, "is_mm_prefix_lm", False):
        yield "model: expected causal attention, got a model whose images attend both ways"
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or model.get_sliding_window() is not None or _chunk_size(text) is not None:
        kinds = kinds - {"full_attention"} or {"sliding_attention"}
        yield f"model: expected full attention in every layer, got {', '.join(sorted(kinds))}"


def _chunk_size(text: Any) -> int | None:
    size: int | None = getattr(text, "attention_chunk_size", None)
    return size


def _parallel(config: Any) -> Iterator[str]:
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            yield f"{name}: expected 1, since a request's tokens must lie together, got {getattr(parallel, name)}"
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "use_ubatching", False):
        yield "enable_dbo: expected whole batches, got micro-batches"


def _engine(config: Any) -> Iterator[str]:
    if config.speculative_config is not None:
        yield "speculative_config: expected none, since drafts are scored as if they were kept, got one"
    if config.kv_transfer_config is not None:
        yield "kv_transfer_config: expected none, since another engine cannot read compacted blocks, got one"
    if config.cache_config.cache_dtype not in PLAIN:
        yield f"kv_cache_dtype: expected a cache that is not quantised, got {config.cache_config.cache_dtype!r}"
    scheduler = config.scheduler_config
    for name in ("max_num_batched_tokens", "long_prefill_token_threshold"):
        number = getattr(scheduler, name, 0)
        if 0 < number < LEAST_CHUNK:
            yield f"{name}: expected at least {LEAST_CHUNK} tokens, got {number}"
    on_cpu = getattr(config.device_config, "device_type", "") == "cpu"
    if on_cpu and config.model_config.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported():
        yield "dtype: expected float32 on this CPU, whose matrix units store bfloat16 caches in a layout of their own"


def _settings(config: Any, asked: Asked) -> Iterator[str]:
    settings, parts = asked.settings, config.parallel_config.tensor_parallel_size
    method, rule = settings.method, settings.allocation
    if method.needs or method.renumbers:
        wanted = ", ".join(sorted(method.needs)) or "new positions"
        yield f"method: expected one that looks at the window's queries, keys and values, got {method.name} ({wanted})"
    if rule.name not in ("uniform", "shared"):
        yield f"allocation: expected 'uniform' or 'shared' inside vLLM, whose heads share blocks, got {rule.name!r}"
    if parts > 1 and (rule.name == "shared" or method.shared_by_heads):
        yield f"allocation: expected 'uniform' where {parts} processes hold the heads, got 'shared'"
    block_size = config.cache_config.block_size  # of the pool, where it is known by now
    if block_size and (sentence := budget_below_a_block(asked, config.model_config.max_model_len, block_size)):
        yield sentence


def budget_below_a_block(asked: Asked, longest: int, block_size: int) -> str | None:
    """Return the refusal of a budget that fills no block even of the longest prompt, or None if it fills one."""
    budget = asked.settings.budget
    tokens = budget.tokens if budget.share is None else math.floor(budget.share * longest)
    if tokens is None or tokens >= block_size:
        return None
    of = "" if budget.share is None else f" of the longest prompt's {longest}"
    return f"budget: expected at least one block of {block_size} tokens, got {tokens}{of}"
