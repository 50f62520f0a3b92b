"""Tiny random models and prompts, the same for the same seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).parents[2]
VOCABULARY = 199
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}


def llama(seed: int = 0, attention: str = "sdpa", **options: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**BASE, **options}))
    return sharpen(model, attention)


def qwen2(seed: int = 0, attention: str = "sdpa", **options: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    return sharpen(Qwen2ForCausalLM(Qwen2Config(**{**BASE, **options})), attention)


def sharpen(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    """Random weights attend almost uniformly; larger ones make some tokens matter and mistakes visible."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name and "lm_head" not in name:
                parameter.mul_(4)
    model.set_attn_implementation(attention)
    return model.eval()


def prompt(length: int, seed: int = 0, batch: int = 1) -> Tensor:
    """[batch, length] token ids without the pad token."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Prompts [1, n] of unequal length as one batch with its attention mask."""
    longest = max(row.shape[1] for row in rows)
    ids = torch.cat([torch.nn.functional.pad(row, (longest - row.shape[1], 0)) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


GREEDY: dict[str, Any] = {"do_sample": False, "use_cache": True}
