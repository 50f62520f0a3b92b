"""Common parts of the evicting Triton and FlashAttention backends: eviction through the block table."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport

from decantkv.engines.blocks import BlockSettings
from decantkv.engines.common.steps import Queries
from decantkv.engines.vllm.attention import EvictingBuilder, EvictingImpl
from decantkv.engines.vllm.eviction import Heads, evict_paged


class EvictingGPUBuilder(EvictingBuilder):
    """Tables keep their addresses, and graphs hold only steps of one token per row: no prompt ends inside a replay."""

    persistent = True
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE


class EvictingGPUImpl(EvictingImpl):
    """Both backends store [blocks, H, tokens, 2·D]: a token's key and value lie side by side."""

    head_size: int

    def evict(
        self,
        layer: Any,
        finished: list[tuple[Queries, Tensor]],
        kv_cache: Tensor,
        block_table: Tensor,
        settings: BlockSettings,
    ) -> None:
        """Evict all prompts that ended, by kernels that read and write through the table."""
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        evict_paged(finished, k_cache, v_cache, block_table, Heads.of(self), settings)
