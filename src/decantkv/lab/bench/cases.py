"""Measurements one at a time: each is saved when it is made, and is not made again where its row is there."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from decantkv.base import json_lines
from decantkv.lab.bench.rows import Row


@dataclass(frozen=True)
class Case:
    """One row to come.

    Attributes:
        about: what is measured, in plain JSON values; with device and geometry it names the row.
        measure: makes the measurement and returns the rest of the row.
    """

    about: Row
    measure: Callable[[], Row]


def run(cases: Iterable[Case], where: Row, out: Path | None = None) -> Iterator[tuple[Row, bool]]:
    """Each case's row and whether it was made just now, appended to a file as it comes.

    A case that does not fit the device's memory becomes a row that says so, and ends its series: the same case with
    larger batches is not tried.

    Args:
        where: circumstances that go into every row; "device" and "geometry" tell rows of one file apart.
        out: rows that are in it already count as made; delete the file to measure anew.
    """
    known = resume(out)
    ended: set[str] = set()
    for case in cases:
        name = {**case.about, "device": where["device"], "geometry": where["geometry"]}
        series = _text({key: value for key, value in name.items() if key != "batch"})
        if series in ended:
            continue
        row = next((r for r in known if all(_text(r.get(key)) == _text(value) for key, value in name.items())), None)
        made = row is None
        if row is None:
            measured = attempt(case.measure)
            row = {**where, **case.about, **({"left_out": "memory"} if measured is None else measured)}
            append(out, row)
        if row.get("left_out") == "memory" and "batch" in case.about:
            ended.add(series)
        yield row, made


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True)


def resume(out: Path | None) -> list[Row]:
    """The rows of a file that others may be adding to."""
    return json_lines.read(out) if out is not None and out.exists() else []


def append(out: Path | None, row: Row) -> None:
    """Add a row to a file."""
    if out is not None:
        json_lines.append(out, [row])


def attempt(work: Callable[[], Row]) -> Row | None:
    """Return what the work returns, or None if the device's memory is too small."""
    try:
        return work()
    except RuntimeError as error:  # torch.compile wraps the allocator's own error
        if "out of memory" not in str(error).lower():
            raise
        return None
    finally:
        collect(torch.device("cuda" if torch.cuda.is_available() else "cpu"), reset=False)


def collect(device: torch.device, *, reset: bool = True) -> None:
    """Give unused memory of a GPU back and start counting its peak anew."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        if reset:
            torch.cuda.reset_peak_memory_stats(device)
