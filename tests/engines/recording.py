"""What evictions inside an engine saw and what they left behind, noted by looking on before and after each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decantkv.engines.common.paged import gather_paged


@contextmanager
def recording() -> Iterator[list[dict[str, Any]]]:
    """While open, a dict for each prompt and layer that an engine of this process evicts, in order, on the CPU.

    request (its number among the prompts), layer, prompt_len, first_block, tail_block, block_size; q [w, HQ, D] as the
    plug-in took it; k and v [H, N, D] of the whole prompt before and k_after, v_after [H, N, D] of the same slots
    after; changed: slots of other blocks that are not what they were.
    """
    noted: list[dict[str, Any]] = []
    kind = implementation()
    evict = kind.evict

    def watched(self: Any, layer: Any, finished: Any, kv_cache: Tensor, block_table: Tensor, settings: Any) -> None:
        tables = [block_table[run.row].clone() for run, _ in finished]
        lengths = [run.plan.prompt_len for run, _ in finished]
        caches = by_slots(self, kv_cache)
        before = [[gather_paged(c, t, n).cpu() for c in caches] for t, n in zip(tables, lengths, strict=True)]
        whole = [c.clone() for c in caches]
        evict(self, layer, finished, kv_cache, block_table, settings)
        caches = by_slots(self, kv_cache)
        for (run, _), table in zip(finished, tables, strict=True):
            written = table[run.plan.first_block : run.plan.tail_block].long()
            for old, new in zip(whole, caches, strict=True):
                old[written] = new[written]
        changed = sum(int(differ(old, new).any(-1).sum()) for old, new in zip(whole, caches, strict=True))
        for i, (run, queries) in enumerate(finished):
            k_after, v_after = (gather_paged(c, tables[i], lengths[i]).cpu() for c in caches)
            (number,) = re.findall(r"layers\.(\d+)\.", layer.layer_name)
            noted.append(
                {
                    "request": int(run.request_id.split("-")[0]),  # vLLM appends a random word
                    "layer": int(number),
                    "prompt_len": run.plan.prompt_len,
                    "first_block": run.plan.first_block,
                    "tail_block": run.plan.tail_block,
                    "block_size": run.plan.block_size,
                    "q": queries.cpu().clone(),
                    "k": before[i][0],
                    "v": before[i][1],
                    "k_after": k_after,
                    "v_after": v_after,
                    "changed": changed,
                }
            )

    kind.evict = watched
    try:
        yield noted
    finally:
        kind.evict = evict


def differ(old: Tensor, new: Tensor) -> Tensor:
    """Where two caches are not the same; blocks that nobody wrote may hold anything."""
    return (old != new) & ~(old.isnan() & new.isnan())


def implementation() -> Any:
    """The class whose `evict` this machine's backends use."""
    if torch.cuda.is_available():
        from decantkv.engines.vllm.backend_gpu import EvictingGPUImpl

        return EvictingGPUImpl
    from decantkv.engines.vllm.backend_cpu import DropKVCPUImpl

    return DropKVCPUImpl


def by_slots(impl: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [blocks, block_size, H, D] of a layer's cache; a view on a GPU, a copy on a CPU."""
    if kv_cache.device.type == "cuda":
        k, v = kv_cache.transpose(1, 2).split(impl.head_size, dim=-1)
        return k, v
    number, heads, size, _ = kv_cache.shape
    k, v = kv_cache.view(number, heads, size * 2, -1).chunk(2, dim=2)
    k = k.reshape(number, heads, impl.head_size, size).permute(0, 3, 1, 2)  # a key block lies transposed
    return k, v.reshape(number, heads, size, impl.head_size).permute(0, 2, 1, 3)
