"""`attach`: every prompt a model reads goes through an evicting cache, until the run is detached."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from decantkv import graphs, interface
from decantkv.allocation import AllocationRule
from decantkv.bounded import UNBOUNDED, Bounds, Decode
from decantkv.budget import Budget
from decantkv.cache import (
    EvictingCache,
    PromptLayer,
    cache_argument,
    check_adapters,
    checked_model,
    decide,
    defer,
    deferred,
    give_up,
    new_recorder,
)
from decantkv.forwards import Watch
from decantkv.fused import Standin, standins
from decantkv.generating import check_chunks, first_the_prompt, is_chunked, number_chunk, refuse_continuous_batching
from decantkv.graphs import StepGraphs, Trust
from decantkv.inner import Inner
from decantkv.interface import Hold, not_understood
from decantkv.methods import Method
from decantkv.needs import decoder_of
from decantkv.options import Allocation, Impl, Span
from decantkv.peers import Peers
from decantkv.reading import Following, generating_parts
from decantkv.records import Report
from decantkv.settings import Settings
from decantkv.weighing import Weighing, undecided, weighed

_lock = threading.Lock()
_attached: weakref.WeakKeyDictionary[PreTrainedModel, _Attachment] = weakref.WeakKeyDictionary()


def attach(
    model: PreTrainedModel,
    method: str | Method = "dropkv",
    *,
    budget: float | int | str | Budget,
    allocation: Allocation | AllocationRule | None = None,
    sinks: int | None = None,
    protect: Sequence[Span] = (),
    impl: Impl = "auto",
    prefill_chunk: int | None = None,
    max_kv_tokens: int | None = None,
    every: int | None = None,
    decode_budget: int | None = None,
    protect_prompt: bool = False,
    decode: Decode = "auto",
    store: Inner = "plain",
    reuse_lse: bool = False,
    **options: Any,
) -> Run:
    """From here on, prompts that `model` reads keep only `budget` of their cache.

    Works for `generate`, pipelines, streaming and bare forwards that use a cache. Acts at the call; use the result as
    a context manager, or call `detach()`. A nested `attach` wins until it ends. In threads, a thread's own newest run
    counts; a thread without one follows the newest of all.

    Args:
        model: an unmodified transformers model, or what `torch.compile`, PEFT or data parallelism made of one; its
            parameters and configuration are not touched.
        method: a name, "name:preset", or a `Method`; `options` are the named method's own.
        budget: what is kept: a fraction in (0, 1] or a number of tokens per head, protected ones included.
        allocation: how the budget is spread: "uniform", "shared" (one set for all heads of a layer), "ada",
            "ada-kvpress", "heads", "pyramid", "layer", or a rule; None takes the method's own.
        sinks: first tokens always kept; None takes the method's own.
        protect: spans (start, stop) of prompt positions always kept, from a row's first real token.
        impl: "auto", "reference", "torch" or "triton".
        prefill_chunk: `generate` reads prompts this many tokens at a time; the same tokens are kept as in one piece.
        max_kv_tokens: tokens a head stores at most after each chunk; what is dropped early is gone for later chunks.
        every: evict from prompt and answer again every so many new tokens.
        decode_budget: tokens a head keeps then: of everything, or with `protect_prompt` of the answer alone; None: as
            many as `budget` gave the prompt.
        protect_prompt: what was kept of the prompt stays for good.
        decode: "model": the model's own attention reads what was kept; "own": attention that takes lengths instead of
            masks, on CUDA steps of `generate` that are replayed as a CUDA graph, and for chunks of a prompt attention
            that needs no mask of everything by everything; "auto": "own" on CUDA, "model" elsewhere.
        store: "plain", or where kept tokens live inside a layer of transformers' own: "fp8" or "static".
        reuse_lse: with sdpa, prompts are attended to by the same op of torch's, asked for its softmax denominators:
            scoring then reads keys and values once instead of twice. `report` says where that was not possible.

    Raises:
        TypeError, ValueError: an argument out of its range.
        UnsupportedModelError: a model whose attention cannot be followed.
    """
    settings = Settings.parse(
        method, budget=budget, allocation=allocation, sinks=sinks, protect=protect, impl=impl, **options
    )
    model = checked_model(model)
    bounds = Bounds(prefill_chunk, max_kv_tokens, every, decode_budget, protect_prompt, decode, store, reuse_lse)
    return Run(model, settings, bounds.check(settings))


class Run:
    """Eviction switched on for one model; see `attach`."""

    def __init__(self, model: PreTrainedModel, settings: Settings, bounds: Bounds = UNBOUNDED) -> None:
        EvictingCache.of(
            model, settings, new_recorder(settings, bounds), bounds
        )  # refuse now what a prompt would be refused for
        self.settings, self.recorder, self.bounds = settings, new_recorder(settings, bounds), bounds
        self.recorder.weights = sum(parameter.nbytes for parameter in model.parameters())
        self.thread = threading.get_ident()
        self.trust = Trust()
        self._model: PreTrainedModel | None = model
        with _lock:
            attachment = _attached.get(model)
            if attachment is None:
                attachment = _attached[model] = _Attachment(model)
            attachment.runs.append(self)

    def __repr__(self) -> str:
        model = "detached" if self._model is None else f"attached to {type(self._model).__name__}"
        return f"Run({self.recorder.method}, budget {self.recorder.budget}, {model})"

    def new_cache(self) -> EvictingCache:
        """An empty cache that evicts by this run's settings and reports to it."""
        if self._model is None:
            raise RuntimeError("the run is detached")
        return EvictingCache.of(self._model, self.settings, self.recorder, self.bounds)

    def report(self) -> Report:
        """What was kept and dropped so far, as text or JSON."""
        report, latest = self.recorder.report(), self.recorder.latest
        cache = None if latest is None else latest()
        report = report if cache is None else weighed(report, cache)
        trust = self.trust
        return dataclasses.replace(
            report, graphed=trust.replayed, without_graph=trust.broken, eager_steps=dict(trust.left)
        )

    def detach(self) -> None:
        """Switch eviction off and leave the model as it was; a second call does nothing."""
        with _lock:
            if self._model is None:
                return
            attachment = _attached[self._model]
            attachment.runs.remove(self)
            if not attachment.runs:
                attachment.remove()
                del _attached[self._model]
            self._model = self.trust.standins = None  # whoever reads the report later does not hold the weights

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()


def _standins_of(reference: weakref.ref[PreTrainedModel]) -> Sequence[Standin]:
    """A model's stand-ins, asked for by caches that may outlive it."""
    model = reference()
    return () if model is None else standins(model)


class _Attachment:
    """What is changed on one model while any run is attached to it: one method, two hooks, the wrappers' hold."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.runs: list[Run] = []
        self._model = weakref.ref(model)
        self._hold, self._watch = Hold(model), Watch(model)
        self._following: Following | None = Following(model)
        decoder: nn.Module = decoder_of(model)
        self._name = cache_argument(decoder)
        self._hooks = [
            decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            decoder.register_forward_hook(self._after_forward, always_call=True),
        ]
        self._overridden: list[tuple[weakref.ref[PreTrainedModel], str]] = []
        self._prefill = threading.local()
        for part in generating_parts(model):
            self._override_all(part)

    def _override_all(self, model: PreTrainedModel) -> None:
        """Wrap what `generate` of the model, or of a part that it hands over to, calls on its way."""
        self._override(model, "_prepare_cache_for_generation", self._prepare_cache)
        self._override(model, "_get_candidate_generator", self._check_drafts)
        self._override(model, "_prefill", self._defer_chunks)
        self._override(model, "_prefill_chunking", self._defer_all_but_one)  # until transformers 4.57
        self._override(model, "forward", self._step)
        for name in ("generate_batch", "init_continuous_batching"):
            self._override(model, name, refuse_continuous_batching)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """A copy's methods would be the original's."""
        raise RuntimeError("model: expected to be copied or pickled outside of attach, got one that is attached")

    def _override(self, model: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put a wrapped method on the instance; deleting it brings the class's own back."""
        if hasattr(model, name) and name not in vars(model):
            setattr(model, name, wrap(getattr(model, name)))
            self._overridden.append((weakref.ref(model), name))

    def remove(self) -> None:
        """Undo everything."""
        for hook in self._hooks:
            hook.remove()
        for reference, name in self._overridden:
            if (model := reference()) is not None:
                delattr(model, name)
        self._hold.close()
        self._following = None

    def active(self) -> Run:
        """The run that counts in this thread."""
        own = [run for run in self.runs if run.thread == threading.get_ident()]
        return (own or self.runs)[-1]

    def _prepare_cache(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """`generate` asks the model for a cache here, before it decides how to decode."""

        def prepare_cache(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            if model_kwargs.get(self._name) is None and generation_config.use_cache is not False:
                asked, model = generation_config.cache_implementation, self._model()
                if asked not in (
                    None,
                    "dynamic",
                    getattr(model, "generation_config", generation_config).cache_implementation,
                ):
                    raise ValueError(
                        f"cache_implementation: expected none beside attach, which brings its own cache, got {asked!r}"
                    )
                generation_config.cache_implementation = None
                model_kwargs[self._name] = self.active().new_cache()
            cache = model_kwargs.get(self._name)
            if isinstance(cache, EvictingCache):
                cache.expect_length(generation_config.max_length or 0)
                if cache.steps is None and cache.bounds.decode != "model":
                    cache.steps = self._graphs(cache)
            chunk = self.active().bounds.prefill_chunk
            if chunk is not None and generation_config.prefill_chunk_size is None:
                generation_config.prefill_chunk_size = chunk
            return prepare(generation_config, model_kwargs, *args, **kwargs)

        return prepare_cache

    def _check_drafts(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`generate` makes what drafts here: nothing that reads with this model, whose second cache would evict too."""
        make = first_the_prompt(make)

        def make_generator(**kwargs: Any) -> Any:
            early = getattr(kwargs.get("generation_config"), "assistant_early_exit", None)
            if early is not None:
                raise ValueError(
                    f"assistant_early_exit: expected none beside attach, whose model would draft from an evicted "
                    f"cache, got {early}; use prompt_lookup_num_tokens or an assistant_model"
                )
            assistant, model = kwargs.get("assistant_model"), self._model()
            if assistant is not None and any(_share(assistant, other) for other in (model, *_attached)):
                raise ValueError(
                    f"assistant_model: expected a model that is not attached, which drafts from a full cache, got "
                    f"{type(assistant).__name__} with eviction"
                )
            return make(**kwargs)

        return make_generator

    def _graphs(self, cache: EvictingCache) -> StepGraphs:
        """What records this cache's steps, where anything can."""
        trust, model, refused = self.active().trust, self._model(), None
        if Peers.of(model) is not None:  # processes that fell out of step would wait for one another for ever
            refused = "the model is spread over processes"
        if (
            not any(name == "forward" for _, name in self._overridden)
            and model is not None
            and graphs.on_gpu(next(model.parameters()))
        ):
            trust.broken = "another library has wrapped the model's forward"
        return StepGraphs(cache.layers, trust, refused, functools.partial(_standins_of, self._model))

    def _step(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's forward; steps of a generation that this run began come from a CUDA graph where one can be."""

        @functools.wraps(forward)
        def step(*args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get(self._name)
            if args or not isinstance(cache, EvictingCache) or cache.steps is None:
                return forward(*args, **kwargs)
            check_adapters(cache)  # a graph holds the adapters that it was recorded with
            return cache.steps.forward(forward, kwargs)

        return step

    def _defer_chunks(self, prefill: Callable[..., Any]) -> Callable[..., Any]:
        """`generate` reads a prompt here, in chunks when asked to: eviction waits for the last of them."""

        def prefill_in_chunks(*args: Any, **kwargs: Any) -> Any:
            cache = self._cache_among(args, kwargs)
            if cache is None or not is_chunked(args, kwargs):
                return prefill(*args, **kwargs)
            check_chunks(cache)
            self._prefill.chunked = True
            try:
                with deferred(cache):
                    output = prefill(*args, **kwargs)
                self._weigh(output)
                return output
            finally:
                self._prefill.chunked = False

        return prefill_in_chunks

    def _defer_all_but_one(self, prefill: Callable[..., Any]) -> Callable[..., Any]:
        """As `_defer_chunks` where the prompt's last token is left to the forward that follows."""

        def prefill_in_chunks(*args: Any, **kwargs: Any) -> Any:
            cache = self._cache_among(args, kwargs)
            if cache is None:
                return prefill(*args, **kwargs)
            check_chunks(cache)
            self._prefill.chunked = True
            defer(cache)
            try:
                out = prefill(*args, **kwargs)
            except BaseException:
                give_up(cache)
                raise
            finally:
                self._prefill.chunked = False
            self._prefill.last_token = cache
            return out

        return prefill_in_chunks

    def _weigh(self, output: Any) -> None:
        """Note what the prompt's cache weighs, once all of its layers have decided."""
        if getattr(self._prefill, "weighing", None) is None:
            return
        recorder, weighing, reference = self._prefill.weighing
        cache = reference()
        if cache is not None and not undecided(cache):
            self._prefill.weighing = None
            recorder.latest = weakref.ref(cache)
            recorder.memory = weighing.close(cache, recorder.full_bytes(weighing.recorded), output)

    def _cache_among(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DynamicCache | None:
        caches = [a[self._name] for a in (*args, kwargs) if isinstance(a, dict) and self._name in a]
        return next((cache for cache in caches if isinstance(cache, DynamicCache)), None)

    def _before_forward(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        interface.forget()
        args, kwargs = self._by_name(decoder, args, kwargs)
        if kwargs.get("encoder_hidden_states") is not None:
            raise ValueError(
                "encoder_hidden_states: expected none beside attach, got some, whose keys would be cached as tokens"
            )
        run, cache = self.active(), kwargs.get(self._name)
        use_cache = kwargs.get("use_cache")
        if cache is None and (decoder.config.use_cache if use_cache is None else use_cache):
            cache = kwargs[self._name] = run.new_cache()
        elif cache is not None and type(cache) is DynamicCache and cache.get_seq_length() == 0:
            cache.layers = run.new_cache().layers  # generate and the caller hold this very object
        elif cache is not None and (kind := _passed_over(cache, kwargs)) is not None:
            run.recorder.passed_over[kind] = run.recorder.passed_over.get(kind, 0) + 1
        if isinstance(cache, DynamicCache) and not isinstance(cache, EvictingCache):
            check_adapters(cache)
        if isinstance(cache, DynamicCache) and cache.get_seq_length() == 0:
            self._prefill.stop = run.recorder.stopwatch.start("prefill", _device_of(decoder))
            self._prefill.weighing = run.recorder, Weighing(decoder, len(run.recorder.layers)), weakref.ref(cache)
        if getattr(self._prefill, "chunked", False) and isinstance(cache, DynamicCache):
            number_chunk(kwargs, cache)
        return args, kwargs

    def _by_name(self, decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the forward's arguments with the cache under its own name, however it was given."""
        if self._name != "past_key_values" and "past_key_values" in kwargs:
            kwargs.setdefault(self._name, kwargs.pop("past_key_values"))
        if args:
            names = list(inspect.signature(decoder.forward).parameters)
            return (), {**dict(zip(names, args, strict=False)), **kwargs}
        return args, kwargs

    def _after_forward(self, decoder: nn.Module, args: Any, output: Any) -> None:
        waiting, stop = interface.pending(), getattr(self._prefill, "stop", None)
        interface.forget()
        self._prefill.stop = None
        if stop is not None:
            stop()
        last_token = getattr(self._prefill, "last_token", None)
        if last_token is not None:
            self._prefill.last_token = None
            if output is not None:
                decide(last_token)
            give_up(last_token)
        if output is not None:
            self._weigh(output)
        if waiting is not None and output is not None:
            raise not_understood(waiting.layer_idx, type(decoder).__name__)


def _share(one: nn.Module, other: nn.Module | None) -> bool:
    """Return whether two models read with one decoder."""
    return other is not None and decoder_of(one) is decoder_of(other)


def _passed_over(cache: Any, kwargs: dict[str, Any]) -> str | None:
    """Return what kind of cache reads a prompt without evicting; None where it evicts or reads a single token."""
    layers = getattr(cache, "layers", ())
    given = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    if any(isinstance(layer, PromptLayer) for layer in layers) or given is None or given.shape[1] == 1:
        return None
    name = type(cache).__name__
    return f"a {name} that held tokens already" if type(cache) is DynamicCache else f"a {name}"


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
