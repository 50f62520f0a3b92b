"""Counters of the workers, which travel in vLLM's own messages and are shown under /metrics."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

CARRIER = "decantkv"  # the attribute of a worker's output, and the key among an engine's statistics

HELP = {
    "prompts_evicted": "Prompts whose cache was evicted.",
    "tokens_kept": "Prompt tokens that each KV head kept, of evicted prompts.",
    "tokens_dropped": "Prompt tokens that each KV head dropped.",
    "blocks_freed": "Cache blocks given back to the pool right after their prompt was read.",
    "scoring_seconds": "Time that one worker took for scoring, selection and compaction.",
}


@dataclass
class Counters:
    """Sums since they were last taken; `HELP` says what each is."""

    prompts_evicted: int = 0
    tokens_kept: int = 0
    tokens_dropped: int = 0
    blocks_freed: int = 0
    scoring_seconds: float = 0.0

    def add(self, **numbers: float) -> None:
        """Add to the named sums."""
        for name, number in numbers.items():
            setattr(self, name, getattr(self, name) + number)

    def take(self) -> dict[str, float] | None:
        """Return the sums and set them to 0; None if all are 0."""
        taken = dataclasses.asdict(self)
        if not any(taken.values()):
            return None
        for field in dataclasses.fields(self):
            setattr(self, field.name, field.default)
        return taken


ENGINE = Counters()  # of the scheduler's process
WORKER = Counters()  # of a worker's process, on their way to the scheduler


class Clock:
    """Seconds on a device for `WORKER`, without making the host wait: CUDA events are read once they have passed."""

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def running(self, device: torch.device) -> Iterator[None]:
        """Count the seconds until the block ends."""
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            WORKER.add(scoring_seconds=time.perf_counter() - begin)
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._pending.append((first, last))
        self.collect()

    def collect(self) -> None:
        """Add the time spans that have ended by now."""
        while self._pending and self._pending[0][1].query():
            first, last = self._pending.popleft()
            WORKER.add(scoring_seconds=first.elapsed_time(last) / 1e3)


CLOCK = Clock()  # of a worker's process


class Shown:
    """The counters in vLLM's Prometheus registry, as `vllm:decantkv_*`."""

    def __init__(self, model_name: str, engines: list[int]) -> None:
        from prometheus_client import Counter

        self._counters: dict[int, dict[str, Any]] = {engine: {} for engine in engines}
        for name, text in HELP.items():
            counter = Counter(f"vllm:decantkv_{name}", text, labelnames=["model_name", "engine"])
            for engine in engines:
                self._counters[engine][name] = counter.labels(model_name, str(engine))

    def show(self, taken: Mapping[str, float], engine: int) -> None:
        """Add the sums that an engine sent."""
        for name, number in taken.items():
            self._counters[engine][name].inc(number)
