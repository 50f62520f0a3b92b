"""The fuzzer's share of every test run; `make fuzz` goes on for an hour."""

from __future__ import annotations

import time

from hypothesis import core

from tests.fuzz.run import batches


def test_no_sequence_of_calls_gives_another_answer_than_the_full_cache(capsys):
    first = core.global_force_seed  # of --hypothesis-seed
    first = int(time.time()) if first is None else int(first)
    for number in batches(first, seconds=110, sequences=10**9):
        with capsys.disabled():
            print(f" --hypothesis-seed={number}", end="", flush=True)
