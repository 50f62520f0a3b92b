"""Generation end to end with random weights: time a token, what fits beside it, and prompts under a cap."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from decantkv.bench.prefill import MODELS, random_model
from decantkv.bench.rows import Row, circumstances
from decantkv.cache import EvictingCache, cache_argument
from decantkv.integration import Run, attach

CONTENDERS = ("dynamic", "static compiled", "ours", "ours eager")
WARM = 8  # tokens that are not timed: compiling, recording and checking graphs


def build(geometry: str) -> PreTrainedModel:
    """A model of that shape with random bf16 weights on the GPU.

    Raises:
        ValueError: an unknown geometry.
    """
    if geometry not in MODELS:
        raise ValueError(f"geometry: expected one of {', '.join(MODELS)}, got {geometry!r}")
    make, config = MODELS[geometry]
    return random_model(make, config())


def prompts(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """[batch, length] random token ids."""
    return torch.randint(1, model.config.vocab_size, (batch, length), device=model.device)


class _Clock:
    """Notes when each token is known; `generate` asks it after every one whether to stop."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        wait(input_ids.device)
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def clocked(model: PreTrainedModel, ids: Tensor, new: int, **options: Any) -> tuple[float, list[float]]:
    """(seconds to the first token, seconds of each later one) of one greedy generation."""
    clock = _Clock()
    wait(ids.device)
    start = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, stopping_criteria=[clock],
        pad_token_id=0, eos_token_id=None, **options,
    )  # fmt: skip
    return clock.times[0] - start, [b - a for a, b in zip(clock.times, clock.times[1:], strict=False)]


def wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def contender(
    model: PreTrainedModel, name: str, budget: float | int, **options: Any
) -> tuple[AbstractContextManager[Any], dict[str, Any]]:
    """A context to generate in, and what `generate` is told.

    Raises:
        ValueError: an unknown name.
    """
    if name == "dynamic":
        return nullcontext(), {}
    if name == "static compiled":
        return nullcontext(), {"cache_implementation": "static"}
    if name not in CONTENDERS:
        raise ValueError(f"contenders: expected some of {', '.join(CONTENDERS)}, got {name!r}")
    run = ours(model, budget, **options)
    if name == "ours eager":
        run.trust.broken = "measured without"
    return run, {}


def ours(model: PreTrainedModel, budget: float | int, *, method: str = "dropkv", **options: Any) -> Run:
    """Eviction with attention of our own and graphs, which is what these tables are about."""
    return attach(model, method, budget=budget, **{"decode": "own", **options})


def decode(
    model: PreTrainedModel, *, batch: int, kept: int, names: Sequence[str] = CONTENDERS, new: int = 64
) -> Iterator[Row]:
    """Milliseconds a token with `kept` tokens a head stored, as a user of `generate` sees them.

    The prompt is as long as what is kept, and all of it is kept: a decoding step does not know what was dropped.
    """
    ids = prompts(model, batch, kept)
    for name in names:
        base = {"step": "decode", "contender": name, "batch": batch, "kept": kept, "new": new}
        context, options = contender(model, name, 1.0)
        with context as run:
            made = attempt(functools.partial(clocked, model, ids, new, **options))
        if made is None:
            yield {**base, "left_out": "memory"}
            continue
        row = {**base, "ms_a_token": quantiles(made[1][WARM:]), "warm_seconds": round(sum(made[1][:WARM]), 3)}
        if isinstance(run, Run):
            row |= {"graphed": run.trust.replayed, "checked": run.trust.checked, "without_graph": run.trust.broken}
        yield row


def bounded(
    model: PreTrainedModel, *, length: int, settings: Sequence[dict[str, Any] | None], budget: float | int
) -> Iterator[Row]:
    """Seconds to the first token and peak bytes beyond the weights; None among the settings is the dynamic cache."""
    ids = prompts(model, 1, length)
    for options in settings:
        base = {"step": "prefill", "kv_len": length, "budget": budget, "bounds": options}
        context: AbstractContextManager[Any] = nullcontext() if options is None else ours(model, budget, **options)
        collect(model.device)
        held = allocated(model.device)
        with context as run:
            made = attempt(lambda: clocked(model, ids, 2))
        if made is None:
            yield {**base, "left_out": "memory"}
            continue
        row = {**base, "first_token_s": round(made[0], 3), "peak_bytes": peak(model.device) - held}
        yield row if run is None else {**row, "rounds": run.report().rounds}


def throughput(
    model: PreTrainedModel, *, length: int, budget: float, batches: Sequence[int], new: int = 32, impl: Any = "auto"
) -> Iterator[Row]:
    """Tokens a second by batch, full cache and kept, until each runs out of memory.

    One prompt is read and its cache repeated for every row: a step's time and memory do not depend on the content,
    and reading prompts does not limit the batch.
    """
    ids, name = prompts(model, 1, length), cache_argument(model)
    for kind in ("dynamic", "ours"):
        context, _ = contender(model, kind, budget, impl=impl) if kind == "ours" else (nullcontext(), {})
        with context as run:
            for batch in batches:
                base = {"step": "throughput", "contender": kind, "kv_len": length, "budget": budget, "batch": batch}

                def once(batch: int = batch, run: Run | None = run) -> tuple[list[float], int]:
                    cache = DynamicCache(config=model.config) if run is None else run.new_cache()
                    with torch.no_grad():
                        model(ids, **{name: cache}, logits_to_keep=1)
                    cache.batch_repeat_interleave(batch)
                    held = allocated(model.device)
                    rows = torch.cat([ids, ids[:, :1]], 1).expand(batch, -1)
                    return clocked(model, rows, new, **{name: cache})[1], held

                made = attempt(once)
                if made is None:
                    yield {**base, "left_out": "memory"}
                    break
                step = statistics.median(made[0][WARM:])
                yield {**base, "ms_a_token": quantiles(made[0][WARM:]), "tokens_a_second": round(batch / step, 1),
                       "allocated_bytes": made[1]}  # fmt: skip


def latency(
    model: PreTrainedModel, *, length: int, batches: Sequence[int], methods: Sequence[str], budget: float, new: int
) -> Iterator[Row]:
    """Seconds to the first token and of a whole generation for each method and batch, until memory ends."""
    for method in ("none", *methods):
        for batch in batches:
            base = {"step": "latency", "method": method, "kv_len": length, "batch": batch, "new": new}
            context: AbstractContextManager[Any] = (
                nullcontext() if method == "none" else ours(model, budget, method=method)
            )
            collect(model.device)
            with context:
                made = attempt(functools.partial(_fresh, model, batch, length, new))
            if made is None:
                yield {**base, "left_out": "memory"}
                break
            yield {**base, "budget": budget, "first_token_s": round(made[0], 3),
                   "whole_s": round(made[0] + sum(made[1]), 3), "peak_bytes": peak(model.device)}  # fmt: skip


def _fresh(model: PreTrainedModel, batch: int, length: int, new: int) -> tuple[float, list[float]]:
    return clocked(model, prompts(model, batch, length), new)


def attempt(work: Callable[[], Any]) -> Any:
    """What the work returns; None where the device's memory did not suffice."""
    try:
        return work()
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        collect(torch.device("cuda" if torch.cuda.is_available() else "cpu"), reset=False)


def collect(device: torch.device, *, reset: bool = True) -> None:
    """Give unused memory back and start counting its peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if reset:
            torch.cuda.reset_peak_memory_stats(device)


def allocated(device: torch.device) -> int:
    """Bytes in use; 0 where nobody counts them."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    """The most bytes in use since `collect`; 0 where nobody counts them."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 9
    return {f"p{p}": round(1e3 * cuts[p // 10 - 1], 3) for p in (20, 50, 80)}


def with_circumstances(geometry: str, rows: Iterator[Row]) -> Iterator[Row]:
    """Rows with their geometry and where they were measured; the cache class says which code ran."""
    where = circumstances()
    for row in rows:
        yield {**where, "geometry": geometry, "cache": EvictingCache.__name__, **row}
