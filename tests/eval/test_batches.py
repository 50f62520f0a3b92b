"""Rows are batched by size, within memory, and as many as that allows; a batch's memory goes with it."""

import gc
import itertools
import weakref
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decantkv.lab.eval.engine.batches import SMALL, SPREAD, Limits, batches, size_of
from decantkv.lab.eval.engine.prompt import Reader, Reading
from decantkv.lab.eval.engine.rows import Row, RowBatch
from decantkv.selection.selector import Kept

HEADS, DIM = 2, 4
TOKEN = 2 * HEADS * DIM * 4  # bytes of one layer's


@dataclass(frozen=True, eq=False)
class Wanted:
    row: Row


def reading(length):
    return Reading([torch.zeros(1, HEADS, length, DIM)], [torch.zeros(1, HEADS, length, DIM)], length, torch.zeros(5))


def row(of, stored, rest=0, new=7):
    kept = None
    if stored < of.length - rest:
        indices = torch.arange(stored).expand(1, HEADS, -1)
        kept = Kept(indices, torch.full((1, HEADS), stored), (stored,))
    return Row(of, of.length - rest, (1,) * rest, kept, max_new_tokens=new)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3000), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(TOKEN, 40 * 3000 * TOKEN),
    st.booleans(),
)
def test_every_row_is_in_one_batch_within_limits_and_prompt_by_prompt(drawn, most, memory, apart):
    prompts = [reading(3010) for _ in range(3)]
    entries = [Wanted(row(prompts[i], stored, rest)) for i, stored, rest in drawn]
    limits = Limits(memory, most, group=3, apart=apart)
    made = list(batches(entries, limits))
    assert sorted(id(e) for batch in made for e in batch) == sorted(map(id, entries))
    for batch in made:
        stored = [e.row.stored for e in batch]
        assert len(batch) <= most
        assert len(batch) == 1 or size_of(e.row for e in batch).nbytes(3) <= memory
        assert max(stored) <= max(SMALL, SPREAD * min(stored))
        assert len({bool(e.row.rest) for e in batch}) == 1
        runs = [id(e.row.reading) for e in batch]
        assert sum(a != b for a, b in itertools.pairwise(runs)) == len(set(runs)) - 1


def test_sixty_rows_of_one_long_prompt_share_a_batch_where_their_copies_fit():
    whole = reading(4096)
    entries = [Wanted(row(whole, 200)) for _ in range(60)]
    needed = size_of(e.row for e in entries).nbytes(1)
    assert needed == 60 * 207 * (TOKEN + 3)
    assert [len(b) for b in batches(entries, Limits(needed, 256))] == [60]
    assert len(next(batches(entries, Limits(needed - 1, 256)))) == 59


def test_after_want_of_memory_batches_shrink_by_bytes_not_by_rows():
    whole = reading(4096)
    large, small = [Wanted(row(whole, 4000)) for _ in range(8)], [Wanted(row(whole, 100)) for _ in range(64)]
    limits = Limits(2**40, 256)
    limits.halve(e.row for e in large)
    made = [len(b) for b in batches([*large, *small], limits)]
    assert made == [64, 4, 4]


@pytest.mark.parametrize("generated", [False, True])
def test_a_batch_is_gone_when_nobody_holds_it(model, generated):
    reader = Reader(model, rows=8)
    for _ in reader.read(list(range(1, 60)), []):
        pass
    gc.disable()
    try:
        batch = RowBatch(model, [Row(reader.reading(), 59, (), max_new_tokens=4)], room=9)
        if generated:
            batch.generate()
        held = weakref.ref(batch.cache.layers[0].keys)
        del batch
        assert held() is None
    finally:
        gc.enable()
