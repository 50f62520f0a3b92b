"""vLLM's FlashAttention backend with eviction."""

from __future__ import annotations

from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from decantkv.engines.vllm.backend_gpu import EvictingGPUBuilder, EvictingGPUImpl


class DropKVFlashBuilder(EvictingGPUBuilder, FlashAttentionMetadataBuilder):
    """Metadata over shifted tables."""


class DropKVFlashImpl(EvictingGPUImpl, FlashAttentionImpl):
    """The backend's attention, followed by eviction of the prompts that ended."""


class DropKVFlashBackend(FlashAttentionBackend):
    """The backend that replaces FLASH_ATTN while a worker evicts."""

    evicts = True

    @staticmethod
    def get_impl_cls() -> type[DropKVFlashImpl]:
        """The implementation."""
        return DropKVFlashImpl

    @staticmethod
    def get_builder_cls() -> type[DropKVFlashBuilder]:
        """The builder."""
        return DropKVFlashBuilder

    @staticmethod
    def use_cascade_attention(*args: object, **kwargs: object) -> bool:
        """Never: requests that share a prefix no longer share what they keep of it."""
        return False
