"""State that the layers of one cache share: their policy for prompts, and the model of the cache."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from decantkv.cache.bounds import UNBOUNDED, Bounds
from decantkv.cache.identity import Adapters
from decantkv.cache.phases import KEPT_WHOLE, Answer, Prompt, Waiting
from decantkv.hf.attention_hook import AttentionCall, CallTerms
from decantkv.hf.masks import PromptMask
from decantkv.scoring.rehearsal import Rehearsal
from decantkv.selection.prompt_budget import PromptBudget
from decantkv.settings import Settings

if TYPE_CHECKING:
    from decantkv.cache.layer import EvictingLayer


class Policy:
    """The treatment of a prompt that was read. Policies do not change while a cache lives.

    Attributes:
        rows: how many of the last queries a decision looks at.
        bounds: on what is stored at once.
        reads_ids: a decision looks at the prompt's token ids.
        every_query: a decision looks at all of the prompt's queries.
        listens: `attended` wants every attention call, also when no slot is hidden.
        uneven: layers of one cache may store different numbers of tokens.
        rehearsal: what is run over a prompt before it is decided what to keep.
        attends_twice: the model makes two attention calls a layer, of which the cache sees one.
    """

    rows: int = 1
    bounds: Bounds = UNBOUNDED
    reads_ids: bool = False
    every_query: bool = False
    listens: bool = False
    uneven: bool = False
    attends_twice: bool = False
    rehearsal: Rehearsal | None = None

    def decide(self, layer: EvictingLayer, prompt: Prompt, call: AttentionCall, seen: PromptMask) -> None:
        """The prompt was read: store what stays of it, by `layer.hold`."""
        raise NotImplementedError

    def attended(self, layer: EvictingLayer, call: AttentionCall) -> None:
        """Tokens after the prompt have attended to what `layer` holds."""

    def thinned(self, layer: EvictingLayer, prompt: Waiting, call: AttentionCall) -> Waiting:
        """Return the prompt after a chunk, of which a cap may leave less."""
        return prompt

    def due(self, layer: EvictingLayer) -> bool:
        """Return whether an answer has come far enough for its next eviction."""
        return False

    def renew(self, layer: EvictingLayer, terms: CallTerms) -> None:
        """Evict from prompt and answer alike."""

    def answer_of(self, state: Mapping[str, Tensor], batch: int, logical: int) -> Answer:
        """Return the answer that `Answer.state` described."""
        return KEPT_WHOLE


class CacheState:
    """The model of a cache, and state of the cache as a whole.

    Attributes:
        cache_id: tells caches apart.
        owner: the model that the cache is for.
        holds: what must stay in place while a layer lives, whatever cache it is moved to.
        expected: the length that prompt and answer may reach; 0 if unknown.
        adapters: those that were active when the prompt was read.
    """

    def __init__(self, cache_id: int, model: nn.Module) -> None:
        self.cache_id, self.owner = cache_id, weakref.ref(model)
        self.holds: tuple[object, ...] = ()
        self.expected = 0
        self.adapters: Adapters = ()
        self._budget: PromptBudget | None = None
        self._ids: tuple[Tensor | None, ...] = ()

    def note_ids(self, ids: Tensor | None, *, begins: bool) -> None:
        """Remember the token ids [B, n] of a prompt's forward, or of a chunk's; None: it was given embeddings."""
        self._ids, self._budget = (ids,) if begins else (*self._ids, ids), None

    def prompt_budget(self, settings: Settings, lengths: Sequence[int]) -> PromptBudget:
        """Return what prompts of these lengths keep, made by the first layer that asks.

        Raises:
            ValueError: as `Settings.prompt_budget`, or the settings have chats and the prompt came as embeddings.
        """
        if self._budget is None or self._budget.lengths != tuple(lengths):
            rows = None
            if settings.chats:
                came = [ids for ids in self._ids if ids is not None]
                if not came or len(came) < len(self._ids):
                    raise ValueError("chat: expected a prompt that comes as input_ids, got embeddings")
                whole, self._ids = torch.cat(came, 1).tolist(), ()
                rows = [row[len(row) - length :] for row, length in zip(whole, lengths, strict=True)]
            self._budget = settings.prompt_budget(lengths, rows)
        return self._budget
