"""The fuzzer's share of every test run: the same sequences each time. `make fuzz` goes on with 10,000 new ones and
interrupts."""

from __future__ import annotations

from hypothesis import core

from tests.fuzz.run import batches

FIRST = 0


def test_no_sequence_of_calls_gives_another_answer_than_the_full_cache(capsys):
    chosen = core.global_force_seed  # of --hypothesis-seed
    for number in batches(FIRST if chosen is None else int(chosen), seconds=120, sequences=300):
        with capsys.disabled():
            print(f" --hypothesis-seed={number}", end="", flush=True)
