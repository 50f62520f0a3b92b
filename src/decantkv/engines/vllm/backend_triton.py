"""vLLM's Triton backend with eviction."""

from __future__ import annotations

from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from decantkv.engines.vllm.backend_gpu import EvictingGPUBuilder, EvictingGPUImpl


class DropKVTritonBuilder(EvictingGPUBuilder, TritonAttentionMetadataBuilder):
    """Metadata over shifted tables."""


class DropKVTritonImpl(EvictingGPUImpl, TritonAttentionImpl):
    """The backend's attention, followed by eviction of the prompts that ended."""


class DropKVTritonBackend(TritonAttentionBackend):
    """The backend that replaces TRITON_ATTN while a worker evicts."""

    evicts = True

    @staticmethod
    def get_impl_cls() -> type[DropKVTritonImpl]:
        """The implementation."""
        return DropKVTritonImpl

    @staticmethod
    def get_builder_cls() -> type[DropKVTritonBuilder]:
        """The builder."""
        return DropKVTritonBuilder

    @staticmethod
    def use_cascade_attention(*args: object, **kwargs: object) -> bool:
        """Never: requests that share a prefix no longer share what they keep of it."""
        return False
