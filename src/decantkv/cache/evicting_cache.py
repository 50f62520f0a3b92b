"""The evicting cache: transformers' own cache with evicting layers in place of its full-attention ones."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from decantkv.base.chat import Chat
from decantkv.base.options import Allocation, Impl, Span
from decantkv.cache import files, identity
from decantkv.cache.bounds import UNBOUNDED, Bounds, Decode
from decantkv.cache.call_window import window_of
from decantkv.cache.chunked_reading import Following, decide, defer, deferred, empty, evicting_layers, give_up
from decantkv.cache.concat import join
from decantkv.cache.eviction import Eviction
from decantkv.cache.file_checks import understood
from decantkv.cache.forwards import Watch, changing, settle
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.layer_contest import LayerContest
from decantkv.cache.memory import weighed
from decantkv.cache.policy import CacheState, Policy
from decantkv.cache.recorder import Recorder
from decantkv.cache.rehearsal import rehearse
from decantkv.cache.report import Report, storage_bytes
from decantkv.cache.stores import Inner
from decantkv.hf import attention_hook
from decantkv.hf.attention_hook import Hold
from decantkv.hf.door import checked_model, reads_again, text_config
from decantkv.hf.model_parts import cache_argument, device_of, layer_config, rotation
from decantkv.methods import Method
from decantkv.scoring.rehearsal import Rehearsal
from decantkv.selection.allocation import AllocationRule, Shared
from decantkv.selection.budget import Budget
from decantkv.selection.tensor_parallel import Peers
from decantkv.settings import Settings, must_share

__all__ = [
    "EvictingCache",
    "EvictingLayer",
    "cache_argument",
    "cache_bytes",
    "checked_model",
    "decide",
    "defer",
    "deferred",
    "give_up",
    "new_recorder",
    "replace_layers",
    "text_config",
    "window_of",
]

if TYPE_CHECKING:
    from decantkv.decode.graphs import StepGraphs

_serial = itertools.count()
# V of one head is read with K of another by a second attention call, so that only a set shared by all heads is exact
ATTEND_TWICE = frozenset({"diffllama"})
# transformers' layers that hold a window or a state, however long the prompt
BOUNDED_LAYERS = frozenset(
    {"DynamicSlidingWindowLayer", "LinearAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}
)


class EvictingCache(DynamicCache):
    """A cache that keeps a fraction of the prompt; give it to `generate` or to a forward.

    ```python
    cache = EvictingCache(model, method="dropkv", budget=0.05)
    model.generate(**inputs, **{cache_argument(model): cache})
    ```
    `cache_argument(model)` is "past_key_values", or "cache" from transformers 5.24 on.

    Only full-attention layers evict; sliding-window and linear layers keep transformers' own cache.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: str | Method = "dropkv",
        *,
        budget: float | int | str | Budget,
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
    ) -> None:
        """Check everything and prepare empty layers; the model's parameters are not touched.

        Args:
            model: whose prompts this cache will hold; it may be wrapped, see `attach`.
            method: a name, "name:preset", or a `Method`; `options` are the named method's own.
            budget: what is kept: a fraction in (0, 1] or a number of tokens per head, protected ones included.
            allocation: how the budget is spread: "uniform", "shared" (one set for all heads of a layer), "ada",
                "ada-kvpress", "heads", "pyramid", "layer", "global", or a rule; None takes the method's own.
            sinks: first tokens always kept; None takes the method's own.
            protect: spans (start, stop) of prompt positions always kept, "system" or "tools"; see `attach`.
            chat: the prompt as a `Chat`, where `protect` names parts of a chat.
            impl: "auto", "reference", "torch" or "triton".
            rehearsal: see `attach`.
            prefill_chunk: for `attach` only; a loop of your own feeds its chunks under `deferred`.
            max_kv_tokens: tokens that a head stores at most after each chunk; None: all until the prompt ends.
            every: evict again each time this many new tokens were written; None: answers are kept whole.
            decode_budget: tokens that a head keeps then; None: as many as `budget` gave the prompt.
            protect_prompt: keep for good what was kept of the prompt.
            decode: who attends to kept tokens: "model", "own" or "auto", see `attach`.
            store: where kept tokens live: "plain", "fp8" or "static".
            reuse_lse: take softmax denominators from the prompt's own attention.

        Raises:
            TypeError, ValueError: an argument out of its range.
            UnsupportedModelError: a model whose attention cannot be followed.
        """
        settings = Settings.parse(
            method,
            budget=budget,
            allocation=allocation,
            sinks=sinks,
            protect=protect,
            chat=chat,
            impl=impl,
            rehearsal=rehearsal,
            **options,
        )
        bounds = Bounds(prefill_chunk, max_kv_tokens, every, decode_budget, protect_prompt, decode, store, reuse_lse)
        self._prepare(model, settings, new_recorder(settings, bounds), bounds.check(settings))

    @classmethod
    def of(
        cls, model: PreTrainedModel, settings: Settings, recorder: Recorder, bounds: Bounds = UNBOUNDED
    ) -> EvictingCache:
        """Return a cache by parsed settings that reports to `recorder`."""
        cache = cls.__new__(cls)
        cache._prepare(model, settings, recorder, bounds)
        return cache

    def _prepare(self, model: PreTrainedModel, settings: Settings, recorder: Recorder, bounds: Bounds) -> None:
        model = checked_model(model)
        super().__init__(config=text_config(model))
        self.settings, self.recorder, self.bounds = settings, recorder, bounds
        self.notes: dict[str, Any] = {}  # what `save` was given beside the cache's own state
        self.steps: StepGraphs | None = None  # `attach` brings graphs to the generations it sees
        if "stream" in settings.method.needs:
            raise ValueError(
                f"weigh: expected a unit that caches can measure, got {settings.method.describe()}, whose costs need "
                "the residual stream, which only `decantkv.score` is given; use weigh='block'"
            )
        config = text_config(model)
        twice, again = config.model_type in ATTEND_TWICE, reads_again(model)
        if again:
            _check_shared_keys(model, settings, bounds)
        if twice or again:  # attention calls that no layer sees read what is stored, under the model's own mask
            bounds = self.bounds = dataclasses.replace(bounds, decode="model")
        # a latent serves all heads; before 5.17 transformers stored expanded heads, for which the same set is kept
        latents = (getattr(layer_config(config, i), "kv_lora_rank", None) for i in range(config.num_hidden_layers))
        shared = twice or any(rank is not None for rank in latents)
        if shared and settings.allocation.ragged:
            raise must_share(settings.allocation.name)
        peers = Peers.of(model)
        if peers is not None:
            _check_spread(model, settings, shared, peers)
        rotate = rotation(model) if "rotate" in settings.method.needs else None

        # layers that may attend for themselves; one set for heads that share a latent leaves that to the model
        own = settings.allocation.ragged or not (shared or again)
        contest = LayerContest() if settings.allocation.over_layers else None
        policy = Eviction(
            settings, recorder, bounds, shared=shared, rotate=rotate, attends_twice=twice, read_again=again, own=own,
            peers=peers, contest=contest,
        )  # fmt: skip
        recorder.left_alone = replace_layers(self, model, policy)
        self._hold, self._watch = Hold(model), Watch(model)
        evicting_layers(self)[0].cache.holds = self._hold, self._watch, Following(model)

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """As transformers' own; a forward that goes on under other adapters ends here, before any layer has changed."""
        check_adapters(self)
        sizes: tuple[int, int] = super().get_mask_sizes(*args, **kwargs)
        return sizes

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As transformers' own; forwards without a mask end here under other adapters."""
        layer = self.layers[layer_idx]
        if isinstance(layer, EvictingLayer) and layer.place[0] == 0:
            check_adapters(self)
        read: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return read

    def expect_length(self, length: int) -> None:
        """Say how many tokens prompt and answer may reach, so that room for new ones is taken once."""
        for layer in evicting_layers(self):
            layer.cache.expected = length

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the newest tokens: −k removes k, at most all; a positive number is the length to go back to.

        Raises:
            ValueError: that reaches into what the prompt's eviction left; no layer was changed.
        """
        visible = self.get_seq_length()  # with what an interrupted forward stored
        length = max(0, visible + tokens_to_remove) if tokens_to_remove <= 0 else tokens_to_remove
        with changing(self):
            remove = max(0, self.get_seq_length() - length)
            evicting = evicting_layers(self)
            for layer in evicting:
                layer.checked_crop(-remove)
            with _restored_on_error([layer for layer in self.layers if not isinstance(layer, EvictingLayer)]) as others:
                for other in others:
                    if remove or getattr(other, "record_past", False):  # in 4.x, crop(0) empties transformers' layers
                        other.crop(-remove)
            for layer in evicting:
                layer.crop(-remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Rows in a new order, as beam search wants them.

        Raises:
            ValueError: a prompt is being read.
        """
        with changing(self):
            _check_whole(self)
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        with changing(self):
            _check_whole(self)
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows."""
        with changing(self):
            _check_whole(self)
            super().batch_select_indices(indices)

    def reset(self) -> None:
        """Empty again, as after a forward that was interrupted."""
        for layer in self.layers:
            empty(layer)
        if self.steps is not None:
            self.steps.forget()

    def rehearse(self, input_ids: Tensor) -> None:
        """Score the prompt by the queries of these tokens as well, and forget them.

        To be called while the prompt waits, that is inside `deferred(cache)`; what is kept is then decided by the
        queries of all such calls, and no longer by the prompt's last ones.

        Args:
            input_ids: [B, m], run at the positions that follow the prompt.

        Raises:
            ValueError: the cache holds no prompt that waits.
        """
        rehearse(self, input_ids)

    def nbytes(self) -> int:
        """Return the bytes of all keys and values held, by their distinct storages."""
        return cache_bytes(self)

    def report(self) -> Report:
        """Return what was kept and dropped so far."""
        return weighed(self.recorder.report(), self)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        prompt: Tensor | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> None:
        """Write what was kept to a safetensors file, with the settings and fingerprints of model and prompt.

        Args:
            path: replaced only when the new file is whole.
            prompt: the prompt's token ids [B, N], to be compared when the file is loaded.
            notes: what else the file should hold, as JSON can: the loaded cache's `notes`.

        Raises:
            ValueError: a prompt is being read, or the method or allocation is not decantkv's own.
        """
        settle(self)
        about = {
            "settings": files.settings_as_dict(self.settings),
            "bounds": dataclasses.asdict(self.bounds),
            "model": identity.describe(self._hold.model()),
            "prompt": files.prompt_fingerprint(prompt),
            "notes": dict(notes or {}),
        }
        files.write(path, self.layers, about)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: PreTrainedModel, *, prompt: Tensor | None = None
    ) -> EvictingCache:
        """Return the cache that `save` wrote, on the devices of the model's layers.

        Args:
            model: the one that read the prompt: same weights in the same dtype, same configuration, same adapters.
            prompt: token ids [B, N] that must be those given to `save`; None leaves them unchecked.

        Raises:
            ValueError: no such file, one that was changed, or one of another model or prompt.
        """
        about, tensors = files.read(path)
        model = checked_model(model)
        with understood(path):
            if not isinstance(about["model"], dict):
                raise ValueError(
                    "path: expected a file that names the adapters and the configuration of its cache's model, got "
                    f"{path} of an older version, which does not; read the prompt again and save it"
                )
            if differs := identity.difference(about["model"], identity.describe(model)):
                raise ValueError(f"model: expected the one whose cache {path} holds, got one with {differs}")
            if prompt is not None and about["prompt"] != files.prompt_fingerprint(prompt):
                raise ValueError(f"prompt: expected the one whose cache {path} holds, got another")
            settings = files.settings_from_dict(about["settings"])
            bounds = Bounds(**about["bounds"]).check(settings)
            cache = cls.of(model, settings, new_recorder(settings, bounds), bounds)
            cache.recorder.loaded, cache.notes = True, about.get("notes") or {}
            check_adapters(cache)
            files.restore(cache.layers, about, tensors, layer_devices(model, len(cache.layers)))
        return cache

    @classmethod
    def cat(cls, caches: Sequence[EvictingCache]) -> EvictingCache:
        """The rows of several caches as one batch; the caches stay as they are.

        Prompts that were read in groups go on together: give the next forward the ids (or the attention mask) of all
        rows, padded on the left to the longest.

        Raises:
            ValueError: none, an empty one, caches of different models or settings, or prompts of unequal padded
                length where the model has layers that keep positions of their own.
        """
        if not caches:
            raise ValueError("caches: expected at least one, got none")
        for cache in caches:
            settle(cache)
        first = caches[0]
        model = first._hold.model()
        for other in caches[1:]:
            if other._hold.model() is not model or (other.settings, other.bounds) != (first.settings, first.bounds):
                raise ValueError("caches: expected caches of one model and one setting, got different ones")
        if len({evicting_layers(cache)[0].cache.adapters for cache in caches}) > 1:
            raise ValueError("caches: expected caches of the same active adapters, got different ones")
        joined = cls.of(model, first.settings, first.recorder, first.bounds)
        evicting_layers(joined)[0].cache.adapters = evicting_layers(first)[0].cache.adapters
        for i, layer in enumerate(joined.layers):
            join(layer, [cache.layers[i] for cache in caches])
        return joined


@attention_hook.uncompiled
def check_adapters(cache: DynamicCache) -> None:
    """Note the adapters that read a prompt; raise ValueError where others act when it goes on.

    To be called before any layer has taken the new tokens.
    """
    layers = evicting_layers(cache)
    model = layers[0].cache.owner() if layers else None
    if not isinstance(model, nn.Module):
        return
    acting = identity.active_adapters(model)
    if not layers[0].is_initialized:
        layers[0].cache.adapters = acting
    elif layers[0].cache.adapters != acting:
        raise ValueError(
            "cache: expected the adapters and scales that were active when its prompt was read, got others; switch "
            "them back or read the prompt again"
        )


@contextmanager
def _restored_on_error(layers: list[CacheLayerMixin]) -> Iterator[list[CacheLayerMixin]]:
    """The layers; if the block fails, each has the tensors and lengths again that it had."""
    before = [dict(vars(layer)) for layer in layers]
    try:
        yield layers
    except BaseException:
        for layer, attributes in zip(layers, before, strict=True):
            vars(layer).update(attributes)
        raise


def _check_whole(cache: DynamicCache) -> None:
    """Raise where rows would move while a prompt is being read: its chunks come in the old order."""
    if any(layer.reading for layer in evicting_layers(cache)):
        raise ValueError(
            "cache: expected a prompt that was read to its end, got one that comes in chunks; its rows stay"
        )


def new_recorder(settings: Settings, bounds: Bounds = UNBOUNDED) -> Recorder:
    """Return an empty record of what these settings do."""
    return Recorder(settings.method.describe(), str(settings.budget), settings.in_force() | bounds.in_force())


def _check_shared_keys(model: PreTrainedModel, settings: Settings, bounds: Bounds) -> None:
    """Raise where the layers that read an earlier layer's keys would read something else than that layer does."""
    why = f"for {type(model).__name__}, whose later layers read an earlier layer's keys"
    rule = settings.allocation
    if rule.by_layer or rule.ragged:
        raise ValueError(f"allocation: expected 'uniform' or 'shared' {why}, got {rule.name!r}")
    if bounds.decode == "own":
        raise ValueError(f"decode: expected 'model' or 'auto' {why}, got 'own'")


def _check_spread(model: PreTrainedModel, settings: Settings, shared: bool, peers: Peers) -> None:
    """Each process of a tensor-parallel model sees its own heads; one exchange a layer is all they agree by."""
    method, rule = settings.method, settings.allocation
    if shared:
        raise ValueError(
            f"model: expected heads that store tokens of their own where {peers.size} processes share them, got "
            f"{type(model).__name__}, whose heads share one set"
        )
    if getattr(method, "weigh", "value") in ("block", "stream"):
        raise ValueError(
            f"weigh: expected a cost of one head's own for a model spread over {peers.size} processes, got "
            f"{getattr(method, 'weigh', None)!r}, which adds up all heads; use 'head'"
        )
    if rule.over_layers:
        raise ValueError(
            f"allocation: expected one that is settled layer by layer for a model spread over {peers.size} processes, "
            f"got {rule.name!r}; use 'ada', 'heads' or 'uniform'"
        )
    if (method.shared_by_heads or isinstance(rule, Shared)) and type(method).rank is not Method.rank:
        raise ValueError(
            f"allocation: expected one that tells heads apart with {method.name} for a model spread over {peers.size} "
            "processes, since its second stage looks at all heads again, got 'shared'; use 'uniform' or 'ada'"
        )


def layer_devices(model: PreTrainedModel, number: int) -> list[torch.device]:
    """Return the device of the weights of each of the model's first `number` layers."""
    devices = [model.device] * number
    for part in model.modules():
        index = getattr(part, "layer_idx", None)
        if isinstance(index, int) and 0 <= index < number:
            devices[index] = device_of(part) or devices[index]
    return devices


def is_full(layer: CacheLayerMixin, config: Any) -> bool:
    """Return whether transformers' layer keeps every token: full attention, or a window as long as the context."""
    if type(layer) is DynamicLayer:
        return True
    if (
        type(layer) is not DynamicSlidingWindowLayer
    ):  # a window beside a linear layer's state, which ours would not hold
        return False
    window, context = getattr(layer, "sliding_window", None), getattr(config, "max_position_embeddings", None)
    return isinstance(window, int) and isinstance(context, int) and window >= context


def replace_layers(cache: DynamicCache, model: PreTrainedModel, policy: Policy) -> int:
    """Put layers of this policy in place of the cache's full-attention ones; return how many others stay.

    Raises:
        ValueError: there is no full-attention layer to evict from.
    """
    config = text_config(model)
    if not cache.layers:
        cache.layers = [DynamicLayer() for _ in range(config.num_hidden_layers)]
    cache.layer_class_to_replicate = None
    other = getattr(config, "cross_attention_layers", None) or ()  # these hold an image's keys, not the prompt's
    full = [i for i, layer in enumerate(cache.layers) if is_full(layer, config) and i not in other]
    if not full:
        raise ValueError(
            f"model: expected at least one full-attention layer, got {type(model).__name__} whose layers all have "
            f"{_own_caches(cache)}"
        )
    state = CacheState(next(_serial), model)
    for place, i in enumerate(full):
        cache.layers[i] = EvictingLayer(i, (place, len(full)), policy, state)
    return len(cache.layers) - len(full)


def _own_caches(cache: DynamicCache) -> str:
    """Return what a cache's layers are, none of which can be evicted from."""
    names = sorted({type(layer).__name__ for layer in cache.layers})
    unbounded = [name for name in names if name not in BOUNDED_LAYERS]
    if not unbounded:
        return "bounded caches of their own"
    return f"caches of a kind that eviction does not know: {', '.join(unbounded)}"


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of a cache's keys and values by their distinct storages, for any transformers cache."""
    tensors: list[Tensor] = []
    for layer in cache.layers:
        found = layer.tensors() if isinstance(layer, EvictingLayer) else [layer.keys, layer.values]
        tensors += [x for x in found if isinstance(x, Tensor)]
    return storage_bytes(tensors)
