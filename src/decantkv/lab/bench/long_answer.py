"""A long answer: what a token takes and the cache weighs, the further it gets, re-evicted on the way and not."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Iterator, Sequence

from decantkv.cache.evicting_cache import cache_argument
from decantkv.lab.bench.cases import Case, collect
from decantkv.lab.bench.generation import WARM, Model, clocked, how, ours, peak, prompts
from decantkv.lab.bench.rows import Row


def long_answer(
    model: Model, *, length: int, kept: int, new: int, intervals: Sequence[int | None], marks: Sequence[int]
) -> Iterator[Case]:
    """One answer of `new` tokens, looked at after so many of them.

    Args:
        length: tokens of the prompt; kept: how many of them a head keeps.
        intervals: re-evict every so many new tokens, down to `kept`; None: not at all.
        marks: where bytes are read. Milliseconds are the medians of the tokens since the mark before.

    Raises:
        ValueError: a mark beyond the answer, or none.
    """
    if not marks or not all(1 < mark <= new for mark in marks):
        raise ValueError(f"marks: expected numbers of tokens from 2 to {new}, got {list(marks)}")
    stops = sorted(set(marks))

    def measure(every: int | None) -> Row:
        llama = model()
        held: dict[str, int] = {}
        with ours(llama, kept, every=every) as run:
            cache = run.new_cache()

            def look(written: int) -> None:
                if written in stops:
                    held[str(written)] = cache.nbytes()

            collect(llama.device)
            first, steps = clocked(llama, prompts(llama, 1, length), new, each=look, **{cache_argument(llama): cache})
            made = how(llama, run)
        edges = itertools.pairwise([min(WARM, stops[0] - 2), *(stop - 1 for stop in stops)])
        medians = {
            str(stop): round(1e3 * statistics.median(steps[slice(*e)]), 3) for stop, e in zip(stops, edges, strict=True)
        }
        return {
            "first_token_s": round(first, 4), "whole_s": round(first + sum(steps), 3), "ms_a_token": medians,
            "cache_bytes": held, "peak_bytes": peak(llama.device), **made,
        }  # fmt: skip

    for every in intervals:
        about = {"step": "long answer", "kv_len": length, "budget": kept, "every": every, "new": new, "batch": 1}
        yield Case(about, functools.partial(measure, every))
