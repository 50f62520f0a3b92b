"""Watch the model's own attention calls: pass-through wrappers, in place only while a `Hold` is open.

transformers passes no cache to its attention functions. So a cache layer registers itself when it gets keys and values
(`expect`), and the next attention call over those keys is passed to it.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import modeling_utils
from transformers.cache_utils import Cache

from decantkv.base.versions import BEYOND, OLDEST, transformers_fits

Attention = Callable[..., Any]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention call.

    Attributes:
        query: [B, HQ, q, D] after norms and RoPE.
        key: [B, H, N, D]; value: [B, H, N, Dv]; neither repeated.
        mask: the backend's own: None, a tensor, or a BlockMask.
        scale: factor of q·k.
        softcap: soft cap of the logits, or None.
        sink_logits: [HQ] learned sinks, or None.
        backend: name of the attention implementation, "eager", "sdpa", ...
        module: the attention module that called.
        causal: whether, without a mask, tokens see only earlier ones.
        dropout: share of weights dropped.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    scale: float
    softcap: float | None
    sink_logits: Tensor | None
    backend: str
    module: nn.Module
    causal: bool = True
    dropout: float = 0.0

    @property
    def attention_class(self) -> str:
        """The module's class name."""
        return type(self.module).__name__


@dataclass(frozen=True)
class CallTerms:
    """The remembered terms of an attention call: no keys, no values, and no reference that keeps the model alive.

    Attributes:
        scale, softcap, sink_logits, backend: as in the call.
        mask: the mask's last row, which says what the call's last token sees.
        reference: weak reference to the module that called.
    """

    scale: float
    softcap: float | None
    sink_logits: Tensor | None
    backend: str
    mask: Any
    reference: weakref.ref[nn.Module]

    @classmethod
    def of(cls, call: AttentionCall) -> CallTerms:
        """Return the terms of a call."""
        mask = call.mask
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[2] > 1:
            mask = mask[:, :, -1:].clone()
        return cls(call.scale, call.softcap, call.sink_logits, call.backend, mask, weakref.ref(call.module))

    def over(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        """Return a causal call of these terms over other tensors, without a mask."""
        return AttentionCall(
            query, key, value, None, self.scale, self.softcap, self.sink_logits, self.backend, self.module
        )

    @property
    def module(self) -> nn.Module:
        """The attention module that called.

        Raises:
            RuntimeError: it is gone.
        """
        module = self.reference()
        if module is None:
            raise RuntimeError("the cache's model is gone")
        return module

    @property
    def attention_class(self) -> str:
        """The module's class name."""
        return type(self.module).__name__


class Listener(Protocol):
    """A cache layer that waits for its attention call."""

    layer_idx: int
    cache_id: int

    def attend(self, call: AttentionCall) -> Tensor | None:
        """Return the attention's output [B, q, HQ, Dv] if the layer computes it itself, over its own store."""

    def before_attention(self, call: AttentionCall) -> Any:
        """Return the mask for the model's attention."""

    def after_attention(self, call: AttentionCall) -> None:
        """Evict if the prompt ends here; called after the attention."""


class UnsupportedModelError(ValueError):
    """The model computes attention in a way that eviction cannot follow."""


def uncompiled(function: Function) -> Function:
    """Return the function, excluded from `torch.compile` of a forward around it.

    Its decisions depend on numbers that a compiled graph must not fix: lengths, and which layer waits for a call.
    """
    left_alone: Function = torch.compiler.disable(function)
    return left_alone


def check_version(version: str) -> None:
    """Raise ImportError unless this transformers version is one that decantkv was made for."""
    if not transformers_fits(version):
        raise ImportError(f"transformers: expected a version from {OLDEST} and below {BEYOND}, got {version}")


check_version(transformers.__version__)

_slot = threading.local()


class _Waiting(NamedTuple):
    """A layer that waits for its attention call, held weakly: an interrupted forward must not keep its cache alive.

    Attributes:
        listener: the layer.
        key: the very tensor that its `update` returned.
        derived: whether the call's key may also be made from that tensor, as models with latent caches do.
    """

    listener: weakref.ref[Listener]
    key: weakref.ref[Tensor]
    derived: bool = True


def expect(listener: Listener, key: Tensor) -> None:
    """Pass the next attention call over `key` to `listener`, whose `update` returned that tensor.

    Call it last in `update`, so that no error there leaves the layer waiting.

    Raises:
        UnsupportedModelError: the layer before it is still waiting for its own call.
    """
    before: _Waiting | None = getattr(_slot, "waiting", None)
    waiting = None if before is None else before.listener()
    if waiting is not None and waiting.cache_id == listener.cache_id and waiting.layer_idx < listener.layer_idx:
        forget()
        raise not_understood(waiting.layer_idx)
    _slot.waiting = _Waiting(weakref.ref(listener), weakref.ref(key))


def pending() -> Listener | None:
    """Return the layer that still waits for its attention call, or None."""
    waiting: _Waiting | None = getattr(_slot, "waiting", None)
    return None if waiting is None else waiting.listener()


def forget() -> None:
    """Let no layer wait any more: a forward ended or failed."""
    _slot.waiting = None


def _claim(module: nn.Module, key: Tensor) -> Listener | None:
    """Return the layer that this attention call belongs to, which then waits no more; None if no layer waits for it.

    A layer that still waits after an interrupted forward does not get the call of a later one.
    """
    waiting: _Waiting | None = getattr(_slot, "waiting", None)
    if waiting is None:
        return None
    listener = waiting.listener()
    if waiting.key() is not key and (listener is None or not waiting.derived or not _reads(module, listener)):
        _slot.waiting = None if listener is None else waiting._replace(derived=False)
        return None
    _slot.waiting = None
    return listener


def _reads(module: nn.Module, listener: Listener) -> bool:
    """Return whether `module`, which attends now, was given the listener's cache.

    This is checked only for models that attend to keys made from what the cache returned.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_locals.get("self") is module:
            caches = [x for x in frame.f_locals.values() if isinstance(x, Cache)]
            if any(layer is listener for cache in caches for layer in cache.layers):
                return True
        frame = frame.f_back
    return False


def not_understood(layer_idx: int, model: str = "the model") -> UnsupportedModelError:
    """Return the error for a layer whose attention call did not go through transformers' attention interface."""
    return UnsupportedModelError(
        f"model: expected attention through transformers' attention interface, "
        f"got another kind in layer {layer_idx} of {model}; its cache cannot be evicted"
    )


def interrupted(layer_idx: int) -> UnsupportedModelError:
    """Return the error for a layer that stored tokens in a forward which was interrupted before it attended to them."""
    return UnsupportedModelError(
        f"cache: expected one whose last forward came to its end, got one that stopped in layer {layer_idx}, by an "
        "interrupt or because the model attends without transformers' attention interface; make a new cache or reset() "
        "this one"
    )


class Hold:
    """Keeps the wrappers in place for one model; released when closed or collected."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.closed = weakref.ref(model), False
        weakref.finalize(self, thoroughly, self._restore)
        try:
            self._acquire(model)
        except BaseException:
            self.close()
            raise

    def model(self) -> nn.Module:
        """The model held.

        Raises:
            RuntimeError: it is gone.
        """
        model = self._model()
        if model is None:
            raise RuntimeError("the cache's model is gone")
        return model

    def close(self) -> None:
        """Stop watching; the last holder restores every function."""
        self.closed = True
        thoroughly(self._restore)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        model = self._model()
        if model is None:
            raise RuntimeError("a cache cannot be copied after its model is gone")
        return type(self)(model)

    def _acquire(self, model: nn.Module) -> None:
        """Wrap what is not wrapped yet, and become one of its holders."""
        _acquire(self, model)

    @staticmethod
    def _restore() -> None:
        """Restore functions without holders; calling it again does no harm."""
        _restore()


def any_left(holders: Iterable[Hold]) -> bool:
    """Return whether a holder is alive and not closed."""
    return any(not hold.closed for hold in holders)


class _Patch:
    """One wrapped function: its place, the original, and its holders."""

    def __init__(self, home: MutableMapping[str, Any], name: str, backend: str) -> None:
        self.home, self.name = home, name
        self.holders: weakref.WeakSet[Hold] = weakref.WeakSet()
        self.original: Attention = home[name]
        self.wrapper = _wrap(self.original, backend)

    def restore(self) -> None:
        """Put the function back, unless other code has replaced the wrapper since."""
        if self.home.get(self.name) is self.wrapper:
            self.home[self.name] = self.original


# Around every change that holders share. Holders end in finalizers, which may run inside any allocation, and by
# interrupts between any two steps: changes and what undoes them go by what is there, and may nest and be repeated.
lock = threading.RLock()
_patches: dict[tuple[int, str], _Patch] = {}


def thoroughly(undo: Callable[[], None]) -> None:
    """Run `undo` under the lock, and once more if an interrupt came in between."""
    try:
        with lock:
            undo()
    except BaseException:
        with lock:
            undo()
        raise


def _restore() -> None:
    """Restore the functions that no open `Hold` needs."""
    for key, patch in list(_patches.items()):
        if not any_left(patch.holders):
            patch.restore()
            _patches.pop(key, None)


def modeling_files(model: nn.Module) -> list[Any]:
    """Return the Python modules that define the model's parts and use transformers' attention interface."""
    names = {type(part).__module__ for part in model.modules()}
    modules = [sys.modules[name] for name in sorted(names) if name in sys.modules]
    return [module for module in modules if hasattr(module, "ALL_ATTENTION_FUNCTIONS")]


def _acquire(hold: Hold, model: nn.Module) -> None:
    interface = modeling_utils.ALL_ATTENTION_FUNCTIONS
    targets: list[tuple[MutableMapping[str, Any], str, str]] = [
        (interface._global_mapping, name, name) for name in list(interface._global_mapping) if "|" not in name
    ]
    for module in modeling_files(model):
        if hasattr(module, "eager_attention_forward"):
            targets.append((vars(module), "eager_attention_forward", "eager"))
        local = getattr(module.ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
        targets += [(local, name, name) for name in list(local)]
    with lock:
        for home, name, backend in targets:
            key = (id(home), name)
            patch = _patches.get(key)
            if patch is None or home.get(name) not in (patch.original, patch.wrapper):
                patch = _Patch(home, name, backend)
            patch.holders.add(hold)
            _patches[key] = patch
            home[name] = patch.wrapper


def _wants_weights(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """Return whether the model's output is to hold attention weights."""
    wanted = kwargs.get("output_attentions")
    return bool(getattr(getattr(module, "config", None), "output_attentions", False) if wanted is None else wanted)


def _wrap(function: Attention, backend: str) -> Attention:
    @uncompiled
    @functools.wraps(function)
    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        listener = _claim(module, key)
        if listener is None:
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        if kwargs.get("position_bias") is not None:
            raise UnsupportedModelError(
                f"model: expected positions inside queries and keys, got {type(module).__name__} with relative "
                "position biases, which count stored slots"
            )
        scale, causal = kwargs.get("scaling"), kwargs.get("is_causal")
        call = AttentionCall(
            query=query,
            key=key,
            value=value,
            mask=attention_mask,
            scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            softcap=kwargs.get("softcap"),
            sink_logits=kwargs.get("s_aux"),
            backend=backend,
            module=module,
            causal=bool(getattr(module, "is_causal", True) if causal is None else causal),
            dropout=kwargs.get("dropout") or 0.0,
        )
        own = listener.attend(call)
        if own is not None:
            if backend == "eager" and _wants_weights(module, kwargs):
                raise ValueError(
                    "output_attentions: expected False where cache layers attend for themselves, which makes no "
                    "weights, got True; use decode='model' and an allocation that gives heads equally many tokens"
                )
            listener.after_attention(call)
            return own, None
        mask = listener.before_attention(call)
        out = function(module, query, key, value, mask, *args, **kwargs)
        listener.after_attention(call)
        return out

    return attention
