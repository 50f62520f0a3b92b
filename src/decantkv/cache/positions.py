"""Bounds on what is stored while a prompt is read in chunks and while an answer is written.

Tokens that outlive a round of eviction lie side by side but come from anywhere in the prompt. `Trail` remembers where
from; a round scores and selects as ever, over what is stored, with each row's own count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from decantkv.base.options import Span, expect_choice, expect_int
from decantkv.base.transfer import to_device
from decantkv.base.versions import kernels_run_on
from decantkv.cache.report import Stopwatch
from decantkv.cache.stores.inner import Inner, check_inner
from decantkv.scoring.window import AttentionWindow
from decantkv.selection.allocation import UNIFORM, Shared
from decantkv.selection.selector import Kept
from decantkv.selection.tensor_parallel import Peers
from decantkv.selection.topk import FILLER
from decantkv.settings import Settings

Decode = Literal["auto", "model", "own"]


@dataclass(frozen=True)
class Bounds:
    """How much may be stored at once, beyond the budget that a prompt ends with.

    Attributes:
        prefill_chunk: `generate` reads prompts this many tokens at a time; None: in one piece.
        max_kv_tokens: tokens a head stores at most after each chunk; None: all until the prompt ends.
        every: new tokens between two evictions while an answer is written; None: answers are kept whole.
        decode_budget: tokens a head keeps at such an eviction: of everything, or with `protect_prompt` of the answer
            alone. None: as many as the prompt's budget gave.
        protect_prompt: what the prompt's eviction kept stays for good.
        decode: who attends to what was kept: "model", the model's own attention, through masks; "own", attention that
            takes lengths and runs inside CUDA graphs; "auto": "own" on CUDA where the kernels are installed.
        store: where kept tokens live: "plain" buffers, or a layer of transformers' own: "fp8" or "static". The latter
            two are for allocations that give heads equally many tokens, and leave attention to the model.
        reuse_lse: a prompt's own attention also says its softmax denominators, so that scoring reads the keys once.
    """

    prefill_chunk: int | None = None
    max_kv_tokens: int | None = None
    every: int | None = None
    decode_budget: int | None = None
    protect_prompt: bool = False
    decode: Decode = "auto"
    store: Inner = "plain"
    reuse_lse: bool = False

    def in_force(self) -> dict[str, Any]:
        """Every bound by its name, as JSON can hold it."""
        return dataclasses.asdict(self)

    def check(self, settings: Settings) -> Bounds:
        """These bounds, if they can be held under the settings.

        Raises:
            TypeError, ValueError: an argument out of its range, or one that another one excludes.
        """
        for name in ("prefill_chunk", "max_kv_tokens", "every", "decode_budget"):
            if getattr(self, name) is not None:
                expect_int(name, getattr(self, name), at_least=1)
        expect_choice("decode", self.decode, get_args(Decode))
        expect_choice("store", self.store, get_args(Inner))
        check_inner(self.store)
        if self.store != "plain" and (self.decode == "own" or settings.allocation.ragged):
            other = "decode='own'" if self.decode == "own" else f"allocation={settings.allocation.name!r}"
            raise ValueError(f"store: expected 'plain' beside {other}, got {self.store!r}")
        method = settings.method
        if not isinstance(self.reuse_lse, bool):
            raise TypeError(f"reuse_lse: expected True or False, got {self.reuse_lse!r}")
        if self.reuse_lse and (not method.by_window or "queries" in method.needs):
            raise ValueError(
                f"reuse_lse: expected a method that scores by the last queries' attention, got {method.describe()}"
            )
        if self.reuse_lse and settings.impl == "reference":
            raise ValueError("reuse_lse: expected an implementation that reads keys once, got impl='reference'")
        taken = {"max_kv_tokens": self.max_kv_tokens, "every": self.every, "reuse_lse": self.reuse_lse}
        if settings.rehearsal is not None and (beside := [name for name, value in taken.items() if value]):
            raise ValueError(
                f"{beside[0]}: expected none beside rehearsal, which needs the whole prompt and scores by tokens that "
                f"come after it, got {taken[beside[0]]!r}"
            )
        if self.max_kv_tokens is not None:
            if self.prefill_chunk is None:
                raise ValueError("prefill_chunk: expected the length of a chunk beside max_kv_tokens, got None")
            least = settings.rounds_keep()
            if self.max_kv_tokens < least:
                raise ValueError(
                    f"max_kv_tokens: expected at least {least}, which window, sinks and protected spans always keep, "
                    f"got {self.max_kv_tokens}"
                )
            rule = settings.allocation
            if settings.protect and (rule.over_layers or (rule.by_layer and rule.ragged)):
                raise ValueError(
                    "max_kv_tokens: expected none beside protect under an allocation over all layers, got both"
                )
        if self.every is None and (self.decode_budget is not None or self.protect_prompt):
            raise ValueError("every: expected a number of tokens beside decode_budget or protect_prompt, got None")
        if self.every is not None and settings.allocation.ragged:
            raise ValueError(
                f"every: expected an allocation that gives heads equally many tokens, got {settings.allocation.name!r}"
            )
        always, names = settings.rounds_keep(), "window, sinks and protected spans"
        if self.protect_prompt:  # which holds the spans
            always, names = method.window + settings.sinks, "window and sinks"
        if self.decode_budget is not None and self.decode_budget < always:
            raise ValueError(
                f"decode_budget: expected at least {always} tokens, which {names} always keep, got {self.decode_budget}"
            )
        if (self.every or self.max_kv_tokens) and (method.renumbers or "queries" in method.needs):
            name = "every" if self.every else "max_kv_tokens"
            raise ValueError(f"{name}: expected a method that looks at the last queries alone, got {method.describe()}")
        return self

    def own(self, device: torch.device) -> bool:
        """Whether layers on a device attend for themselves."""
        return self.store == "plain" and (self.decode == "own" or (self.decode == "auto" and kernels_run_on(device)))


UNBOUNDED = Bounds()


@dataclass(frozen=True)
class Trail:
    """Where the stored slots of a prompt come from.

    Attributes:
        positions: [B, H, M] int64 prompt positions, ascending; FILLER on the left.
        held: real tokens each row stores; seen: real tokens each row was given. Pads count in neither.
    """

    positions: Tensor
    held: tuple[int, ...]
    seen: tuple[int, ...]

    @classmethod
    def start(cls, batch: int, heads: int, device: torch.device) -> Trail:
        """Before the first chunk."""
        none = (0,) * batch
        return cls(torch.zeros(batch, heads, 0, dtype=torch.int64, device=device), none, none)

    def extend(self, new: int, logical: int, held: Sequence[int]) -> Trail:
        """After `new` more tokens, the last at position `logical` − 1; `held` real ones are stored now."""
        later = torch.arange(logical - new, logical, device=self.positions.device)
        later = later.expand(*self.positions.shape[:2], -1)
        seen = tuple(all_ + now - before for all_, now, before in zip(self.seen, held, self.held, strict=True))
        return Trail(torch.cat([self.positions, later], 2), tuple(held), seen)

    def keep(self, kept: Kept, held: Sequence[int]) -> Trail:
        """After all but `kept` slots are gone, of which `held` are real tokens of each row."""
        return Trail(self.origin(kept).indices, tuple(held), self.seen)

    def origin(self, kept: Kept) -> Kept:
        """The same choice by prompt positions instead of slots."""
        found = self.positions.gather(2, kept.indices.clamp_min(0))
        return Kept(found.masked_fill(kept.indices == FILLER, FILLER), kept.counts, kept.rows)

    def inside(self, spans: Sequence[Span], starts: Sequence[int]) -> Tensor:
        """[B, H, M] bool: which slots hold a token of the spans, which count from where each row starts."""
        place = self.positions - to_device(starts, self.positions.device)[:, None, None]
        within = torch.zeros_like(place, dtype=torch.bool)
        for start, stop in spans:
            within |= (place >= start) & (place < stop)
        return within & (self.positions != FILLER)


def choose(
    settings: Settings,
    win: AttentionWindow,
    *,
    lengths: Sequence[int],
    n_keep: Sequence[int],
    forced: Tensor | None,
    shared: bool,
    peers: Peers | None = None,
    stopwatch: Stopwatch | None = None,
) -> Kept:
    """One round: the slots each head keeps, by the settings' scores; every head of a row keeps equally many.

    Args:
        win: over the stored tokens.
        lengths: real tokens stored by each row; n_keep: how many of them stay.
        forced: [B, H, N] bool, slots that stay whatever their score; None: none beyond window and sinks.
        shared: one set for all heads.
        peers: processes that hold the layer's other heads.
        stopwatch: told the time of scoring and of selection.
    """
    one = shared or isinstance(settings.allocation, Shared)
    plain = dataclasses.replace(settings, protect=(), allocation=Shared() if one else UNIFORM)
    stopwatch = stopwatch or Stopwatch()
    with stopwatch.measure("scoring", win.k.device):
        scores = plain.score(win)
    with stopwatch.measure("selection", win.k.device):
        return plain.choose(scores, win=win, lengths=lengths, shared=shared, n_keep=n_keep, forced=forced, peers=peers)
