"""One tiny random model per architecture, with the backends it supports."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from tests.support.tiny import BASE, sharpen

# name: (configuration and model classes, options on top of BASE, backends)
BOTH = ("sdpa", "eager")
FAMILIES: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}, BOTH),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None, "head_dim": 8}, BOTH),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}, BOTH),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 16}, BOTH),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"sliding_window": None}, BOTH),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 5.0,
            "sliding_window": 32,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        ("eager",),  # sdpa has no soft cap, and transformers warns against it here
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 64,
            "sliding_window": 32,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        BOTH,
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 16,
            "sliding_window": 32,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        ("eager",),  # learned sinks: no sdpa
    ),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}, BOTH),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 8,
            "kv_lora_rank": 16,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        },
        BOTH,
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None, "head_dim": 8},
        BOTH,
    ),
    "diffllama": ("DiffLlamaConfig", "DiffLlamaForCausalLM", {}, BOTH),
    "lfm2": (
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {"layer_types": ["conv", "full_attention", "full_attention"]},
        BOTH,
    ),
}


def at_least(version: str) -> bool:
    return Version(Version(transformers.__version__).base_version) >= Version(version)


# before these versions transformers wrote the model off the attention interface, or gave it a cache of its own
SINCE = {"diffllama": "5.17", "lfm2": "5.12"}
REFUSED = [name for name, version in SINCE.items() if not at_least(version)]
CASES = [(name, backend) for name, (*_, backends) in FAMILIES.items() if name not in REFUSED for backend in backends]


def build(name: str, backend: str) -> PreTrainedModel:
    config, model, options, _ = FAMILIES[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**BASE, **options}, attn_implementation=backend)
    return sharpen(getattr(transformers, model)(made), backend)
