"""Which rows are decoded together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from decantkv.lab.eval.engine.rows import Row

SPREAD = 2.0  # rows whose sizes differ more than this do not share a batch, which would be mostly filler
SMALL = 512  # slots below which that does not matter
MASK_BYTES = 3  # of a query and a slot: a bool, and the number that attention makes of it


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
        memory: bytes of the copies and their masks; rows: how many.
        group: query heads that share a KV head, each with a mask of its own.
        apart: whether rows that are fed more stay apart from those that are fed less: on a CPU, filling up costs time.
    """

    memory: int
    rows: int
    group: int = 1
    apart: bool = False

    def halve(self, rows: Iterable[Row]) -> None:
        """From now on half of what these would have needed: for them there was none."""
        self.memory = min(self.memory, size_of(rows).nbytes(self.group) // 2)


class Size(NamedTuple):
    """What a batch needs memory for: its rows, each as large as the largest."""

    rows: int = 0
    token: int = 0  # bytes of a token's keys and values
    stored: int = 0  # slots that are filled at the start
    new: int = 0  # slots for tokens to come
    rest: int = 1  # of them fed at once

    def beside(self, row: Row) -> Size:
        """With one more row."""
        rest = len(row.rest)
        return Size(
            self.rows + 1,
            max(self.token, row.nbytes(1)),
            max(self.stored, row.stored),
            max(self.new, 2 * rest + row.max_new_tokens),
            max(self.rest, rest),
        )

    def nbytes(self, group: int) -> int:
        """Bytes of the copies, and of the masks of what they are fed in every query head of a group."""
        return self.rows * (self.stored + self.new) * (self.token + MASK_BYTES * group * self.rest)


def size_of(rows: Iterable[Row]) -> Size:
    """The size of a batch of these."""
    size = Size()
    for row in rows:
        size = size.beside(row)
    return size


def batches(entries: Sequence[Some], limits: Limits) -> Iterator[list[Some]]:
    """Rows of like size together, as many as the limits allow when their turn comes; in a batch, prompt by prompt."""
    prompts: dict[int, int] = {}
    for entry in entries:
        prompts.setdefault(id(entry.row.reading), len(prompts))
    batch: list[Some] = []
    size, least = Size(), 0  # least: of what its rows store

    def by_prompt(entry: Some) -> int:
        return prompts[id(entry.row.reading)]

    def order(entry: Some) -> tuple[int, int]:
        return (len(entry.row.rest) if limits.apart else int(bool(entry.row.rest)), entry.row.stored)

    for entry in sorted(entries, key=order):
        row, larger = entry.row, size.beside(entry.row)
        if batch:
            least = min(least, row.stored)
            wide = larger.stored > max(SMALL, SPREAD * least)
            wide = wide or bool(row.rest) != bool(batch[0].row.rest)  # a rest would be filler beside it
            if wide or larger.nbytes(limits.group) > limits.memory or len(batch) >= limits.rows:
                yield sorted(batch, key=by_prompt)
                batch, larger = [], Size().beside(row)
        least = least if batch else row.stored
        batch.append(entry)
        size = larger
    if batch:
        yield sorted(batch, key=by_prompt)
