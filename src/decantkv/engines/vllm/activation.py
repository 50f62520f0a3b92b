"""Switch the plug-in on: one process reads the options and decides, and every worker follows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from decantkv.engines.common.asked import KEY, REFUSED, Asked, read
from decantkv.engines.vllm import compat
from decantkv.engines.vllm.compat import BACKENDS
from decantkv.engines.vllm.counters import CARRIER, CLOCK, WORKER, Shown
from decantkv.engines.vllm.hooks import wrap

logger = logging.getLogger("vllm.decantkv")


def install() -> None:
    """Watch for options; vLLM is unchanged until a configuration switches eviction on."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.worker.worker_base import WorkerBase

    def deciding(create: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
            config = create(self, *args, **kwargs)
            decide(config)
            return config

        return create_engine_config

    def activating(start: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            start(self, vllm_config, *args, **kwargs)
            activate(self, vllm_config)

        return init

    wrap(EngineArgs, "create_engine_config", deciding)
    wrap(WorkerBase, "__init__", activating)


def decide(config: Any) -> None:
    """Write into a new configuration whether it evicts, so that every process that receives it does the same.

    Raises:
        ValueError, TypeError: eviction is refused and `strict` is set.
    """
    from decantkv.engines.vllm.refusals import check

    raw: object = None
    try:
        raw = read(config.additional_config)
        if raw is None:
            return
        asked = Asked.parse(raw)
        check(config, asked, compat.installed())
        overrides(config)
    except (ValueError, TypeError) as error:
        if isinstance(raw, dict) and raw.get("strict") is True:
            raise
        logger.error("decantkv stays off and vLLM serves as it would without: %s", error)
        _note(config, REFUSED)
        return
    _note(config, dict(asked.raw))
    show_counters()
    logger.info("decantkv evicts prompts by %s, budget %s", asked.settings.method.describe(), asked.raw["budget"])


def _note(config: Any, value: object) -> None:
    if not isinstance(config.additional_config, dict):
        kind = type(config.additional_config).__name__
        raise TypeError(f"additional_config: expected a mapping that can hold {KEY!r}, got {kind}")
    config.additional_config = {**config.additional_config, KEY: value}


def noted(config: Any) -> object:
    """Return the options decided for a configuration, or None if it does not evict."""
    raw = config.additional_config.get(KEY) if isinstance(config.additional_config, dict) else None
    return None if raw == REFUSED else raw


def overrides(config: Any) -> dict[Any, str]:
    """Return the backends that are replaced on this platform, by their names in vLLM's registry.

    Raises:
        ValueError: there is no evicting backend for the platform, or another plug-in has replaced one of them.
    """
    from vllm.v1.attention.backends import registry

    kind = getattr(config.device_config, "device_type", None)
    if kind not in BACKENDS:
        raise ValueError(f"device: expected {' or '.join(BACKENDS)}, got {kind}")
    ours = {registry.AttentionBackendEnum[name]: path for name, path in BACKENDS[kind].items()}
    for backend, path in ours.items():
        holder = registry._ATTN_OVERRIDES.get(backend, path)
        if holder != path:
            raise ValueError(f"attention backend {backend.name}: expected vLLM's own, got {holder} of another plug-in")
    return ours


def activate(worker: Any, config: Any) -> None:
    """Make a worker evict if its configuration says so, and leave it alone otherwise."""
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends import registry

    raw = noted(config)
    if raw is None:
        if _give_back(registry):
            selector._cached_get_attn_backend.cache_clear()
        return
    from decantkv.engines.vllm import batch, layers

    asked = Asked.parse(raw)
    for backend, path in overrides(config).items():
        registry.register_backend(backend, path)
    selector._cached_get_attn_backend.cache_clear()
    carry_counters()

    describe, prepare = worker.get_kv_cache_spec, worker.init_device

    def get_kv_cache_spec() -> Any:
        return layers.evicting_specs(describe(), asked, config)

    def init_device(*args: Any, **kwargs: Any) -> Any:
        out = prepare(*args, **kwargs)
        batch.watch(worker.model_runner)
        return out

    worker.get_kv_cache_spec, worker.init_device = get_kv_cache_spec, init_device


def _give_back(registry: Any) -> bool:
    """Undo the overrides of an earlier, evicting engine of this process; return whether there were any."""
    ours = {registry.AttentionBackendEnum[name]: path for names in BACKENDS.values() for name, path in names.items()}
    held = [backend for backend, path in ours.items() if registry._ATTN_OVERRIDES.get(backend) == path]
    for backend in held:
        del registry._ATTN_OVERRIDES[backend]
    return bool(held)


def carry_counters() -> None:
    """Send a worker's counters out of its process with the next step's output."""
    from vllm.v1.outputs import ModelRunnerOutput

    def carrying(make: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            CLOCK.collect()
            taken = WORKER.take()
            if taken is not None:
                setattr(self, CARRIER, taken)

        return init

    wrap(ModelRunnerOutput, "__init__", carrying)


def show_counters() -> None:
    """Add the engines' counters to the registry behind /metrics of this process."""
    from vllm.v1.metrics.loggers import StatLoggerManager

    def starting(start: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            start(self, vllm_config, *args, **kwargs)
            name = vllm_config.model_config.served_model_name
            self._decantkv = None if noted(vllm_config) is None else Shown(name, self.engine_indexes)

        return init

    def recording(record: Callable[..., Any]) -> Callable[..., Any]:
        def record_stats(self: Any, scheduler_stats: Any, *args: Any, **kwargs: Any) -> Any:
            carried = getattr(scheduler_stats, "kv_connector_stats", None)
            if carried and CARRIER in carried:
                scheduler_stats.kv_connector_stats = None  # loggers would take it for a connector's
                if self._decantkv is not None:
                    self._decantkv.show(carried[CARRIER], kwargs.get("engine_idx") or 0)
            return record(self, scheduler_stats, *args, **kwargs)

        return record_stats

    wrap(StatLoggerManager, "__init__", starting)
    wrap(StatLoggerManager, "record", recording)
