"""Which rows are decoded together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from decantkv.lab.eval.engine.rows import Row

SPREAD = 2.0  # rows whose sizes differ more than this do not share a batch: a step waits for the longest
SMALL = 512  # tokens below which that does not matter


class Entry(Protocol):
    """Whatever a row is decoded for."""

    @property
    def row(self) -> Row:
        """The row."""


Some = TypeVar("Some", bound=Entry)


@dataclass
class Limits:
    """What a batch may be.

    Attributes:
        memory: bytes of the copies; rows: how many.
        apart: whether rows that are fed more stay apart from those that are fed less: on a CPU, filling up costs time.
    """

    memory: int
    rows: int
    apart: bool = False

    def halve(self, rows: Iterable[Row]) -> None:
        """From now on half of what these would have needed: for them there was none."""
        self.memory = min(self.memory, size_of(rows).nbytes // 2)


class Size(NamedTuple):
    """Numbers that a batch's memory follows from: the tokens that its rows store, and room for new ones in each."""

    rows: int = 0
    token: int = 0  # bytes of a token's keys and values
    stored: int = 0  # tokens of all rows
    new: int = 0  # most tokens to come of a row

    def beside(self, row: Row) -> Size:
        """With one more row."""
        return Size(
            self.rows + 1,
            max(self.token, row.reading.token_bytes),
            self.stored + row.stored,
            max(self.new, len(row.rest) + row.max_new_tokens),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        return self.token * (self.stored + self.rows * self.new)


def size_of(rows: Iterable[Row]) -> Size:
    """The size of a batch of these."""
    size = Size()
    for row in rows:
        size = size.beside(row)
    return size


def batches(entries: Sequence[Some], limits: Limits) -> Iterator[list[Some]]:
    """Rows of like size together, as many as the limits allow when their turn comes."""
    batch: list[Some] = []
    size, stored = Size(), (0, 0)  # the least and the most that its rows store

    def order(entry: Some) -> tuple[int, int]:
        return (len(entry.row.rest) if limits.apart else int(bool(entry.row.rest)), entry.row.stored)

    for entry in sorted(entries, key=order):
        row, larger = entry.row, size.beside(entry.row)
        least, most = min(stored[0], row.stored), max(stored[1], row.stored)
        if batch:
            wide = most > max(SMALL, SPREAD * least)
            wide = wide or bool(row.rest) != bool(batch[0].row.rest)  # a rest would be filler beside it
            if wide or larger.nbytes > limits.memory or len(batch) >= limits.rows:
                yield batch
                batch, larger = [], Size().beside(row)
        stored = (least, most) if batch else (row.stored, row.stored)
        batch.append(entry)
        size = larger
    if batch:
        yield batch
