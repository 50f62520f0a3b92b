"""Seconds spent on a device, measured without making the host wait."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Stage = Literal["scoring", "selection", "rehearsal", "compaction", "prefill"]
SPANS = 1024  # of a stage; beyond so many, finished ones are added up


class Stopwatch:
    """Seconds spent on a device, without making the host wait: CUDA events there, a clock elsewhere."""

    def __init__(self) -> None:
        self._spans: dict[str, list[float | tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextmanager
    def measure(self, stage: Stage, device: torch.device) -> Iterator[None]:
        """Add the time until the block ends to `stage`."""
        stop = self.start(stage, device)
        try:
            yield
        finally:
            stop()

    def start(self, stage: Stage, device: torch.device) -> _Stop:
        """Start a span of `stage`; calling the result ends it."""
        return _Stop(self._spans.setdefault(stage, []), device)

    def seconds(self, stage: Stage) -> float:
        """The sum over the stage's spans. On CUDA this waits for the last of them."""
        total = 0.0
        for span in self._spans.get(stage, ()):
            if isinstance(span, tuple):
                span[1].synchronize()
                total += span[0].elapsed_time(span[1]) / 1e3
            else:
                total += span
        return total


class _Stop:
    def __init__(self, spans: list[float | tuple[torch.cuda.Event, torch.cuda.Event]], device: torch.device) -> None:
        self._spans, self._device = spans, device
        if device.type == "cuda":
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record(torch.cuda.current_stream(device))
        else:
            self._clock = time.perf_counter()

    def __call__(self) -> None:
        if self._device.type == "cuda":
            end = torch.cuda.Event(enable_timing=True)
            end.record(torch.cuda.current_stream(self._device))
            self._spans.append((self._begin, end))
        else:
            self._spans.append(time.perf_counter() - self._clock)
        if len(self._spans) > SPANS:
            _add_up(self._spans)


def _add_up(spans: list[float | tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
    """Finished spans as one number, without waiting for the others."""
    open_, done = [], 0.0
    for span in spans:
        if not isinstance(span, tuple):
            done += span
        elif span[1].query():
            done += span[0].elapsed_time(span[1]) / 1e3
        else:
            open_.append(span)
    spans[:] = [done, *open_]
