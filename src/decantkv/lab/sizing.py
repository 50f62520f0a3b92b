"""What a KV cache will weigh, full and kept, and how many prompts fit a GPU: from a configuration, without weights."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import DynamicCache, DynamicLayer

from decantkv.base.options import reason_of
from decantkv.cache.evicting_cache import is_full
from decantkv.hf.model_parts import layer_config
from decantkv.scoring.rehearsal import Rehearsal
from decantkv.selection.budget import Budget, count, fixed_spans

GPUS = {"h200": 141e9, "h100": 80e9, "a100": 80e9, "a100-40gb": 40e9, "l40s": 48e9, "rtx4090": 24e9, "t4": 16e9}


@dataclass(frozen=True)
class Plan:
    """Bytes of one prompt's cache, and what fits.

    Attributes:
        length, n_keep: tokens of the prompt, and those each head keeps of it.
        layers, evicting: layers with a cache, and those of full attention, which eviction thins.
        bytes_full, bytes_kept: keys and values of one prompt before and after, with the new tokens of its answer.
        bytes_peak: what one prompt adds at most while it is read: what is kept of all layers, and one layer in full;
            under a rehearsal all layers in full, with the longest passage that is run and a score for every key.
        weights: bytes of the model's weights.
        memory: bytes of the GPU, or None.
        note: what the reader should know of the budget, or None.
        batch_full, batch_kept: prompts whose answers fit beside the weights, if the GPU is known.
    """

    length: int
    n_keep: int
    layers: int
    evicting: int
    bytes_full: int
    bytes_kept: int
    bytes_peak: int
    weights: int
    memory: int | None
    batch_full: int | None
    batch_kept: int | None
    note: str | None = None

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self))


def plan(
    config: Any,
    *,
    length: int,
    budget: float | int | str | Budget,
    new_tokens: int = 0,
    window: int = 8,
    dtype: torch.dtype | None = None,
    memory: float | None = None,
    spare: float = 0.1,
    rehearsal: str | Rehearsal | None = None,
) -> Plan:
    """Weigh the cache of one prompt.

    Args:
        config: a transformers configuration of a causal language model.
        length: tokens of the prompt; new_tokens: of the answer.
        budget: as in `attach`; window: tokens kept whatever the budget.
        dtype: of weights and cache; None: the configuration's own, else bfloat16.
        memory: bytes of the GPU; spare: the part of it that is left to activations and fragmentation.
        rehearsal: as in `attach`.

    Raises:
        TypeError, ValueError: a number out of its range, or a model whose layers keep no keys and values.
    """
    if length < 1 or new_tokens < 0:
        raise ValueError(f"length: expected at least one token and no negative answer, got {length} and {new_tokens}")
    text = config.get_text_config(decoder=True)
    own = getattr(text, "dtype", None)
    kind = dtype if dtype is not None else own if isinstance(own, torch.dtype) else torch.bfloat16
    parsed = Budget.parse(budget)
    fixed = count(fixed_spans(length, window=window, sinks=0, protect=()))
    n_keep = parsed.n_keep(length, fixed)
    rehearsed = Rehearsal.parse(rehearsal)
    passage = 0 if rehearsed is None else rehearsed.longest(length)
    full, kept, one, run_over = 0, 0, 0, 0
    cache_layers = DynamicCache(config=text).layers or [DynamicLayer() for _ in range(text.num_hidden_layers)]
    evicting = 0
    for i, layer in enumerate(cache_layers):
        per_token = _bytes_per_token(layer_config(text, i), kind)
        if is_full(layer, text):
            evicting += 1
            full += per_token * (length + new_tokens)
            kept += per_token * (n_keep + new_tokens)
            one = max(one, per_token * (length - n_keep))
            run_over += per_token * passage + _heads(layer_config(text, i)) * length * torch.float32.itemsize
        else:
            limit = getattr(layer, "max_cache_len", None) or getattr(layer, "sliding_window", None)
            tokens = min(length + new_tokens, int(limit)) if limit is not None else 0
            full, kept = full + per_token * tokens, kept + per_token * tokens
    if not evicting:
        raise ValueError(f"model: expected full-attention layers, got {type(config).__name__} with none")
    weights = weight_bytes(config, kind)
    room = None if memory is None else max(0, int(memory * (1 - spare)) - weights)
    peak = kept + one if rehearsed is None else full + run_over
    return Plan(
        length=length,
        n_keep=n_keep,
        layers=len(cache_layers),
        evicting=evicting,
        bytes_full=full,
        bytes_kept=kept,
        bytes_peak=peak,
        weights=weights,
        memory=None if memory is None else int(memory),
        batch_full=None if room is None else room // full,
        # prompts are read one after the other and their caches joined, so that one prompt's peak is enough
        batch_kept=None if room is None else max(0, room - (peak - kept)) // kept,
        note=parsed.starved(length, fixed),
    )


def _bytes_per_token(text: Any, dtype: torch.dtype) -> int:
    """Keys and values of one token in one layer."""
    if getattr(text, "kv_lora_rank", None):  # one latent and one rotated key for all heads
        return int(text.kv_lora_rank + text.qk_rope_head_dim) * dtype.itemsize
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * _heads(text) * int(width) * dtype.itemsize


def _heads(text: Any) -> int:
    """Heads that store keys in one layer."""
    if getattr(text, "kv_lora_rank", None):
        return 1
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def weight_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of the weights of the model a configuration describes, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(int(weight.numel()) for weight in model.parameters()) * dtype.itemsize


def read_config(source: str | Path) -> Any:
    """The configuration of a model id, a model folder, a config.json or a .gguf file.

    Raises:
        ValueError: there is none.
    """
    path = Path(source)
    try:
        if path.is_file() and path.suffix == ".gguf":
            return AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        return AutoConfig.from_pretrained(str(source))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model: expected a model id, a model folder, a config.json or a .gguf file, got {source}: "
            f"{reason_of(error)}"
        ) from error


def parse_memory(text: str) -> float:
    """Bytes of a GPU: a name of `GPUS`, or a number of GB (10⁹) such as "80" or "141GB".

    Raises:
        ValueError: neither.
    """
    name = text.strip().lower()
    if name in GPUS:
        return GPUS[name]
    try:
        size = float(name.removesuffix("gb").strip())
    except ValueError:
        size = 0
    if not size > 0:
        raise ValueError(f"gpu: expected one of {', '.join(GPUS)} or a number of GB, got {text!r}")
    return size * 1e9
