"""The cache specification of an evicting layer, and the manager that frees and publishes a request's blocks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from decantkv.engines.blocks import BlockSettings
from decantkv.engines.common.plan import Plan, Plans
from decantkv.engines.vllm import scheduling
from decantkv.engines.vllm.counters import ENGINE


@dataclass(frozen=True, kw_only=True)
class DropKVSpec(FullAttentionSpec):
    """A full-attention layer whose prompts are evicted.

    Attributes:
        eviction: the settings; they travel from the workers to the scheduler with the specification.
    """

    eviction: BlockSettings | None = None

    @classmethod
    def of(cls, spec: FullAttentionSpec, eviction: BlockSettings) -> Self:
        """Return the layer's own specification, with eviction."""
        own = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
        return cls(**own, eviction=eviction)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """Return one specification for layers that share a block table.

        Raises:
            ValueError: layers that evict differently.
        """
        if len({spec.eviction for spec in specs}) > 1:
            raise ValueError("decantkv: expected layers that evict alike to share blocks, got different settings")
        merged: Self = replace(super().merge(specs), eviction=specs[0].eviction)
        return merged


class DropKVManager(FullAttentionManager):
    """Frees a prompt's head blocks after it was read; publishes no block that was compacted or computed from one."""

    def __init__(self, kv_cache_spec: DropKVSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        if kv_cache_spec.eviction is None:
            raise TypeError("kv_cache_spec: expected one that says how to evict, got none")
        self._plans = Plans(kv_cache_spec.eviction)
        self._freed: dict[str, int] = {}  # prompt tokens of the requests whose head blocks are gone

    def plan(self, prompt_len: int) -> Plan:
        """Return the layout of a prompt's blocks."""
        return self._plans[prompt_len]

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks before the compacted ones, once the step that compacted them has been processed."""
        if num_prompt_tokens is None or processed_computed_tokens < num_prompt_tokens:
            return
        made = self.plan(num_prompt_tokens)
        if not made.evicts or self._freed.get(request_id) == num_prompt_tokens:
            return
        if request_id in self._freed:
            raise RuntimeError(
                f"request {request_id}: expected a prompt that stays as it is, got {num_prompt_tokens} tokens after "
                f"{self._freed[request_id]} were evicted; decantkv does not serve sessions that go on"
            )
        before = self.block_pool.get_num_free_blocks()
        self._remove_blocks_in_range(request_id, 0, made.first_block)
        self._freed[request_id] = num_prompt_tokens
        # a block that another request shares stays in use, and is not counted
        freed = self.block_pool.get_num_free_blocks() - before
        ENGINE.add(prompts_evicted=1, tokens_kept=made.kept, tokens_dropped=made.dropped, blocks_freed=freed)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Publish whole blocks; if the prompt is evicted, only those of its head."""
        made = self.plan(request.num_prompt_tokens)
        if made.evicts:
            num_tokens = min(num_tokens, made.dropped)
        super().cache_blocks(request, num_tokens, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> Any:
        """Return a request's blocks: it is over, or starts again from its prompt."""
        self._freed.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)


def _register() -> None:
    # the registry fills itself with vLLM's own specifications only while it is empty
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(DropKVSpec, DropKVManager, uniform_type_base_spec=FullAttentionSpec)
    scheduling.follow(DropKVManager)


_register()
