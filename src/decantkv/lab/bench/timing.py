"""Two times for the same call: on the GPU alone, by graph replay, and on the wall, launches included."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

FLUSH_BYTES = 256 * 2**20  # several times any L2


class Quantiles(NamedTuple):
    """Microseconds."""

    p20: float
    p50: float
    p80: float


def quantiles(times_us: list[float]) -> Quantiles:
    """p20, p50, p80 of a sample."""
    if len(times_us) == 1:
        return Quantiles(times_us[0], times_us[0], times_us[0])
    cuts = statistics.quantiles(times_us, n=10, method="inclusive")
    return Quantiles(cuts[1], cuts[4], cuts[7])


def gpu_time(call: Callable[[], object], *, repeats: int = 50, graph: bool = True) -> Quantiles:
    """GPU time of a call: captured once and replayed, the L2 flushed before every replay.

    Args:
        graph: False times plain launches between events, for calls that cannot be captured.
    """
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    run: Callable[[], object] = call
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            kept = call()  # noqa: F841 - the replay writes into what the call returned
        run = captured.replay
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.max()  # by reading: dirty lines would be written back inside the timed region
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return quantiles(times)


def kernel_times(call: Callable[[], object], *, repeats: int = 5) -> dict[str, float]:
    """Microseconds of each Triton kernel of a call, launched one by one with the L2 flushed before."""
    flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            flush.max()
            call()
        torch.cuda.synchronize()
    found = {event.key: event.device_time_total / repeats for event in profiler.key_averages()}
    return {name: spent for name, spent in found.items() if name.endswith("_kernel")}


def wall_time(call: Callable[[], object], *, repeats: int = 50) -> Quantiles:
    """Wall time of a plain call from an idle GPU until its result is there, launches included."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - begin))
    return quantiles(times)


def scratch_bytes(call: Callable[[], object]) -> int:
    """The most a call allocates beyond what it returns."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak - kept
