"""Seconds spent on a device, measured without making the host wait."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
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
        begin = _now(device)
        try:
            yield
        finally:
            self._add(stage, device, begin)

    def start(self, stage: Stage, device: torch.device) -> Callable[[], None]:
        """Start a span of `stage`; calling the result ends it."""
        return functools.partial(self._add, stage, device, _now(device))

    def _add(self, stage: Stage, device: torch.device, begin: float | torch.cuda.Event) -> None:
        """Add a span that began then and ends now."""
        spans, end = self._spans.setdefault(stage, []), _now(device)
        spans.append(end - begin if isinstance(begin, float) and isinstance(end, float) else (begin, end))  # type: ignore[arg-type]  # both events
        if len(spans) > SPANS:
            _add_up(spans)

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


def _now(device: torch.device) -> float | torch.cuda.Event:
    """Return the time: seconds of the host's clock, or on CUDA an event of the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


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
