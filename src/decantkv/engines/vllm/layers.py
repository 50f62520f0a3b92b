"""Cache specifications with eviction for a worker's attention layers."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec

from decantkv.engines.common.asked import Asked
from decantkv.engines.vllm.compat import BACKENDS
from decantkv.engines.vllm.refusals import budget_below_a_block
from decantkv.engines.vllm.spec import DropKVSpec


def evicting_specs(specs: dict[str, Any], asked: Asked, config: Any) -> dict[str, Any]:
    """Return the specifications of the same layers, with eviction.

    Args:
        specs: specifications of a worker's layers, by name.
        config: vLLM's `VllmConfig`, which holds the layers.

    Raises:
        ValueError: a layer cannot evict. All other processes already evict, so vLLM stops.
    """
    layers = config.compilation_config.static_forward_context
    for name, spec in specs.items():
        if type(spec) is not FullAttentionSpec or spec.sliding_window is not None or spec.attention_chunk_size:
            raise ValueError(f"layer {name}: expected full attention, got {type(spec).__name__}")
        backend = layers[name].get_attn_backend()
        if not getattr(backend, "evicts", False):
            raise ValueError(
                f"layer {name}: expected a backend that decantkv replaces, got {backend.get_name()}; choose "
                f"--attention-backend {' or '.join(BACKENDS[config.device_config.device_type])}"
            )
        impl = layers[name].impl
        if getattr(impl, "alibi_slopes", None) is not None:
            raise ValueError(f"layer {name}: expected rotary positions or none, got ALiBi")
        if getattr(impl, "kv_sharing_target_layer_name", None):
            raise ValueError(f"layer {name}: expected a cache of its own, got one shared with another layer")
        if sentence := budget_below_a_block(asked, config.model_config.max_model_len, spec.block_size):
            raise ValueError(sentence)
    return {name: DropKVSpec.of(spec, asked.in_blocks(spec.block_size)) for name, spec in specs.items()}
