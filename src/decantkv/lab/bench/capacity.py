"""The largest batch of prompts that is read together before memory ends, without eviction and for each method."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from decantkv.lab.bench.cases import Case, attempt, collect
from decantkv.lab.bench.generation import Model, check_methods, contender, peak, prompts, warm
from decantkv.lab.bench.rows import Row


def capacity(
    model: Model, *, lengths: Sequence[int], methods: Sequence[str], budget: float, most: int, guess: int = 32
) -> Iterator[Case]:
    """Largest batches by trial: a batch is read by the first layer, beside the room that all other layers will take.

    So a trial takes a layer's time, and has the peak of the whole prompt: the last layer, which evicts beside what all
    others have kept, or beside their full caches, where the first does here. "none" is the dynamic cache.

    Args:
        most: no larger batch is tried.
        guess: where the search begins; later methods begin with what the one before found.

    Raises:
        ValueError: an unknown method.
    """
    check_methods(methods)
    near = [guess]

    def measure(method: str, length: int) -> Row:
        llama = model()
        tried: dict[int, Row | None] = {}

        def read(batch: int) -> Row:
            full = method == "none"
            context, _ = contender(llama, "dynamic" if full else "ours", budget, **({} if full else {"method": method}))
            with context:
                collect(llama.device)
                ids = prompts(llama, batch, length)
                warm(llama, ids, others=length if full else int(budget * length))
            return {"peak_bytes": peak(llama.device)}

        def fits(batch: int) -> bool:
            tried[batch] = attempt(functools.partial(read, batch))
            return tried[batch] is not None

        found = largest(fits, most=most, guess=near[0])
        near[0] = max(found, 1)
        trials = {str(batch): tried[batch] is not None for batch in sorted(tried)}
        return {"largest_batch": found, "tried": trials, **(tried.get(found) or {})}

    for length in lengths:
        for method in ("none", *methods):
            about = {"step": "capacity", "method": method, "kv_len": length, "most": most,
                     "budget": None if method == "none" else budget}  # fmt: skip
            yield Case(about, functools.partial(measure, method, length))


def largest(fits: Callable[[int], bool], *, most: int, guess: int) -> int:
    """The largest number up to `most` that fits, 0 if none does; a number near it as guess saves trials."""
    low, high = 0, most + 1  # fits, does not
    probe, step = guess, 1
    while high - low > 1:
        if not low < probe < high:
            probe = (low + high) // 2
        if fits(probe):
            low, probe = probe, probe + step
        else:
            high, probe = probe, probe - step
        step *= 2
    return low
