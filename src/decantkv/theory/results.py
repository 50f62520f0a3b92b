"""Results files: JSON Lines that a stopped run continues, and that several runs side by side share a folder for."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from decantkv.theory.measure import Record

_SAME = ("model", "prompt_sha256", "tokens", "method", "budget", "plan", "dtype")  # what one run's files share


def files_of(folder: Path) -> list[Path]:
    """A folder's results files, packed ones included."""
    return sorted([*folder.glob("rows*.jsonl"), *folder.glob("rows*.jsonl.gz")])


def read(paths: Sequence[Path]) -> tuple[Record, list[Record]]:
    """(the first file's header, all complete layers' records by layer) of one run's results, in one file or several.

    Files may be packed with gzip, ending in .gz. A layer that two files hold, a packed copy's say, counts once.

    Raises:
        ValueError: no header, or files of different runs.
    """
    header: Record | None = None
    records: list[Record] = []
    held: set[int] = set()
    for path in paths:
        lines = _lines(path)
        if not lines or lines[0].get("kind") != "run":
            raise ValueError(f"{path}: expected a results file that begins with its run, got another")
        header = header or lines[0]
        if any(lines[0][key] != header[key] for key in _SAME):
            raise ValueError(f"{path}: expected the same model, prompt and plan as {paths[0]}, got another run's")
        new = _done(lines) - held
        records += [line for line in lines[1:] if line["kind"] != "done" and line["layer"] in new]
        held |= new
    if header is None:
        raise ValueError("rows: expected at least one results file, got none")
    return header, sorted(records, key=lambda record: int(record["layer"]))


def open_rows(path: Path, header: Record) -> set[int]:
    """Begin or continue a results file; what a stopped run left unfinished is cut off.

    Returns:
        The layers that need no measuring: those that this file or another one of its folder holds.

    Raises:
        ValueError: one of them is another run's.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside: set[int] = set()
    for other in files_of(path.parent):
        if other != path and (lines := _lines(other)):  # a file without lines is one that another process just made
            _expect_same(other, lines[0], header)
            beside |= _done(lines)
    if not path.exists() or path.stat().st_size == 0:
        path.write_text(json.dumps(header) + "\n", encoding="utf-8")
        return beside
    lines = _lines(path)
    _expect_same(path, lines[0], header)
    done = _done(lines)
    whole = [line for line in lines if line["kind"] == "run" or line["layer"] in done]
    path.write_text("".join(json.dumps(line) + "\n" for line in whole), encoding="utf-8")
    return done | beside


def to_line(record: Record) -> str:
    """A record as the file holds it, floats to five digits."""
    rounded = {key: float(f"{x:.5g}") if isinstance(x, float) else x for key, x in record.items()}
    return json.dumps(rounded) + "\n"


def _expect_same(path: Path, found: Record, header: Record) -> None:
    differ = [key for key in _SAME if found.get(key) != header[key]]
    if differ:
        raise ValueError(
            f"{path}: expected rows of the same run, got another {', '.join(differ)}; choose another --out"
        )


def _done(lines: Sequence[Record]) -> set[int]:
    return {line["layer"] for line in lines if line["kind"] == "done"}


def _lines(path: Path) -> list[Record]:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    lines = data.decode("utf-8").splitlines()
    parsed = []
    for i, line in enumerate(lines):
        try:
            parsed.append(json.loads(line))
        except json.JSONDecodeError:
            if i != len(lines) - 1:  # only a stopped run's last line may be torn
                raise ValueError(f"{path}: expected JSON Lines, got something else in line {i + 1}") from None
    return parsed
