"""What some architectures need beyond small sizes: fields that depend on others, and layers of every kind."""

from __future__ import annotations

from typing import Any

from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    SpeechEncoderDecoderConfig,
    VisionEncoderDecoderConfig,
    ViTConfig,
    Wav2Vec2Config,
)

MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
THREE_POSITIONS = [
    f"{name}ForConditionalGeneration"
    for name in ("Qwen2VL", "Qwen2_5_VL", "Qwen2_5OmniThinker", "PaddleOCRVL", "Glm46V", "Glm4v", "GlmOcr")
]
LINEAR_AND_FULL = ["linear_attention", "full_attention", "full_attention"]
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_chunk_size": 16}
HALF_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
INDEXER = {
    **{"indexer_budget": 16, "indexer_compress_ratio": 4},
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16},
}
GEMMA4 = {"global_head_dim": 16, "hidden_size_per_layer_input": 0}
SLIDING_AND_FULL = ["sliding_attention", "full_attention", "full_attention"]

QUIRKS: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"num_expert_group": 1, "topk_group": 1},
    "BambaForCausalLM": {**MAMBA, "attn_layer_indices": [1, 2]},
    "BertLMHeadModel": {"is_decoder": True},
    "BlenderbotForCausalLM": {"num_hidden_layers": 3, "decoder_layers": 3, "encoder_layers": 3},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "CohereCompassForConditionalGeneration": {
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 4},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 4},
    "DoryForCausalLM": {
        "num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2,
        "layer_types": [kind for kind in SLIDING_AND_FULL for _ in "ab"],
    },
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4, "layer_types": ["full_attention", "sliding_attention"] * 2,
        "altup_num_inputs": 2,
    },
    "Gemma4AssistantForCausalLM": {"text_config": GEMMA4},
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4ForConditionalGeneration": {"text_config": GEMMA4},
    "Gemma4UnifiedAssistantForCausalLM": {"text_config": GEMMA4},
    "Gemma4UnifiedForCausalLM": GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": {"text_config": GEMMA4},
    "GraniteMoeHybridForCausalLM": {**MAMBA, "layer_types": LINEAR_AND_FULL},
    "HrmTextForCausalLM": {"num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 2, "num_hidden_layers": 3},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention", "full_attention"]},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 16, "chunk_size": 16},
    "MistralForCausalLM": {"sliding_window": None},
    "MoshiForCausalLM": {"sliding_window": 512},
    "MinistralForCausalLM": {"layer_types": SLIDING_AND_FULL},
    "Idefics2ForConditionalGeneration": {"text_config": {"sliding_window": None}},
    "MusicgenForCausalLM": {"num_codebooks": 1},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1},
    "Molmo2ForConditionalGeneration": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "Qwen4ExpForCausalLM": INDEXER,
    "Qwen4ExpForConditionalGeneration": {"text_config": INDEXER},
    "ChameleonForConditionalGeneration": {"vocabulary_map": {"<image>": 200}},
    "Emu3ForConditionalGeneration": {"vocabulary_map": {"<image>": 200, "<|extra_200|>": 201}},
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}},
    },
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "Step3p7ForConditionalGeneration": {"text_config": {"sliding_window": 32}},
    "XLNetLMHeadModel": {"d_head": 16, "n_head": 4, "d_model": 64},
    "XmodForCausalLM": {"default_language": "en_XX", "is_decoder": True},
    "Zamba2ForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "attention_head_dim": 32, "n_mamba_heads": 8,
        "chunk_size": 16, "attention_hidden_size": 128, "mamba_headdim": 16, "hybrid_layer_ids": [1, 2],
    },
    "ZambaForCausalLM": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "attention_head_dim": 32,
        "attention_hidden_size": 128, "use_mamba_kernels": False,
    },
    **{name: {"text_config": MROPE} for name in THREE_POSITIONS},
    "Glm4vMoeForConditionalGeneration": {"text_config": {"rope_parameters": HALF_ROPE}},
}  # fmt: skip

# the same classes with options that change how their layers attend: name: (class, options)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel with cross-attention": ("GPT2LMHeadModel", {"add_cross_attention": True}),
    "Gemma4ForCausalLM with shared keys": (
        "Gemma4ForCausalLM",
        {"global_head_dim": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "InklingForCausalLM with wide windows": ("InklingForCausalLM", {"sliding_window_size": 512}),
    "BertLMHeadModel, an encoder": ("BertLMHeadModel", {}),
}  # fmt: skip


def _bert(**options: Any) -> BertConfig:
    return BertConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, vocab_size=256, **options
    )


def _pair() -> Any:
    return EncoderDecoderConfig.from_encoder_decoder_configs(_bert(), _bert())


def _picture() -> Any:
    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "hidden_size": 64}
    return VisionEncoderDecoderConfig.from_encoder_decoder_configs(ViTConfig(image_size=32, **small), _bert())


def _speech() -> Any:
    small = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "hidden_size": 64}
    return SpeechEncoderDecoderConfig.from_encoder_decoder_configs(
        Wav2Vec2Config(conv_dim=(8,) * 7, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, **small), _bert()
    )


SPECIAL = {"EncoderDecoderModel": _pair, "VisionEncoderDecoderModel": _picture, "SpeechEncoderDecoderModel": _speech}
