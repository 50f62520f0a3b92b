"""Phases of a cache layer's life: empty, reading a prompt, or holding what was kept of it.

A layer holds one phase, and replaces it whole: no phase has a field that is set later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from decantkv.cache.positions import STRAIGHT, Slots
from decantkv.cache.stores.dense import DenseStore
from decantkv.cache.stores.store import Store
from decantkv.hf.attention_hook import AttentionCall
from decantkv.selection.selector import Kept

if TYPE_CHECKING:
    from decantkv.cache.layer import EvictingLayer

Listening = Callable[["EvictingLayer", AttentionCall, tuple[Tensor, ...]], None]


@dataclass(frozen=True)
class Empty:
    """No prompt came yet."""


@dataclass(frozen=True)
class Reading:
    """A prompt's first tokens, or all of them, are here, and their attention call is still to come.

    Attributes:
        keys: [B, H, N, D]; values: [B, H, N, Dv]; of all tokens that came so far.
        new: how many of them the last update brought.
        lse: the window's output and log-sum-exp, where the attention gave them; else why not.
    """

    keys: Tensor
    values: Tensor
    new: int
    lse: tuple[Tensor, Tensor] | str = ""
    slots: ClassVar[Slots] = STRAIGHT
    rehearsed: ClassVar[tuple[Tensor, ...]] = ()


@dataclass(frozen=True)
class Waiting:
    """A prompt that comes in chunks: one or more were attended to, and nothing is decided yet.

    Attributes:
        buffer: the chunks' keys and values together, or what `max_kv_tokens` left of them.
        new: tokens of the last update.
        call: the last chunk's attention call, with the tail of all chunks' queries; its mask is a `PromptMask` where
            the model's own no longer tells.
        held: real tokens of each row, where the layer attends to later chunks itself; () where the model does.
        slots: which of the prompt's tokens are stored.
        rehearsed: [B, HK, N] what queries of a rehearsal make of the prompt's keys; () before one.
    """

    buffer: DenseStore
    new: int
    call: AttentionCall
    held: tuple[int, ...]
    slots: Slots
    rehearsed: tuple[Tensor, ...] = ()
    lse: ClassVar[str] = "the prompt came in chunks"

    @property
    def keys(self) -> Tensor:
        """[B, H, N, D]."""
        return self.buffer.keys

    @property
    def values(self) -> Tensor:
        """[B, H, N, Dv]."""
        return self.buffer.values


@dataclass(frozen=True)
class Rehearsing:
    """A passage is run over a waiting prompt, in the prompt's own buffer.

    Attributes:
        prompt: what the layer goes back to.
        listen: takes the passage's attention call, and the output and log-sum-exp where they are known.
        own: whether the layer attends by itself, if it does so to the prompt's chunks.
        new: tokens of the last update.
        lse: the output and the log-sum-exp; () where the attention did not give them.
    """

    prompt: Waiting
    listen: Listening
    own: bool
    new: int = 0
    lse: tuple[Tensor, ...] = ()

    @property
    def keys(self) -> Tensor:
        """[B, H, N + m, D]."""
        return self.prompt.keys

    @property
    def values(self) -> Tensor:
        """[B, H, N + m, Dv]."""
        return self.prompt.values

    @property
    def held(self) -> tuple[int, ...]:
        """As in `Waiting`, while the passage runs."""
        return self.prompt.held if self.own else ()


class Answer:
    """An answer's state for later evictions; this class, of answers that are kept whole, has none."""

    evicted: ClassVar[bool] = False
    steady = True  # a step changes what it holds in place alone, so that a graph can hold it

    def crop(self, removed: int, logical: int) -> None:
        """The newest `removed` tokens are gone, `logical` are left."""

    def standing(self) -> tuple[Any, ...]:
        """Return the argument of `go_back`; nothing is copied."""
        return ()

    def go_back(self, standing: tuple[Any, ...]) -> None:
        """Forget what a forward that was interrupted or failed left."""

    def select_rows(self, rows: Tensor) -> None:
        """Batch rows in a new order, repeated or left out."""

    def mark(self) -> Tensor | None:
        """Return the argument of `back_to`."""
        return None

    def back_to(self, mark: Tensor | None) -> None:
        """Forget in place what was remembered since."""

    def state(self) -> dict[str, Tensor]:
        """Return the answer as plain tensors."""
        return {}


KEPT_WHOLE = Answer()


@dataclass(frozen=True)
class Whole:
    """A prompt is stored, and nothing was evicted from it."""

    store: Store
    answer: Answer


@dataclass(frozen=True)
class Evicted(Whole):
    """A prompt was evicted; `kept` says which tokens the last eviction left, those since being the store's newest."""

    kept: Kept


Prompt = Reading | Waiting
Phase = Empty | Reading | Waiting | Rehearsing | Whole | Evicted
EMPTY = Empty()
