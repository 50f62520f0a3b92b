"""Rows are batched by size, within memory, and as many as that allows; a batch's memory goes with it."""

import gc
import weakref
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decantkv.lab.eval.engine.batches import SMALL, SPREAD, Limits, batches, size_of
from decantkv.lab.eval.engine.reading import Reader
from decantkv.lab.eval.engine.rows import Row, RowBatch

TOKEN = 64  # bytes of its keys and values


@dataclass(frozen=True, eq=False)
class Wanted:
    row: Row


@dataclass(frozen=True)
class Prompt:
    token_bytes: int = TOKEN


@dataclass(frozen=True)
class Cut:
    length: int


def row(stored, rest=0, new=7):
    return Row(Prompt(), Cut(stored), (1,) * rest, max_new_tokens=new)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 9)), min_size=1, max_size=40),
    st.integers(1, 40),
    st.integers(TOKEN, 40 * 3000 * TOKEN),
    st.booleans(),
)
def test_every_row_is_in_one_batch_within_limits(drawn, most, memory, apart):
    entries = [Wanted(row(stored, rest)) for stored, rest in drawn]
    limits = Limits(memory, most, apart=apart)
    made = list(batches(entries, limits))
    assert sorted(id(e) for batch in made for e in batch) == sorted(map(id, entries))
    for batch in made:
        stored = [e.row.stored for e in batch]
        assert len(batch) <= most
        assert len(batch) == 1 or size_of(e.row for e in batch).nbytes <= memory
        assert max(stored) <= max(SMALL, SPREAD * min(stored))
        assert len({bool(e.row.rest) for e in batch}) == 1


def test_sixty_rows_share_a_batch_where_their_copies_fit():
    entries = [Wanted(row(200)) for _ in range(60)]
    needed = size_of(e.row for e in entries).nbytes
    assert needed == 60 * 207 * TOKEN
    assert [len(b) for b in batches(entries, Limits(needed, 256))] == [60]
    assert len(next(batches(entries, Limits(needed - 1, 256)))) == 59


def test_after_want_of_memory_batches_shrink_by_bytes_not_by_rows():
    large, small = [Wanted(row(4000)) for _ in range(8)], [Wanted(row(100)) for _ in range(64)]
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
        reading = reader.reading()
        batch = RowBatch(model, [Row(reading, reading.whole, (), max_new_tokens=4)], room=9)
        if generated:
            batch.generate()
        held = weakref.ref(batch.cache.layers[0].store.keys)
        del batch
        assert held() is None
    finally:
        gc.enable()
