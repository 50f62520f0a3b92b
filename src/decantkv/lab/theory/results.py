"""Results files: JSON Lines that a stopped run continues, and that several runs side by side share a folder for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from decantkv.base import json_lines
from decantkv.lab.theory.measure import Record

_SAME = ("model", "prompt_sha256", "tokens", "method", "budget", "plan", "dtype")  # what one run's files share
_PARTS = {"geometry": {"layers"}, "plan": {"n_keep", "ks"}}  # objects in a run's header, and what is used of them
_ENTRIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # texts and numbers that each kind of record has
    "run": (("model", "prompt_sha256", "method", "budget", "dtype", "device"), ("tokens",)),
    "assumptions": (("scope", "pool"), ("kv_head", "pool_size", "epsilon", "mass", "c", "c_upper", "k")),
    "ratio": (
        ("scope", "pool"),
        ("kv_head", "pool_size", "k", "epsilon", "c", "c_upper", "best", "raw", "pooled", "attention", "differs"),
    ),
    "eviction": (("scope", "selection"), ("kv_head", "n_keep", "n_evicted", "epsilon", "mass_max", "shift", "output")),
}


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
        if any(lines[0].get(key) != header.get(key) for key in _SAME):
            raise ValueError(f"{path}: expected the same model, prompt and plan as {paths[0]}, got another run's")
        new = _done(lines) - held
        records += [line for line in lines[1:] if line["kind"] != "done" and line["layer"] in new]
        held |= new
    if header is None:
        raise ValueError("rows: expected at least one results file, got none")
    return header, sorted(records, key=lambda record: int(record["layer"]))


@contextmanager
def only_run(path: Path) -> Iterator[None]:
    """Be the only run that writes a results file; the lock ends with the process, however that ends.

    Raises:
        ValueError: another run writes it.
    """
    lock = FileLock(path.with_name(f".{path.name}.lock"), blocking=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"out: expected a file that no other run writes, got {path}; wait for that run, or choose other --layers"
        ) from None
    except OSError as error:
        raise ValueError(
            f"out: expected a folder that can be written to, got {path.parent}: {error.strerror}"
        ) from error
    try:
        yield
    finally:
        lock.release()


def add(path: Path, records: Sequence[Record]) -> None:
    """Add records to a file that `open_rows` began, floats to five digits.

    Raises:
        ValueError: the file is gone, or cannot be written.
    """
    with json_lines.alone(path.parent):
        if not path.exists():
            raise ValueError(f"results: expected {path} to stay while its run goes on, got none")
        json_lines.add(path, [json_lines.line_of(_rounded(record)) for record in records])


def open_rows(path: Path, header: Record) -> set[int]:
    """Begin or continue a results file; what a stopped run left unfinished is cut off.

    Returns:
        The layers that need no measuring: those that this file or another one of its folder holds.

    Raises:
        ValueError: one of them is another run's.
    """
    beside: set[int] = set()
    for other in files_of(path.parent):
        if other != path and (lines := _lines(other)):  # a file without lines is one that another process just made
            _expect_same(other, lines[0], header)
            beside |= _done(lines)
    lines = _lines(path) if path.exists() else []
    if not lines:
        json_lines.write(path, [header])
        return beside
    _expect_same(path, lines[0], header)
    done = _done(lines)
    whole = [line for line in lines if line["kind"] == "run" or line["layer"] in done]
    json_lines.write(path, whole)
    return done | beside


def _rounded(record: Record) -> Record:
    return {key: float(f"{x:.5g}") if isinstance(x, float) else x for key, x in record.items()}


def _expect_same(path: Path, found: Record, header: Record) -> None:
    differ = [key for key in _SAME if found.get(key) != header[key]]
    if differ:
        raise ValueError(
            f"{path}: expected rows of the same run, got another {', '.join(differ)}; choose another --out"
        )


def _done(lines: Sequence[Record]) -> set[int]:
    return {line["layer"] for line in lines if line["kind"] == "done"}


def _lines(path: Path) -> list[Record]:
    """A file's records.

    Raises:
        ValueError: a line that is no record, or without an entry that the tables use; it is named.
    """
    records = []
    for number, record in json_lines.numbered(path):
        kind = str(record.get("kind"))
        texts, numbers = _ENTRIES.get(kind, ((), ()))
        layer = () if kind == "run" else ("layer",)
        wrong = [name for name in ("kind", *texts) if not isinstance(record.get(name), str)]
        wrong += [name for name in (*layer, *numbers) if type(record.get(name)) not in (int, float, bool)]
        if kind == "run":
            wrong += [
                name for name, of in _PARTS.items() if not isinstance(record.get(name), dict) or of - {*record[name]}
            ]
        if wrong:
            raise ValueError(
                f"{json_lines.place(path, number)}: expected a record {kind!r:.40} with its {wrong[0]!r}, "
                f"got {record.get(wrong[0])!r:.80}"
            )
        records.append(record)
    return records
