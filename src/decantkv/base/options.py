"""Checks of options. Every message names the argument, what was expected, and what was given."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Literal

Impl = Literal["auto", "reference", "torch", "triton"]
Quantity = Literal["perturbation", "attention_mass", "alignment", "chunk_alignment"]
Need = Literal["queries", "W_O", "rotate", "stream"]
Reduce = Literal["sum", "max"]
Pool = Literal["max", "avg", "none"]
PoolScope = Literal["all", "prefix"]
Allocation = Literal["uniform", "shared", "ada", "ada-kvpress", "heads", "pyramid", "layer", "global"]
Span = tuple[int, int]
RUN_OPTIONS = (  # keyword arguments of `attach` and `EvictingCache`, whatever the method
    "budget", "settings", "allocation", "sinks", "protect", "chat", "impl", "rehearsal", "prefill_chunk",
    "max_kv_tokens", "every", "decode_budget", "protect_prompt", "decode", "store", "reuse_lse",
)  # fmt: skip


def reason_of(error: Exception) -> str:
    """Return the first line of an error's message, or all of it if that line ends with a colon."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return " ".join(" ".join(lines).split()) if lines[0].rstrip().endswith(":") else lines[0]


def expect_choice(argument: str, value: object, choices: Collection[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{argument}: expected one of {', '.join(sorted(choices))}, got {value!r}")


def expect_int(argument: str, value: object, *, at_least: int) -> int:
    """Return the value as an int; raise TypeError unless it is a whole number, ValueError below `at_least`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{argument}: expected a whole number of at least {at_least}, got {value!r}")
    if value < at_least:
        raise ValueError(f"{argument}: expected a whole number of at least {at_least}, got {value!r}")
    return int(value)


def expect_fraction(argument: str, value: object) -> float:
    """Return the value as a float; raise TypeError unless it is a real number, ValueError outside [0, 1]."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{argument}: expected a number from 0 to 1, got {value!r}")
    number = float(value)
    if not 0 <= number <= 1:  # NaN included
        raise ValueError(f"{argument}: expected a number from 0 to 1, got {value!r}")
    return number


def expect_odd(argument: str, value: object) -> int:
    """Return the value as an odd positive int, which a pooling kernel centred on its key must be."""
    size = expect_int(argument, value, at_least=1)
    if size % 2 == 0:
        raise ValueError(f"{argument}: expected an odd number, so that pooling is centred on its key, got {size}")
    return size


def expect_protected(argument: str, protected: object, roles: Collection[str]) -> tuple[tuple[Span, ...], list[str]]:
    """Return the spans and the roles of a list of both; raise unless each entry is one of `roles` or a span."""
    if isinstance(protected, str) or not isinstance(protected, Sequence):
        raise TypeError(f"{argument}: expected a list of (start, stop) pairs, got {protected!r}")
    named = [entry for entry in protected if isinstance(entry, str)]
    if other := [name for name in named if name not in roles]:
        raise TypeError(f"{argument}: expected (start, stop) pairs, or {' or '.join(roles)}, got {other[0]!r}")
    return expect_spans(argument, [entry for entry in protected if not isinstance(entry, str)]), named


def expect_spans(argument: str, spans: object) -> tuple[Span, ...]:
    """Return spans (start, stop) of prompt positions, stop excluded; raise unless 0 ≤ start < stop in each."""
    if isinstance(spans, str) or not isinstance(spans, Sequence):
        raise TypeError(f"{argument}: expected a list of (start, stop) pairs, got {spans!r}")
    checked = []
    for span in spans:
        if isinstance(span, str) or not isinstance(span, Sequence) or len(span) != 2:
            raise TypeError(f"{argument}: expected (start, stop) pairs, got {span!r}")
        start = expect_int(f"{argument} start", span[0], at_least=0)
        stop = expect_int(f"{argument} stop", span[1], at_least=0)
        if start >= stop:
            raise ValueError(f"{argument}: expected start below stop, got ({start}, {stop})")
        checked.append((start, stop))
    return tuple(checked)
