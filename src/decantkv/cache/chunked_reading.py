"""Reading a prompt by `generate` into a cache that evicts: its methods are wrapped while one lives.

`attach` brings caches of its own; a cache that the caller gives to `generate` is followed the same way.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer

from decantkv.cache.layer import EvictingLayer
from decantkv.cache.phases import Waiting
from decantkv.cache.rehearsal import forget_read, rehearse_prompt
from decantkv.hf.attention_hook import Hold, any_left, lock
from decantkv.hf.generate_hooks import check_chunks, first_the_prompt, is_chunked, number_chunk
from decantkv.hf.model_parts import cache_argument, decoder_of


@contextmanager
def deferred(cache: DynamicCache) -> Iterator[None]:
    """While open, a prompt may come in chunks; the cache decides what to keep when the block ends.

    Until then all of the prompt is held. For loops that feed chunks by hand; `generate` with a `prefill_chunk_size`
    does this by itself.
    """
    try:
        defer(cache)
        yield
        decide(cache)
    finally:
        give_up(cache)


def defer(cache: DynamicCache) -> None:
    """A prompt may come in chunks from now on; what to keep is decided by `decide`."""
    for layer in evicting_layers(cache):
        layer.defer()


def decide(cache: DynamicCache) -> None:
    """The prompt's last chunk is in. A failure leaves the cache empty."""
    layers = evicting_layers(cache)
    rehearsal = next((layer.policy.rehearsal for layer in layers if isinstance(layer.phase, Waiting)), None)
    try:
        if rehearsal is not None:
            rehearse_prompt(cache, rehearsal)
        forget_read(cache)
        for layer in layers:
            layer.finish()
    except BaseException:
        for layer in cache.layers:
            empty(layer)
        raise


def give_up(cache: DynamicCache) -> None:
    """No more chunks are to come, whether or not it was decided what to keep; an interrupt stops none of it."""
    try:
        for layer in evicting_layers(cache):
            layer.give_up()
    except BaseException:
        for layer in evicting_layers(cache):
            layer.give_up()
        raise


def empty(layer: CacheLayerMixin) -> None:
    """Reset a layer, and whatever kind it is, make it ready for a prompt of any batch."""
    layer.reset()
    if isinstance(layer, DynamicLayer) and isinstance(layer.keys, Tensor):  # before 5.24, zeros in their place
        layer.keys = layer.values = None
        layer.is_initialized = False


def evicting_layers(cache: object) -> list[EvictingLayer]:
    """Return the layers of a cache that evict; none for anything that is no such cache."""
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, EvictingLayer)]


def generating_parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the model and the models in it that generate with the same decoder: some hand over to those."""
    decoder = decoder_of(model)
    parts = [part for part in model.modules() if part is not model and isinstance(part, PreTrainedModel)]
    return [model, *(part for part in parts if part.can_generate() and decoder_of(part) is decoder)]


class Following(Hold):
    """Keeps the methods by which `generate` reads prompts wrapped for one model; released when closed or collected."""

    def _acquire(self, model: nn.Module) -> None:
        owners = {
            (next(c for c in type(part).__mro__ if name in vars(c)), name)
            for part in generating_parts(cast(PreTrainedModel, model))
            for name in _WRAPS
            if hasattr(type(part), name)
        }
        with lock:
            for owner, name in owners:
                wrapped = _wrapped.get((owner, name))
                if wrapped is None or vars(owner).get(name) not in (wrapped.original, wrapped.wrapper):
                    wrapped = _Wrapped(vars(owner)[name], _WRAPS[name](vars(owner)[name]))
                wrapped.holders.add(self)
                _wrapped[owner, name] = wrapped
                setattr(owner, name, wrapped.wrapper)

    @staticmethod
    def _restore() -> None:
        for (owner, name), wrapped in list(_wrapped.items()):
            if not any_left(wrapped.holders):
                if vars(owner).get(name) is wrapped.wrapper:
                    setattr(owner, name, wrapped.original)
                _wrapped.pop((owner, name), None)


Method = Callable[..., Any]


def _in_chunks(prefill: Method) -> Method:
    """`generate` reads a prompt here, in chunks when asked to: eviction waits for the last of them."""

    @functools.wraps(prefill)
    def prefill_in_chunks(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = _cache_among(self, args, kwargs)
        if cache is None or not is_chunked(args, kwargs):
            return prefill(self, *args, **kwargs)
        check_chunks(cache)
        _check_embeds(args, kwargs)
        with _numbered(self, cache), deferred(cache):
            return prefill(self, *args, **kwargs)

    return prefill_in_chunks


def _in_chunks_but_one(prefill: Method) -> Method:
    """As `_in_chunks` until transformers 4.57, where the prompt's last token is left to the forward that follows."""

    @functools.wraps(prefill)
    def prefill_in_chunks(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = _cache_among(self, args, kwargs)
        if cache is None:
            return prefill(self, *args, **kwargs)
        check_chunks(cache)
        _check_embeds(args, kwargs)
        try:
            defer(cache)
            with _numbered(self, cache):
                out = prefill(self, *args, **kwargs)
            for layer in evicting_layers(cache):
                layer.expect_last()
        except BaseException:
            give_up(cache)
            raise
        return out

    return prefill_in_chunks


def _in_its_chunks(prepare: Method) -> Method:
    """`generate` is given the length of chunks that its cache was made for."""

    @functools.wraps(prepare)
    def prepare_cache(self: Any, generation_config: Any, model_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        bounds = getattr(model_kwargs.get(cache_argument(self)), "bounds", None)
        chunk = getattr(bounds, "prefill_chunk", None)
        if chunk is not None and generation_config.prefill_chunk_size is None:
            generation_config.prefill_chunk_size = chunk
        return prepare(self, generation_config, model_kwargs, *args, **kwargs)

    return prepare_cache


def _prompt_first(make: Method) -> Method:
    """Drafts wait until an empty cache that evicts has read the prompt."""

    @functools.wraps(make)
    def make_generator(self: Any, **kwargs: Any) -> Any:
        cache = _cache_among(self, (), {"model_kwargs": kwargs.get("model_kwargs")})
        bound = functools.partial(make, self)
        return bound(**kwargs) if cache is None or cache.get_seq_length() else first_the_prompt(bound)(**kwargs)

    return make_generator


def _with_its_cache(prepare: Method) -> Method:
    """A model that throws its cache away, to read everything again, reads it into the same cache, emptied."""

    @functools.wraps(prepare)
    def prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = cache_argument(self)
        cache = kwargs.get(name)
        inputs = prepare(self, *args, **kwargs)
        if (
            cache is not None
            and evicting_layers(cache)
            and inputs.get(name) is None
            and inputs.get("use_cache", True) is not False
        ):
            cache.reset()
            inputs[name] = cache
        return inputs

    return prepare_inputs


_WRAPS: dict[str, Callable[[Method], Method]] = {
    "_prefill": _in_chunks,
    "_prefill_chunking": _in_chunks_but_one,
    "_prepare_cache_for_generation": _in_its_chunks,
    "_get_candidate_generator": _prompt_first,
    "prepare_inputs_for_generation": _with_its_cache,
}


@dataclass(frozen=True)
class _Wrapped:
    """A class's method, its wrapper, and who holds it."""

    original: Method
    wrapper: Method
    holders: weakref.WeakSet[Hold] = field(default_factory=weakref.WeakSet)


_wrapped: dict[tuple[type, str], _Wrapped] = {}


def _cache_among(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DynamicCache | None:
    name = cache_argument(model)
    caches = [a[name] for a in (*args, *kwargs.values(), kwargs) if isinstance(a, dict) and name in a]
    return next((cache for cache in caches if evicting_layers(cache)), None)


def _check_embeds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise where transformers would feed all embeddings with each chunk."""
    given = [*args, *kwargs.values(), kwargs]
    embeds = next((a["inputs_embeds"] for a in given if isinstance(a, dict) and "inputs_embeds" in a), None)
    chunk = next((a.prefill_chunk_size for a in given if getattr(a, "prefill_chunk_size", None)), None)
    if embeds is not None and chunk is not None and embeds.shape[1] > chunk:
        raise ValueError(
            f"prefill_chunk: expected input_ids, which can be read in chunks, got inputs_embeds of {embeds.shape[1]} "
            f"tokens for chunks of {chunk}; read them in one piece"
        )


@contextmanager
def _numbered(model: Any, cache: DynamicCache) -> Iterator[None]:
    """While open, forwards that read into the cache get the positions that their tokens have in the prompt."""
    decoder = decoder_of(model)
    name = cache_argument(decoder)

    def number(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get(name) is cache:
            number_chunk(kwargs, cache)
        return args, kwargs

    hook: torch.utils.hooks.RemovableHandle = decoder.register_forward_pre_hook(number, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
