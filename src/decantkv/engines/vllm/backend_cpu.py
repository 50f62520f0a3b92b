"""vLLM's CPU backend with eviction: keys and values are gathered through the block table, then written back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from decantkv.engines.blocks import BlockSettings
from decantkv.engines.common.steps import Queries
from decantkv.engines.vllm.attention import EvictingBuilder, EvictingImpl
from decantkv.engines.vllm.eviction import Heads, choose


class DropKVCPUBuilder(EvictingBuilder, CPUAttentionMetadataBuilder):
    """Metadata over shifted tables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.eviction is not None and self.isa != "vec":
            raise ValueError(
                f"attention: expected a cache in the CPU's plain vector layout (head sizes that 32 divides), got "
                f"{self.isa!r}"
            )


class DropKVCPUImpl(EvictingImpl, CPUAttentionBackendImpl):
    """The backend's attention, followed by eviction of the prompts that ended."""

    def evict(
        self,
        layer: Any,
        finished: list[tuple[Queries, Tensor]],
        kv_cache: Tensor,
        block_table: Tensor,
        settings: BlockSettings,
    ) -> None:
        """Gather and evict one prompt after the other."""
        number, heads, size, _ = kv_cache.shape
        k_cache, v_cache = kv_cache.view(number, heads, size * 2, -1).chunk(2, dim=2)
        width = self.head_size
        for run, queries in finished:
            made = run.plan
            blocks = block_table[run.row, : -(-made.prompt_len // size)].long()
            # a key block lies transposed, [D, tokens]; a value block [tokens, D]
            k = k_cache[blocks].reshape(len(blocks), heads, width, size).permute(1, 0, 3, 2).reshape(heads, -1, width)
            v = v_cache[blocks].permute(1, 0, 2, 3).reshape(heads, -1, width)
            k, v = k[:, : made.prompt_len], v[:, : made.prompt_len]
            slots = choose(Heads.of(self).window(queries, k, v), settings, made)[..., None].expand(-1, -1, width)
            places = blocks[made.first_block : made.tail_block, None] * size + torch.arange(size, device=blocks.device)
            ops.cpu_attn_reshape_and_cache(
                k.gather(1, slots).transpose(0, 1).contiguous(),
                v.gather(1, slots).transpose(0, 1).contiguous(),
                k_cache,
                v_cache,
                places.flatten(),
                layer.isa,
                k_scale=layer._k_scale_float,
                v_scale=layer._v_scale_float,
                kv_cache_dtype=self.kv_cache_dtype,
            )


class DropKVCPUBackend(CPUAttentionBackend):
    """The backend that replaces CPU_ATTN while a worker evicts."""

    evicts = True

    @staticmethod
    def get_impl_cls() -> type[DropKVCPUImpl]:
        """The implementation."""
        return DropKVCPUImpl

    @staticmethod
    def get_builder_cls() -> type[DropKVCPUBuilder]:
        """The builder."""
        return DropKVCPUBuilder
