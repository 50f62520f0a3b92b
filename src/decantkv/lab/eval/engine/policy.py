"""What a table compares: the full cache, methods under settings, and quantised caches."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from decantkv.methods import resolve
from decantkv.scoring.rehearsal import Rehearsal
from decantkv.selection.budget import Budget
from decantkv.settings import Settings

FULL = "full"
QUESTION = "question"
_QUANTISED = re.compile(r"quantised-(\d+)bit")
_OPTIONS = re.compile(r"([\w:.-]+?)(?:\[([^\]]*)\])?")
BITS = (2, 4, 8)


@dataclass(frozen=True)
class Policy:
    """One line of a table.

    Attributes:
        label: as typed, e.g. "dropkv", "snapkv:shared", "dropkv[allocation=ada,pool=avg]", "quantised-4bit", "full".
        kind: "full", "evict" or "quantise".
        method: the method's name or name:preset, for "evict".
        options: its options and the selection's (allocation, sinks).
        bits: for "quantise".
        protect: keep the passage that the prompt marks as protected, whatever its score ("+protect").
    """

    label: str
    kind: Literal["full", "evict", "quantise"]
    method: str = ""
    options: tuple[tuple[str, object], ...] = ()
    bits: int = 0
    protect: bool = False

    def settings(
        self, budget: str, *, protect: tuple[tuple[int, int], ...] = (), question: Sequence[int] = (0,)
    ) -> Settings:
        """The eviction's settings at a budget.

        Args:
            question: token ids that follow the context, which "rehearsal=question" runs over it: what a rehearsal
                could reach at best.
        """
        options: dict[str, Any] = dict(self.options)
        if options.get("rehearsal") == QUESTION:
            options["rehearsal"] = Rehearsal(questions=(tuple(question),))
        return Settings.parse(self.method, budget=parse_budget(budget), protect=protect, **options)


def parse_policy(label: str) -> Policy:
    """Read one entry of `--method`.

    Raises:
        ValueError, TypeError: an unknown method, preset, option or bit width.
    """
    label = label.strip()
    bare, bracket, after = label.rpartition("]")  # inside brackets "+" joins a rehearsal's sources
    last, plus, protect = after.partition("+")
    named = bare + bracket + last
    if plus and protect != "protect":
        raise ValueError(f"method: expected nothing or +protect after the name, got {label!r}")
    if label == FULL:
        return Policy(label, "full")
    if (quantised := _QUANTISED.fullmatch(label)) is not None:
        bits = int(quantised.group(1))
        if bits not in BITS:
            raise ValueError(f"method: expected quantised-2bit, -4bit or -8bit, got {label!r}")
        return Policy(label, "quantise", bits=bits)
    parts = _OPTIONS.fullmatch(named)
    if parts is None:
        raise ValueError(f"method: expected NAME, NAME:PRESET or NAME[OPTION=VALUE,…], got {label!r}")
    options = tuple(_option(text, label) for text in (parts.group(2) or "").split(",") if text.strip())
    policy = Policy(label, "evict", parts.group(1), options, protect=bool(plus))
    policy.settings("0.5")  # refuse an unknown option now
    return policy


def parse_policies(text: str) -> list[Policy]:
    """Read a comma-separated list; commas inside brackets belong to options."""
    policies = [parse_policy(part) for part in re.split(r",(?![^\[]*\])", text) if part.strip()]
    if not policies:
        raise ValueError(f"method: expected at least one, got {text!r}")
    labels = [policy.label for policy in policies]
    if len(set(labels)) != len(labels):
        raise ValueError(f"method: expected each once, got {', '.join(labels)}")
    return policies


def parse_budget(text: str) -> Budget:
    """The budget that a text names, as everywhere."""
    return Budget.parse(text)


def describe(policy: Policy, budget: str) -> str:
    """Every setting behind a label, for the record."""
    if policy.kind != "evict":
        return policy.label
    settings = policy.settings(budget)
    rehearsal = f", rehearsal={settings.rehearsal}" if settings.rehearsal is not None else ""
    return f"{settings.method.describe()}, allocation={settings.allocation.name}, sinks={settings.sinks}{rehearsal}"


def name_of(policy: Policy) -> str:
    """The method's registered name."""
    return resolve(policy.method).name if policy.kind == "evict" else policy.label


def _option(text: str, label: str) -> tuple[str, object]:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise ValueError(f"method: expected OPTION=VALUE inside brackets, got {text!r} in {label!r}")
    for read in (int, float):
        try:
            return name, read(value)
        except ValueError:
            continue
    return name, {"true": True, "false": False}.get(value.lower(), value)
