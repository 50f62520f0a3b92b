"""How `generate` reads a prompt into a cache that evicts: its methods are wrapped while one lives.

`attach` brings caches of its own; a cache that the caller gives to `generate` is followed the same way.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from decantkv.generating import check_chunks, first_the_prompt, is_chunked, number_chunk
from decantkv.layers import PromptLayer
from decantkv.needs import cache_argument, decoder_of


@contextmanager
def deferred(cache: DynamicCache) -> Iterator[None]:
    """While open, a prompt may come in chunks; the cache decides what to keep when the block ends.

    Until then all of the prompt is held. For loops that feed chunks by hand; `generate` with a `prefill_chunk_size`
    does this by itself.
    """
    defer(cache)
    try:
        yield
        decide(cache)
    finally:
        give_up(cache)


def defer(cache: DynamicCache) -> None:
    """A prompt may come in chunks from now on; what to keep is decided by `decide`."""
    for layer in prompt_layers(cache):
        layer.deferred = layer.store is None


def decide(cache: DynamicCache) -> None:
    """The prompt's last chunk is in."""
    for layer in prompt_layers(cache):
        layer.finish()


def give_up(cache: DynamicCache) -> None:
    """No more chunks are to come, whether or not it was decided what to keep."""
    for layer in prompt_layers(cache):
        layer.deferred = layer.closing = False


def prompt_layers(cache: object) -> list[PromptLayer]:
    """Return the layers of a cache that evict; none for anything that is no such cache."""
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, PromptLayer)]


def generating_parts(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the model and the models in it that generate with the same decoder: some hand over to those."""
    decoder = decoder_of(model)
    parts = [part for part in model.modules() if part is not model and isinstance(part, PreTrainedModel)]
    return [model, *(part for part in parts if part.can_generate() and decoder_of(part) is decoder)]


class Following:
    """Keeps the methods by which `generate` reads prompts wrapped for one model; released when collected."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        weakref.finalize(self, _release, _acquire(model))

    def __deepcopy__(self, memo: dict[int, Any]) -> Following:
        model = self._model()
        if model is None:
            raise RuntimeError("a cache cannot be copied after its model is gone")
        return Following(model)


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
        defer(cache)
        try:
            with _numbered(self, cache):
                out = prefill(self, *args, **kwargs)
        except BaseException:
            give_up(cache)
            raise
        for layer in prompt_layers(cache):
            layer.closing = layer.deferred
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
            and prompt_layers(cache)
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
_lock = threading.RLock()
_wrapped: dict[tuple[type, str], tuple[Method, Method, int]] = {}  # the original, its wrapper, and how many hold it


def _acquire(model: PreTrainedModel) -> list[tuple[type, str]]:
    owners = {
        (next(c for c in type(part).__mro__ if name in vars(c)), name)
        for part in generating_parts(model)
        for name in _WRAPS
        if hasattr(type(part), name)
    }
    with _lock:
        for owner, name in owners:
            if (owner, name) not in _wrapped:
                original = vars(owner)[name]
                wrapper = _WRAPS[name](original)
                setattr(owner, name, wrapper)
                _wrapped[owner, name] = original, wrapper, 0
            original, wrapper, holders = _wrapped[owner, name]
            _wrapped[owner, name] = original, wrapper, holders + 1
    return list(owners)


def _release(held: list[tuple[type, str]]) -> None:
    with _lock:
        for owner, name in held:
            original, wrapper, holders = _wrapped[owner, name]
            _wrapped[owner, name] = original, wrapper, holders - 1
            if holders == 1:
                del _wrapped[owner, name]
                if vars(owner).get(name) is wrapper:
                    setattr(owner, name, original)


def _cache_among(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DynamicCache | None:
    name = cache_argument(model)
    caches = [a[name] for a in (*args, *kwargs.values(), kwargs) if isinstance(a, dict) and name in a]
    return next((cache for cache in caches if prompt_layers(cache)), None)


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
