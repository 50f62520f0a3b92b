"""A small configuration from a large one: sizes by the name of the field, nested parts alike."""

from __future__ import annotations

from typing import Any

VOCABULARY = 256  # ids from 200 on are left to special tokens
LAYERS = 3
HEADS = 4
SPECIAL_FROM = 200

SIZES: dict[int, str] = {
    64: """hidden_size d_model n_embd embed_dim model_dim dim n_embed width projection_dim output_dim text_hidden_size
        out_hidden_size encoder_hidden_size word_embed_proj_dim embedding_size mm_hidden_size hidden_dim
        output_hidden_size encoder_embed_dim decoder_embed_dim adapter_hidden_size n_state audio_hidden_size""",
    96: """intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_ff ffn_hidden_size
        dense_intermediate_size intermediate_size_mlp projector_hidden_size""",
    32: """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size shared_intermediate_size
        moe_shared_expert_intermediate_size mlp_hidden_size image_size img_size
        sliding_window sliding_window_size attention_chunk_size local_attention window_size""",
    24: "q_lora_rank",
    20: "kv_lora_rank o_lora_rank",  # no head's width, so that latents are never taken for keys
    16: """head_dim attention_head_dim kv_channels d_kv global_head_dim swa_head_dim v_head_dim swa_v_head_dim
        qk_head_dim index_n_heads index_head_dim index_topk num_mel_bins n_mels feature_size mamba_d_state
        ssm_state_size state_size linear_key_head_dim linear_value_head_dim linear_head_dim
        mamba_head_dim chunk_size mamba_chunk_size""",
    8: """mamba_num_heads qk_rope_head_dim qk_nope_head_dim rotary_dim hidden_size_per_layer_input laurel_rank
        patch_size temporal_patch_size""",
    # all experts are active: a choice among them turns on the last digits
    4: """num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts num_experts_per_tok
        num_experts_per_token top_k_experts moe_topk moe_k linear_num_key_heads linear_num_value_heads
        linear_num_heads""",
    2: "num_codebooks",
    1: "n_group topk_group n_groups num_group n_expert_groups first_k_dense_replace num_dense_layers",
    0: "num_nextn_predict_layers",
    512: """max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions
        max_sequence_length""",
    VOCABULARY: "vocab_size text_vocab_size vocab_size_per_layer_input",
}
SMALL = {name: size for size, fields in SIZES.items() for name in fields.split()}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers", "depth")
LAYER_COUNTS += ("num_encoder_layers", "num_decoder_layers", "n_head_layers")
HEAD_COUNTS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")
HEAD_COUNTS += ("decoder_attention_heads", "num_query_heads")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
NOT_TEXT = ("vision", "audio", "image", "speech", "qformer", "encoder", "vq", "codec", "acoustic", "dit", "visual")


def shrink(config: dict[str, Any], quirks: dict[str, Any], text: bool = True) -> dict[str, Any]:
    """The configuration with small numbers in place of large ones, then with the quirks, part by part."""
    small = {name: value for name, value in config.items() if name != "per_layer_config"}  # made again from the rest
    specials = iter(range(SPECIAL_FROM, VOCABULARY))
    heads = next((config[name] for name in HEAD_COUNTS if isinstance(config.get(name), int)), None)
    for name, value in config.items():
        if name == "per_layer_config":
            continue
        if isinstance(value, dict) and (name.endswith("_config") or "model_type" in value):
            small[name] = shrink(value, {}, text and not any(word in name for word in NOT_TEXT))
        elif name.endswith(("_token_id", "_token_index", "_token_ids")) or (
            name.endswith("_id") and isinstance(value, int)
        ):
            small[name] = _token(name, value, specials)
        elif isinstance(value, int) and not isinstance(value, bool):
            small[name] = _number(name, value, heads, text)
    layers = next((small[name] for name in LAYER_COUNTS if isinstance(small.get(name), int)), LAYERS)
    for name, value in small.items():
        if isinstance(value, list) and len(value) > layers and _per_layer(name, value, config):
            small[name] = _spread(value, layers)
    if "head_dim" in config and config["head_dim"] is None:
        small["head_dim"] = 16
    if small.get("head_dim") is not None and config["head_dim"] == config.get("qk_rope_head_dim", -1):
        small["head_dim"] = small["qk_rope_head_dim"]
    rope = small.get("rope_parameters") or small.get("rope_scaling")
    _fit_rope(rope, small)
    return merged(small, quirks)


def merged(config: dict[str, Any], quirks: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the quirks' values, inside its parts too."""
    inner = {
        name: merged(config[name], value)
        for name, value in quirks.items()
        if isinstance(value, dict) and config.get(name)
    }
    return {**config, **quirks, **inner}


def _token(name: str, value: Any, specials: Any) -> Any:
    if name == "pad_token_id":
        return 0
    if isinstance(value, int) and not isinstance(value, bool):
        return next(specials)
    return [next(specials) for _ in value] if isinstance(value, list) else value


def _number(name: str, value: int, heads: int | None, text: bool) -> int:
    if name in LAYER_COUNTS:
        return min(value, LAYERS if text else 2)
    if name in HEAD_COUNTS:
        return HEADS
    if name in KV_COUNTS:
        return HEADS if value == heads else 1 if value == 1 else 2
    return min(value, SMALL.get(name, value))


def _per_layer(name: str, value: list[Any], config: dict[str, Any]) -> bool:
    lengths = {config[count] for count in LAYER_COUNTS if isinstance(config.get(count), int)}
    return len(value) in lengths


def _spread(values: list[Any], number: int) -> list[Any]:
    """So many of the values that each kind is among them, in their order."""
    kinds = {repr(value): i for i, value in reversed(list(enumerate(values)))}
    chosen = sorted(kinds.values())[:number]
    others = [i for i in range(len(values)) if i not in chosen]
    chosen = sorted([*chosen, *others[: number - len(chosen)]])
    return [values[i] for i in chosen]


def _fit_rope(rope: Any, config: dict[str, Any]) -> None:
    """Sections and factors that count the halves of a head."""
    if not isinstance(rope, dict):
        return
    head = config.get("head_dim") or 16
    for name, value in list(rope.items()):
        if isinstance(value, dict):
            _fit_rope(value, config)
        elif name == "mrope_section" and isinstance(value, list):
            half = head // 2
            rope[name] = [half - 2 * (half // 3), half // 3, half // 3][: len(value)]
        elif name in ("short_factor", "long_factor"):
            rope[name] = [1.0] * (head // 2)
