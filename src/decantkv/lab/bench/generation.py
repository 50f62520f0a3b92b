"""Generation end to end with random weights: time a token, what fits beside it, and prompts under a cap."""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, StaticCache

from decantkv.attachment import Run, attach
from decantkv.base.options import Impl
from decantkv.cache.evicting_cache import EvictingCache, cache_argument
from decantkv.lab.bench.cases import Case, collect
from decantkv.lab.bench.prefill import MODELS, random_model
from decantkv.lab.bench.rows import Row
from decantkv.methods import METHODS

CONTENDERS = ("dynamic", "static compiled", "ours", "ours eager")
WARM = 8  # tokens that are not timed: compiling, recording and checking graphs

Model = Callable[[], PreTrainedModel]  # built when the first case needs it


def build(geometry: str, device: str = "cuda") -> PreTrainedModel:
    """A model of that shape with random bf16 weights.

    Raises:
        ValueError: an unknown geometry.
    """
    if geometry not in MODELS:
        raise ValueError(f"geometry: expected one of {', '.join(MODELS)}, got {geometry!r}")
    make, config = MODELS[geometry]
    return random_model(make, config(), device)


def prompts(model: PreTrainedModel, batch: int, length: int) -> Tensor:
    """[batch, length] random token ids."""
    return torch.randint(1, model.config.vocab_size, (batch, length), device=model.device)


class _Clock:
    """Notes when each token is known, and says so; `generate` asks it after every one whether to stop."""

    def __init__(self, each: Callable[[int], None]) -> None:
        self.times: list[float] = []
        self.each = each

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        wait(input_ids.device)
        self.times.append(time.perf_counter())
        self.each(len(self.times))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def clocked(
    model: PreTrainedModel, ids: Tensor, new: int, *, each: Callable[[int], None] = lambda written: None, **options: Any
) -> tuple[float, list[float]]:
    """(seconds to the first token, seconds of each later one) of one greedy generation.

    Args:
        each: told how many tokens there are, after each; its own time counts for the next.
        options: `generate`'s.
    """
    clock = _Clock(each)
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


@contextmanager
def compiled_anew(model: PreTrainedModel) -> Iterator[None]:
    """`generate` compiles for this case alone: earlier shapes would make it a dynamic or an uncompiled one."""
    _forget_compiled(model)
    try:
        yield
    finally:
        _forget_compiled(model)


def _forget_compiled(model: PreTrainedModel) -> None:
    if vars(model).pop("_compiled_call", None) is not None:  # elsewhere than on GPUs generate compiles nothing
        torch._dynamo.reset()


def contender(
    model: PreTrainedModel, name: str, budget: float | int, **options: Any
) -> tuple[AbstractContextManager[Any], dict[str, Any]]:
    """Return a context to generate in, and the options for `generate`.

    Raises:
        ValueError: an unknown name.
    """
    if name == "dynamic":
        return nullcontext(), {}
    if name == "static compiled":  # compiled by generate itself, on CUDA
        return compiled_anew(model), {"cache_implementation": "static"}
    if name not in CONTENDERS:
        raise ValueError(f"contenders: expected some of {', '.join(CONTENDERS)}, got {name!r}")
    run = ours(model, budget, **options)
    if name == "ours eager":
        run.trust.broken = "measured without"
    return run, {}


def ours(model: PreTrainedModel, budget: float | int, *, method: str = "dropkv", **options: Any) -> Run:
    """Eviction with attention of our own and graphs, which is what these tables are about."""
    return attach(model, method, budget=budget, **{"decode": "own", **options})


def how(model: PreTrainedModel, run: Any) -> Row:
    """Return how steps ran: compiled by transformers, or replayed from a CUDA graph."""
    if not isinstance(run, Run):
        return {"compiled": "_compiled_call" in vars(model)}
    report = run.report()
    return {"graphed": report.graphed, "checked": run.trust.checked, "without_graph": report.without_graph}


def decode(
    model: Model, *, batches: Sequence[int], kept: int, names: Sequence[str] = CONTENDERS, new: int = 64
) -> Iterator[Case]:
    """Measure milliseconds per token with `kept` tokens per head stored, as a user of `generate` sees them.

    The prompt is as long as what is kept, and all of it is kept: a decoding step does not know what was dropped.
    """

    def measure(name: str, batch: int) -> Row:
        context, options = contender(model(), name, 1.0)
        with context as run:
            _, steps = clocked(model(), prompts(model(), batch, kept), new, **options)
            made = how(model(), run)
        return {"ms_a_token": quantiles(steps[WARM:]), "warm_seconds": round(sum(steps[:WARM]), 3), **made}

    for name in names:
        for batch in batches:
            about = {"step": "decode", "contender": name, "kept": kept, "new": new, "batch": batch}
            yield Case(about, functools.partial(measure, name, batch))


def bounded(
    model: Model, *, lengths: Sequence[int], settings: Sequence[dict[str, Any] | None], budget: float | int
) -> Iterator[Case]:
    """Seconds to the first token and peak bytes beyond the weights; None among the settings is the dynamic cache.

    cuDNN plans every new shape of chunk for about 0.1 s, once a process: that is not timed.
    """

    def measure(length: int, options: dict[str, Any] | None) -> Row:
        llama = model()

        def context() -> AbstractContextManager[Any]:
            return nullcontext() if options is None else ours(llama, budget, **options)

        with context(), first_layer_alone(llama):
            clocked(llama, prompts(llama, 1, length), 1)
        with context() as run:
            collect(llama.device)
            held = allocated(llama.device)
            first, _ = clocked(llama, prompts(llama, 1, length), 2)
        row = {"first_token_s": round(first, 3), "peak_bytes": peak(llama.device) - held}
        return row if run is None else {**row, "rounds": run.report().rounds}

    for length in lengths:
        for options in settings:
            about = {"step": "prefill", "kv_len": length, "budget": budget, "bounds": options}
            yield Case(about, functools.partial(measure, length, options))


@torch.no_grad()
def warm(model: PreTrainedModel, ids: Tensor, *, others: int = 0) -> None:
    """Compile what these shapes need by a forward through the first layer alone, where the model has a list of them.

    Args:
        others: tokens of each row that every other layer will store. Their room is taken meanwhile, as it will be when
            the last layer runs, and that of the embedded prompt, which outlives the first layer: a batch that does not
            fit fails here, and not after most of its prompt.
    """
    sizes = [ids.shape[0] * others * token_bytes(model)] * (len(model.get_decoder().layers) - 1) if others else []
    sizes += [ids.numel() * model.config.hidden_size * model.dtype.itemsize] if others else []
    room = [torch.empty(size, dtype=torch.uint8, device=ids.device) for size in sizes]
    try:
        with first_layer_alone(model):
            model(ids, use_cache=True, logits_to_keep=1)
    finally:
        room.clear()
    wait(ids.device)


@contextmanager
def first_layer_alone(model: PreTrainedModel) -> Iterator[None]:
    """The model without its other layers, which then come back."""
    decoder = model.get_decoder()
    layers = decoder.layers
    decoder.layers = layers[:1]
    try:
        yield
    finally:
        decoder.layers = layers


def token_bytes(model: PreTrainedModel) -> int:
    """Bytes of one token's keys and values in one layer."""
    config = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_key_value_heads * width * model.dtype.itemsize)


def throughput(
    model: Model, *, lengths: Sequence[int], budget: float, batches: Sequence[int], impls: Sequence[Impl] = ("auto",),
    new: int = 32, names: Sequence[str] = ("dynamic", "static compiled", "ours"), distinct: int = 2,
) -> Iterator[Case]:  # fmt: skip
    """Tokens a second by batch, full cache and kept, until each runs out of memory.

    A length is read once, outside of any batch, so that reading does not limit the batch: by one prompt for both full
    caches, by `distinct` prompts for each of `impls`. Ours joins these prompts' evicted caches, which take turns as
    rows. A full cache is filled with random numbers in the shape of the one that was read, which is not kept, and is
    made at the batch's size: beside it nothing else takes memory, neither the prompt nor a copy. A step's time and
    memory do not depend on the content. `tokens_a_second_with_prompts` counts the time of reading a prompt for every
    row, by arithmetic.
    """
    evicted: dict[tuple[Impl, int], tuple[float, list[Any]]] = {}  # seconds of a prompt, and its small caches
    full: dict[int, tuple[float, DynamicCache]] = {}  # seconds of a prompt, and its cache's shape

    def cache_of(run: Any, llama: PreTrainedModel, ids: Tensor, impl: Impl | None, batch: int, static: bool) -> Any:
        """(seconds, cache): what a prompt took, and a cache of that many."""
        length = ids.shape[1]
        if impl is not None:
            if (impl, length) not in evicted:
                evicted.clear()
                warm(llama, ids[:1])
                found = [_read(llama, row[None], run.new_cache()) for row in ids]
                evicted[impl, length] = statistics.mean(s for s, _ in found), [cache for _, cache in found]
            seconds, groups = evicted[impl, length]
            return seconds, EvictingCache.cat([groups[row % len(groups)] for row in range(batch)])
        evicted.clear()  # a full cache has the memory for itself
        if length not in full:
            warm(llama, ids)
            seconds, cache = _read(llama, ids, DynamicCache(config=llama.config))
            full[length] = seconds, _emptied(cache)
            collect(llama.device)
        seconds, shape = full[length]
        return seconds, _static(llama, shape, batch, length + new) if static else _filled(llama, shape, batch)

    def measure(name: str, impl: Impl | None, length: int, batch: int) -> Row:
        llama = model()
        ids = prompts(llama, 1 if impl is None else distinct, length)
        context, _ = contender(llama, name, budget, **({} if impl is None else {"impl": impl}))
        with context as run:
            seconds, cache = cache_of(run, llama, ids, impl, batch, name == "static compiled")
            collect(llama.device)
            held = allocated(llama.device)
            rows = torch.cat([ids, ids[:, :1]], 1)[torch.arange(batch, device=ids.device) % len(ids)]
            _, steps = clocked(llama, rows, new, **{cache_argument(llama): cache})
            made = how(llama, run)
        step = statistics.median(steps[WARM:])
        return {
            "ms_a_token": quantiles(steps[WARM:]), "tokens_a_second": round(batch / step, 1),
            "prompt_s": round(seconds, 4), "allocated_bytes": held, "peak_bytes": peak(llama.device),
            "tokens_a_second_with_prompts": round(new * batch / (batch * seconds + new * step), 2), **made,
        }  # fmt: skip

    for length in lengths:
        for name in names:
            for impl in impls if name == "ours" else (None,):
                for batch in batches:
                    about = {"step": "throughput", "contender": name, "impl": impl, "kv_len": length,
                             "budget": None if impl is None else budget, "new": new, "batch": batch}  # fmt: skip
                    yield Case(about, functools.partial(measure, name, impl, length, batch))


@torch.no_grad()
def _read(model: PreTrainedModel, ids: Tensor, cache: Any) -> tuple[float, Any]:
    """(seconds, the cache) of one prompt."""
    wait(ids.device)
    start = time.perf_counter()
    model(ids, **{cache_argument(model): cache}, logits_to_keep=1)
    wait(ids.device)
    return time.perf_counter() - start, cache


def _emptied(cache: DynamicCache) -> DynamicCache:
    """The cache with keys and values that are shapes and dtypes alone, on the meta device."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to("meta"), layer.values.to("meta")
    return cache


def _filled(model: PreTrainedModel, shape: DynamicCache, batch: int) -> DynamicCache:
    """A cache of that shape with `batch` rows of normal numbers, drawn where they stay."""
    cache = copy.deepcopy(shape)
    for layer in cache.layers:
        layer.keys, layer.values = (_drawn(model, x, batch) for x in (layer.keys, layer.values))
    return cache


def _static(model: PreTrainedModel, shape: DynamicCache, batch: int, length: int) -> StaticCache:
    """The same as transformers' static cache with room for `length` tokens; one row is drawn for all."""
    cache = StaticCache(config=model.config, max_cache_len=length + 1)
    for i, layer in enumerate(shape.layers):
        keys, values = (_drawn(model, x, 1).expand(batch, -1, -1, -1) for x in (layer.keys, layer.values))
        cache.update(keys, values, i, {"cache_position": torch.arange(keys.shape[2], device=model.device)})
        del keys, values  # not beside the next layer's
    return cache


def _drawn(model: PreTrainedModel, like: Tensor, batch: int) -> Tensor:
    """[batch, …] normal numbers in the shape of one row of `like`, without anything beside them."""
    return torch.empty(batch, *like.shape[1:], dtype=like.dtype, device=model.device).normal_()


def latency(
    model: Model, *, length: int, batches: Sequence[int], methods: Sequence[str], budget: float, new: int,
    static: bool = True,
) -> Iterator[Case]:  # fmt: skip
    """Seconds to the first token and of a whole generation for each method and batch, until memory ends.

    "none" is the dynamic cache, "none, static compiled" transformers' static one; the latter is compiled by a
    generation that is not timed, which takes minutes, and is left out without `static`. A batch is tried on the first
    layer beforehand, beside the room that the other layers will take, so that one that does not fit fails within that
    layer's time.
    """
    check_methods(methods)

    def measure(method: str, batch: int) -> Row:
        llama = model()
        plain, compiled = method.startswith("none"), method == "none, static compiled"
        name = "static compiled" if compiled else "dynamic" if plain else "ours"
        context, options = contender(llama, name, budget, **({} if plain else {"method": method}))
        with context as run:
            ids = prompts(llama, batch, length)
            warm(llama, ids, others=length + new if compiled else length if plain else int(budget * length))
            if compiled:
                collect(llama.device)
                clocked(llama, ids, new, **options)
            collect(llama.device)
            first, steps = clocked(llama, ids, new, **options)
            made = how(llama, run)
        return {"first_token_s": round(first, 4), "whole_s": round(first + sum(steps), 4),
                "ms_a_token": quantiles(steps[WARM:] or steps), "peak_bytes": peak(llama.device), **made}  # fmt: skip

    for method in ("none", *(("none, static compiled",) if static else ()), *methods):
        for batch in batches:
            about = {"step": "latency", "method": method, "kv_len": length, "new": new,
                     "budget": None if method.startswith("none") else budget, "batch": batch}  # fmt: skip
            yield Case(about, functools.partial(measure, method, batch))


def check_methods(methods: Sequence[str]) -> None:
    """All of them exist.

    Raises:
        ValueError: one does not.
    """
    for method in methods:
        if method not in METHODS:
            raise ValueError(f"methods: expected some of {', '.join(sorted(METHODS))}, got {method!r}")


def allocated(device: torch.device) -> int:
    """Return the bytes in use; 0 if the device has no allocator statistics."""
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    """Return the most bytes in use since `collect`; 0 if the device has no allocator statistics."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p20, p50 and p80 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else [seconds[0]] * 9
    return {f"p{p}": round(1e3 * cuts[p // 10 - 1], 3) for p in (20, 50, 80)}
