"""`attach`: every prompt a model reads goes through an evicting cache, until the run is detached."""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from decantkv.base.chat import Chat
from decantkv.base.options import Allocation, Impl, Span
from decantkv.cache.bounds import UNBOUNDED, Bounds, Decode
from decantkv.cache.chunked_reading import Following, generating_parts
from decantkv.cache.evicting_cache import (
    EvictingCache,
    EvictingLayer,
    cache_argument,
    check_adapters,
    checked_model,
    decide,
    defer,
    deferred,
    give_up,
    new_recorder,
)
from decantkv.cache.forwards import Watch, by_name, unhook
from decantkv.cache.memory import Weighing, undecided, weighed
from decantkv.cache.report import Report
from decantkv.cache.stores import Inner
from decantkv.decode import graphs
from decantkv.decode.fused_ops import Standin, standins
from decantkv.decode.graphs import StepGraphs, Trust
from decantkv.hf import attention_hook
from decantkv.hf.attention_hook import Hold, not_understood
from decantkv.hf.generate_hooks import (
    check_chunks,
    first_the_prompt,
    is_chunked,
    number_chunk,
    refuse_continuous_batching,
)
from decantkv.hf.model_parts import decoder_of
from decantkv.methods import Method
from decantkv.scoring.rehearsal import Rehearsal
from decantkv.selection.allocation import AllocationRule
from decantkv.selection.budget import Budget
from decantkv.selection.tensor_parallel import Peers
from decantkv.settings import Settings

_attached: weakref.WeakKeyDictionary[PreTrainedModel, _Attachment] = weakref.WeakKeyDictionary()
_methods: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # every method that an attachment put on a model


def attach(
    model: PreTrainedModel,
    method: str | Method = "dropkv",
    *,
    budget: float | int | str | Budget | None = None,
    settings: Settings | None = None,
    allocation: Allocation | AllocationRule | None = None,
    sinks: int | None = None,
    protect: Sequence[Span | str] = (),
    chat: Chat | Sequence[Chat] | None = None,
    impl: Impl = "auto",
    rehearsal: str | Rehearsal | None = None,
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

    Works for `generate`, pipelines, streaming and bare forwards. Acts at the call; use the result as a context manager,
    or call `detach()`. A nested `attach` wins until it ends; in a thread its own newest run counts, else the newest.

    Args:
        model: an unmodified transformers model, or what `torch.compile`, PEFT or data parallelism made of one; its
            parameters and configuration are not touched.
        method: a name, "name:preset", or a `Method`; `options` are the named method's own.
        settings: what `Settings.parse` made of method, budget and the options up to `rehearsal`, in their place.
        budget: what is kept: a fraction in (0, 1] or a number of tokens per head, protected ones included.
        allocation: how the budget is spread: "uniform", "shared" (one set for all heads of a layer), "ada",
            "ada-kvpress", "heads", "pyramid", "layer", "global", or a rule; None takes the method's own.
        sinks: first tokens always kept; None takes the method's own.
        protect: spans (start, stop) of prompt positions always kept, from a row's first real token; also "system" and
            "tools", what the chat template writes for them.
        chat: the prompt as a `Chat`, or a list of those that may come; for "system" and "tools".
        impl: "auto", "reference", "torch" or "triton".
        rehearsal: what is run over a prompt before it is evicted, so that what any later question needs stays: "replay"
            (the prompt once more), "anchors" (a fifth of it, "anchors:0.05" another share), both joined by "+", or a
            `Rehearsal`. None: the prompt's last queries decide. The whole model's heads then compete, by allocation
            "global", unless another one is named.
        prefill_chunk: `generate` reads prompts this many tokens at a time; the same tokens are kept as in one piece.
        max_kv_tokens: most tokens per head after each chunk; what is dropped early is gone for later chunks.
        every: evict from prompt and answer again after every so many generated tokens.
        decode_budget: tokens per head that stay then, of everything or, with `protect_prompt`, of the answer alone;
            None: as many as `budget` gave the prompt.
        protect_prompt: what was kept of the prompt stays for good.
        decode: "model": the model's own attention reads what was kept, through masks; "own": the layers attend by
            themselves, without masks, and on CUDA steps of `generate` are replayed as a graph; "auto": "own" on CUDA.
        store: "plain", or where kept tokens live inside a layer of transformers' own: "fp8" or "static".
        reuse_lse: take softmax denominators from sdpa's own op where possible: scoring then reads keys and values once.

    Raises:
        TypeError, ValueError: an argument out of its range.
        UnsupportedModelError: a model whose attention cannot be followed.
    """
    given = {
        "budget": budget, "allocation": allocation, "sinks": sinks, "protect": protect, "chat": chat,
        "rehearsal": rehearsal,
    }  # fmt: skip
    if settings is None:
        settings = Settings.parse(method, impl=impl, **given, **options)  # type: ignore[arg-type]  # as annotated above
    elif beside := [
        name
        for name, value in {"method": method, "impl": impl, **given, **options}.items()
        if value not in (None, (), "dropkv", "auto")
    ]:
        raise TypeError(f"settings: expected none beside {beside[0]}, which they hold already, got both")
    model = checked_model(model)
    bounds = Bounds(prefill_chunk, max_kv_tokens, every, decode_budget, protect_prompt, decode, store, reuse_lse)
    run = Run(model, settings, bounds.check(settings))
    try:
        run.begin()
        return run
    except BaseException:  # an interrupt: the caller gets no run that could be detached
        run.detach()
        raise


class Run:
    """Eviction switched on for one model; see `attach`."""

    def __init__(self, model: PreTrainedModel, settings: Settings, bounds: Bounds = UNBOUNDED) -> None:
        EvictingCache.of(
            model, settings, new_recorder(settings, bounds), bounds
        )  # refuse now what a prompt would be refused for
        self.settings, self.recorder, self.bounds = settings, new_recorder(settings, bounds), bounds
        self.recorder.weights = sum(parameter.nbytes for parameter in model.parameters())
        self.thread = weakref.ref(threading.current_thread())
        self.trust = Trust()
        self.ended = False
        self._model = weakref.ref(model, functools.partial(_without_standins, self.trust))
        weakref.finalize(self, attention_hook.thoroughly, _undo)

    def begin(self) -> None:
        """Switch eviction on, until `detach`."""
        model = self._model()
        if model is None or self.ended:
            raise RuntimeError("the run is detached")
        with attention_hook.lock:
            attachment = _attached.get(model) or _Attachment(model)
            attachment.add(self)
            _attached[model] = attachment
            attachment.install(model)

    def __repr__(self) -> str:
        held = None if self.ended else self._model()
        model = "detached" if held is None else f"attached to {type(held).__name__}"
        return f"Run({self.recorder.method}, budget {self.recorder.budget}, {model})"

    def new_cache(self) -> EvictingCache:
        """An empty cache that evicts by this run's settings and reports to it."""
        model = self._model()
        if model is None or self.ended:
            raise RuntimeError("the run is detached")
        return self.cache_for(model)

    def cache_for(self, model: PreTrainedModel) -> EvictingCache:
        """As `new_cache`, also where another thread has detached the run since."""
        return EvictingCache.of(model, self.settings, self.recorder, self.bounds)

    def report(self) -> Report:
        """Return what was kept and dropped so far, as text or JSON."""
        report, latest = self.recorder.report(), self.recorder.latest
        cache = None if latest is None else latest()
        report = report if cache is None else weighed(report, cache)
        trust = self.trust
        return dataclasses.replace(
            report, graphed=trust.replayed, without_graph=trust.broken, eager_steps=dict(trust.left)
        )

    def detach(self) -> None:
        """Switch eviction off and leave the model as it was; a second call does nothing."""
        self.ended = True
        self.trust.standins = None  # a report that is read later does not hold the weights
        attention_hook.forget()
        attention_hook.thoroughly(_undo)

    def __enter__(self) -> Self:
        try:
            model = self._model()
            if model is not None and model in _attached:
                _attached[model].hold_weakly(self)
            return self
        except BaseException:  # an interrupt: the context never began, so that `__exit__` will not be called
            self.detach()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.detach()
        except BaseException:  # an interrupt: no caller would call this again
            self.detach()
            raise


def _undo() -> None:
    """Leave models as they were to which no run is attached any more."""
    for model, attachment in list(_attached.items()):
        if not attachment.prune():
            attachment.remove()
            _attached.pop(model, None)


def _without_standins(trust: Trust, _: object) -> None:
    """The model is gone: what stood in for its parts holds their weights no longer."""
    trust.standins = None


def _standins_of(reference: weakref.ref[PreTrainedModel]) -> Sequence[Standin]:
    """A model's stand-ins, asked for by caches that may outlive it."""
    model = reference()
    return () if model is None else standins(model)


class _Attachment:
    """The changes of one model while any run is attached to it: methods, hooks, and the wrappers' hold."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.runs: tuple[weakref.ref[Run], ...] = ()
        self._kept: set[Run] = set()  # runs whose callers may have dropped them; `with` holds its own
        self._prefill = threading.local()
        self._model = weakref.ref(model)
        self._holds: tuple[Hold, ...] = ()
        decoder: nn.Module = decoder_of(model)
        self._decoder = weakref.ref(decoder)
        self._name = cache_argument(decoder)
        self._methods: dict[tuple[weakref.ref[PreTrainedModel], str], weakref.ref[Any]] = {}

    def add(self, run: Run) -> None:
        """One more run, the newest."""
        self._kept.add(run)
        self.runs = (*self.runs, weakref.ref(run))

    def hold_weakly(self, run: Run) -> None:
        """The run ends with its context, or with its last reference where an interrupt comes before that."""
        self._kept.discard(run)

    def prune(self) -> bool:
        """Forget runs that ended; whether one is left."""
        self._kept = {run for run in self._kept if not run.ended}
        self.runs = tuple(ref for ref in self.runs if (run := ref()) is not None and not run.ended)
        return bool(self.runs)

    def install(self, model: PreTrainedModel) -> None:
        """Put in place what is missing. An interrupt in the midst of it is the caller's to undo."""
        for kind in (Hold, Watch, Following)[len(self._holds) :]:
            self._holds = (*self._holds, kind(model))
        decoder: nn.Module = decoder_of(model)
        if self._before_forward not in decoder._forward_pre_hooks.values():
            decoder.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)  # before Watch's
        if self._after_forward not in decoder._forward_hooks.values():
            decoder.register_forward_hook(self._after_forward, always_call=True)
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
        """Put a wrapped method on the instance, where none is; without it the class's own is back.

        Other libraries may wrap it in turn and keep it for longer: then it calls the original.
        """
        there = vars(model).get(name)
        if there in _methods:  # another library has put one back that had been removed
            vars(model).pop(name, None)
        elif there is not None or not hasattr(model, name):
            return
        original = getattr(model, name)
        wrapped = wrap(original)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return (original if self.active() is None else wrapped)(*args, **kwargs)

        _methods.add(method)
        self._methods[weakref.ref(model), name] = weakref.ref(method)
        vars(model)[name] = method

    def remove(self) -> None:
        """Undo what is still there of it, each step whatever became of the others.

        A method that another library has wrapped stays inside of that library's wrapper.
        """
        for (reference, name), ours in self._methods.items():
            model, method = reference(), ours()
            if model is not None and method is not None and vars(model).get(name) is method:
                vars(model).pop(name, None)
        decoder = self._decoder()
        if decoder is not None:
            unhook(decoder, self._before_forward)
            unhook(decoder, self._after_forward)
        for hold in self._holds:
            hold.close()
        self._holds = ()

    def active(self) -> Run | None:
        """The run that counts in this thread; None once all have ended."""
        runs = [run for ref in self.runs if (run := ref()) is not None and not run.ended]
        if len(runs) > 1:
            thread = threading.current_thread()
            runs = [run for run in runs if run.thread() is thread] or runs
        return runs[-1] if runs else None

    def _prepare_cache(self, prepare: Callable[..., Any]) -> Callable[..., Any]:
        """`generate` asks the model for a cache here, before it decides how to decode."""

        def prepare_cache(generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            run, model = self.active(), self._model()
            if run is None or model is None:
                return prepare(generation_config, model_kwargs, *args, **kwargs)
            if model_kwargs.get(self._name) is None and generation_config.use_cache is not False:
                asked = generation_config.cache_implementation
                if asked not in (
                    None,
                    "dynamic",
                    getattr(model, "generation_config", generation_config).cache_implementation,
                ):
                    raise ValueError(
                        f"cache_implementation: expected none beside attach, which brings its own cache, got {asked!r}"
                    )
                generation_config.cache_implementation = None
                model_kwargs[self._name] = run.cache_for(model)
            cache = model_kwargs.get(self._name)
            if isinstance(cache, EvictingCache):
                cache.expect_length(generation_config.max_length or 0)
                if cache.steps is None and cache.bounds.decode != "model":
                    cache.steps = self._graphs(cache, run, model)
            chunk = run.bounds.prefill_chunk
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

    def _graphs(self, cache: EvictingCache, run: Run, model: PreTrainedModel) -> StepGraphs:
        """Return the recorder of this cache's steps as graphs."""
        trust, refused = run.trust, None
        if Peers.of(model) is not None:  # processes that fell out of step would wait for one another for ever
            refused = "the model is spread over processes"
        if all(name != "forward" for _, name in self._methods) and graphs.on_gpu(next(model.parameters())):
            trust.broken = "another library has wrapped the model's forward"
        return StepGraphs(cache.layers, trust, refused, functools.partial(_standins_of, self._model))

    def _step(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's forward; steps of a generation that this run began come from a CUDA graph where one can be."""

        @functools.wraps(forward)
        def step(*args: Any, **kwargs: Any) -> Any:
            cache = kwargs.get(self._name)
            try:
                if args or not isinstance(cache, EvictingCache) or cache.steps is None:
                    return forward(*args, **kwargs)
                check_adapters(cache)  # a graph holds the adapters that it was recorded with
                return cache.steps.forward(forward, kwargs)
            except BaseException:
                attention_hook.forget()
                raise

        return step

    def _defer_chunks(self, prefill: Callable[..., Any]) -> Callable[..., Any]:
        """`generate` reads a prompt here, in chunks when asked to: eviction waits for the last of them."""

        def prefill_in_chunks(*args: Any, **kwargs: Any) -> Any:
            cache = self._cache_among(args, kwargs)
            if cache is None or not is_chunked(args, kwargs):
                return prefill(*args, **kwargs)
            check_chunks(cache)
            try:
                self._prefill.chunked = True
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
            try:
                self._prefill.chunked = True
                defer(cache)
                out = prefill(*args, **kwargs)
                self._prefill.last_token = weakref.ref(cache)
            except BaseException:
                give_up(cache)
                raise
            finally:
                self._prefill.chunked = False
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

    def _before_forward(self, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        attention_hook.forget()
        run, model = self.active(), self._model()
        if run is None or model is None or kwargs is None:  # torch's two tables differ while another thread attaches
            return None
        if self._name != "past_key_values" and "past_key_values" in kwargs:
            kwargs.setdefault(self._name, kwargs.pop("past_key_values"))
        kwargs = by_name(decoder, args, kwargs)
        if kwargs.get("encoder_hidden_states") is not None:
            raise ValueError(
                "encoder_hidden_states: expected none beside attach, got some, whose keys would be cached as tokens"
            )
        cache, use_cache = kwargs.get(self._name), kwargs.get("use_cache")
        if cache is None and (decoder.config.use_cache if use_cache is None else use_cache):
            cache = kwargs[self._name] = run.cache_for(model)
        elif cache is not None and type(cache) is DynamicCache and cache.get_seq_length() == 0:
            cache.layers = run.cache_for(model).layers  # generate and the caller hold this very object
        elif cache is not None and (kind := _passed_over(cache, kwargs)) is not None:
            run.recorder.count_reason("passed_over", kind)
        if isinstance(cache, DynamicCache) and not isinstance(cache, EvictingCache):
            check_adapters(cache)
        if isinstance(cache, DynamicCache) and cache.get_seq_length() == 0:
            recorder = cache.recorder if isinstance(cache, EvictingCache) else run.recorder
            self._prefill.stop = recorder.stopwatch.start("prefill", _device_of(decoder))
            self._prefill.weighing = recorder, Weighing(decoder, len(recorder.records)), weakref.ref(cache)
        if getattr(self._prefill, "chunked", False) and isinstance(cache, DynamicCache):
            number_chunk(kwargs, cache)
        return (), kwargs

    def _after_forward(self, decoder: nn.Module, args: Any, output: Any) -> None:
        waiting, stop = attention_hook.pending(), getattr(self._prefill, "stop", None)
        attention_hook.forget()
        self._prefill.stop = None
        if stop is not None:
            stop()
        reference = getattr(self._prefill, "last_token", None)
        last_token = None if reference is None else reference()
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
    """Return the kind of a cache that reads a prompt without evicting, or None if it evicts or reads one token."""
    layers = getattr(cache, "layers", ())
    given = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    if any(isinstance(layer, EvictingLayer) for layer in layers) or given is None or given.shape[1] == 1:
        return None
    name = type(cache).__name__
    return f"a {name} that held tokens already" if type(cache) is DynamicCache else f"a {name}"


def _device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
