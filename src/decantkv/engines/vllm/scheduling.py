"""Changes to vLLM's scheduler: prefix hits end before the compacted blocks, chunks end with the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from decantkv.engines.common.steps import end_of_chunk
from decantkv.engines.vllm import compat
from decantkv.engines.vllm.counters import CARRIER, ENGINE
from decantkv.engines.vllm.hooks import wrap


def follow(manager: type) -> None:
    """Make the scheduler's classes follow the plans of `manager`'s requests; other requests are scheduled as ever."""
    _cap_hits(manager)
    _split_chunks(manager)
    _count()


def evicting(cache: Any, manager: type) -> Any | None:
    """Return the evicting manager of a `KVCacheManager`, or None."""
    return next((one for one in cache.coordinator.single_type_managers if isinstance(one, manager)), None)


def _cap_hits(manager: type) -> None:
    """Cap prefix hits before a prompt's last blocks: those will be compacted, and the window's queries are needed."""

    def capping(lookup: Callable[..., Any]) -> Callable[..., Any]:
        def get_computed_blocks(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            ours = evicting(self, manager)
            made = None if ours is None else ours.plan(request.num_prompt_tokens)
            if made is None or not made.evicts:
                return lookup(self, request, *args, **kwargs)
            with _at_most(self.coordinator, made.dropped):
                return lookup(self, request, *args, **kwargs)

        return get_computed_blocks

    wrap(KVCacheManager, "get_computed_blocks", capping)


@contextmanager
def _at_most(coordinator: Any, tokens: int) -> Iterator[None]:
    """Return a context in which the coordinator finds hits of at most `tokens` tokens."""
    find = coordinator.find_longest_cache_hit

    def find_longest_cache_hit(block_hashes: Any, max_cache_hit_length: int, *args: Any, **kwargs: Any) -> Any:
        return find(block_hashes, min(max_cache_hit_length, tokens), *args, **kwargs)

    coordinator.find_longest_cache_hit = find_longest_cache_hit
    try:
        yield
    finally:
        del coordinator.find_longest_cache_hit


def _split_chunks(manager: type) -> None:
    def reserving(reserve: Callable[..., Any]) -> Callable[..., Any]:
        def reserve_prefill_lookahead(self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int) -> Any:
            allowed = _shortened(self, manager, request, num_computed_tokens, num_new_tokens)
            return reserve(self, request, num_computed_tokens, allowed)

        return reserve_prefill_lookahead

    def starting(start: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            start(self, *args, **kwargs)
            if evicting(self.kv_cache_manager, manager) is not None:
                self.need_mamba_block_aligned_split = True

        return init

    def aligning(align: Callable[..., Any]) -> Callable[..., Any]:
        def split(self: Any, request: Any, num_new_tokens: int, local: int = 0, external: int = 0) -> Any:
            if evicting(self.kv_cache_manager, manager) is None:
                return align(self, request, num_new_tokens, local, external)
            computed = request.num_computed_tokens + local + external
            return _shortened(self, manager, request, computed, num_new_tokens)

        return split

    if compat.seams(compat.installed()).split == "_reserve_prefill_lookahead":
        wrap(Scheduler, "_reserve_prefill_lookahead", reserving)
        return
    # in 0.26 the one place where every chunk may be shortened is meant for state-space layers, of which an evicting
    # model has none
    wrap(Scheduler, "__init__", starting)
    wrap(Scheduler, "_mamba_block_aligned_split", aligning)


def _shortened(scheduler: Any, manager: type, request: Any, computed: int, wanted: int) -> int:
    ours = evicting(scheduler.kv_cache_manager, manager)
    if ours is None:
        return wanted
    mode = scheduler.vllm_config.compilation_config.cudagraph_mode
    window, made = ours.kv_cache_spec.eviction.rows, ours.plan(request.num_prompt_tokens)
    graphs = mode is not None and mode.has_full_cudagraphs()
    return end_of_chunk(computed, wanted, made, window=window, graphs=graphs)


def _count() -> None:
    """Carry counters in a worker's output, then in the engine's statistics."""

    def updating(update: Callable[..., Any]) -> Callable[..., Any]:
        def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            ENGINE.add(**(getattr(model_runner_output, CARRIER, None) or {}))
            return update(self, scheduler_output, model_runner_output)

        return update_from_output

    def telling(make: Callable[..., Any]) -> Callable[..., Any]:
        def make_stats(self: Any, *args: Any, **kwargs: Any) -> Any:
            stats = make(self, *args, **kwargs)
            taken = None if stats is None else ENGINE.take()
            if taken is not None:
                stats.kv_connector_stats = {CARRIER: taken}  # free: no connector runs beside eviction
            return stats

        return make_stats

    wrap(Scheduler, "update_from_output", updating)
    wrap(Scheduler, "make_stats", telling)
