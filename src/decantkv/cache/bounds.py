"""Bounds on what is stored at once, and how: chunks, caps, evictions of the answer, kinds of storage."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from decantkv.base.options import expect_choice, expect_int
from decantkv.base.versions import kernels_run_on
from decantkv.cache.stores import Inner, check_inner
from decantkv.settings import Settings

Decode = Literal["auto", "model", "own"]


@dataclass(frozen=True)
class Bounds:
    """Limits on what is stored at once, beyond the budget that a prompt ends with.

    Attributes:
        prefill_chunk: `generate` reads prompts this many tokens at a time; None: in one piece.
        max_kv_tokens: most tokens per head after each chunk; None: all until the prompt ends.
        every: new tokens between two evictions while an answer is written; None: answers are kept whole.
        decode_budget: tokens kept per head at such an eviction: of everything, or with `protect_prompt` of the answer
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
        if settings.protects_by_row and (self.max_kv_tokens or self.every):
            raise ValueError(
                f"{'max_kv_tokens' if self.max_kv_tokens else 'every'}: expected none beside chats that protect "
                "different places, got both; attach for one chat after the other"
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
        """Return whether layers on a device compute attention themselves."""
        return self.store == "plain" and (self.decode == "own" or (self.decode == "auto" and kernels_run_on(device)))


UNBOUNDED = Bounds()
