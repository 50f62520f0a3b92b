"""Rows of results on disk: JSON lines that a stopped run goes on with, and that never mix configurations."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock

ROWS, RUN, LOCK = "rows.jsonl", "run.json", ".lock"
Configuration = Mapping[str, Any]


@dataclass(frozen=True, order=True)
class Cell:
    """One answer's place in a table.

    Attributes:
        prompt: the sample's key, suite/task/length/index.
        regime: "aware", "aware-question", "agnostic"; "any" for the full cache, which knows no regime.
        policy: label of the method.
        budget: as typed; "1" for the full cache, "-" where the policy decides.
    """

    prompt: str
    regime: str
    policy: str
    budget: str


def digest(configuration: Configuration) -> str:
    """Twelve hex digits that name a configuration."""
    return hashlib.sha256(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:12]


class Store:
    """The rows of one configuration in one folder, open for more.

    `run.json` holds the configuration and, per session, its circumstances; `rows.jsonl` one line per prompt and one
    per answer. Several processes may have it open and write in turn.
    """

    def __init__(self, folder: Path, configuration: Configuration, circumstances: Mapping[str, Any] | None) -> None:
        """Open or begin a folder; without circumstances `begin` names them before any row.

        Raises:
            ValueError: the folder holds another configuration's rows (the differences are named) or a broken line.
        """
        self.folder, self.configuration = folder, dict(configuration)
        self.name = digest(configuration)
        self.done: set[Cell] = set()
        self.prompts: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        self._alone = FileLock(folder / LOCK)
        with self._alone:
            if not self._sessions():
                self._write_run([])
            _unpack(folder)
            _drop_torn_line(folder / ROWS)
            if (folder / ROWS).exists():
                for row in read_rows(folder / ROWS, config=self.name):
                    self._note(row)
            self._file: TextIO = (folder / ROWS).open("a", encoding="utf-8")
        if circumstances is not None:
            self.begin(circumstances)

    def begin(self, circumstances: Mapping[str, Any]) -> None:
        """The rows that follow are made under these circumstances: a session, which processes of one run share."""
        with self._alone:
            sessions = self._sessions()
            if circumstances not in sessions:
                sessions.append(dict(circumstances))
                self._write_run(sessions)
            self.session = sessions.index(circumstances)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows and make sure they are on disk."""
        made = [{"config": self.name, "session": self.session, **row} for row in rows]
        with self._alone:
            for row in made:
                self._file.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        for row in made:
            self._note(row)

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Whether the row's place is taken."""
        return row["prompt"] in self.prompts if row["row"] == "prompt" else cell_of(row) in self.done

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _sessions(self) -> list[Any]:
        """What the folder's `run.json` says now."""
        run = _read_run(self.folder)
        if run is None:
            return []
        _same(run["configuration"], self.configuration, self.folder)
        sessions: list[Any] = run["sessions"]
        return sessions

    def _write_run(self, sessions: list[Any]) -> None:
        _write_whole(self.folder / RUN, {"configuration": self.configuration, "sessions": sessions})

    def _note(self, row: Mapping[str, Any]) -> None:
        if row["row"] == "prompt":
            self.prompts.add(row["prompt"])
        else:
            self.done.add(cell_of(row))


def cell_of(row: Mapping[str, Any]) -> Cell:
    """The place of an answer's row."""
    return Cell(row["prompt"], row["regime"], row["policy"], row["budget"])


def read_rows(file: Path, *, config: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a file, .gz understood.

    Raises:
        ValueError: a line that is no row (it is named), or one of another configuration than `config`.
    """
    with gzip.open(file, "rt", encoding="utf-8") if file.suffix == ".gz" else file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
                if row["row"] == "answer":
                    cell_of(row)
                known = row["row"] in ("prompt", "answer") and "prompt" in row
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"results: {file} line {number}: expected a row of results, got {line[:80]!r}"
                ) from error
            if not known:
                raise ValueError(f"results: {file} line {number}: expected a prompt or an answer, got {line[:80]!r}")
            if config is not None and row["config"] != config:
                raise ValueError(
                    f"results: {file} line {number}: expected rows of configuration {config}, got {row['config']}"
                )
            yield row


def read_folder(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(run.json, rows) of a finished or running folder.

    Raises:
        ValueError: not a folder of results, a broken line, or rows of more than one configuration.
    """
    run = _read_run(folder)
    file = next((file for file in (folder / ROWS, folder / f"{ROWS}.gz") if file.is_file()), None)
    if run is None or file is None:
        raise ValueError(f"results: expected {RUN} and {ROWS} (or {ROWS}.gz) in {str(folder)!r}, got no such files")
    name = digest(run["configuration"])
    return run, list(read_rows(file, config=name))


def join(folder: Path, parts: Iterable[Path]) -> None:
    """Add the rows of parts that were measured side by side; a row whose place is taken stays out.

    Raises:
        ValueError: a part is no folder of results, or of another configuration than the folder's.
    """
    store: Store | None = None
    try:
        for part in parts:
            run, rows = read_folder(part)
            store = store or Store(folder, run["configuration"], None)
            _same(store.configuration, run["configuration"], part)
            for session, circumstances in enumerate(run["sessions"]):
                here = [row for row in rows if row["session"] == session and not store.holds(row)]
                if here:
                    store.begin(circumstances)
                    store.append({k: v for k, v in row.items() if k not in ("config", "session")} for row in here)
    finally:
        if store is not None:
            store.close()


def pack(folder: Path) -> Path:
    """Compress a folder's rows; they are read and gone on with as before.

    Raises:
        ValueError: not a folder of results, or a broken line.
    """
    read_folder(folder)
    packed = folder / f"{ROWS}.gz"
    if (folder / ROWS).is_file():
        _unpack(folder)
        data = gzip.compress((folder / ROWS).read_bytes(), 9, mtime=0)  # the same bytes for the same rows
        _write_bytes(packed, data)
        (folder / ROWS).unlink()
    return packed


def _unpack(folder: Path) -> None:
    """Compressed rows back into the file that is appended to; where that is still there, packing was cut short."""
    packed, rows = folder / f"{ROWS}.gz", folder / ROWS
    if packed.is_file():
        if not rows.is_file():
            _write_bytes(rows, gzip.decompress(packed.read_bytes()))
        packed.unlink()


def _read_run(folder: Path) -> dict[str, Any] | None:
    file = folder / RUN
    if not file.is_file():
        if (folder / ROWS).exists():
            raise ValueError(f"results: expected {RUN} beside {ROWS} in {str(folder)!r}, got none")
        return None
    try:
        run: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return {"configuration": run["configuration"], "sessions": run["sessions"]}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"results: expected a configuration and sessions in {file}, got {error!r}") from error


def _same(theirs: Mapping[str, Any], ours: Mapping[str, Any], folder: Path) -> None:
    differ = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    if differ:
        parts = "; ".join(f"{key}: there {theirs.get(key)!r}, here {ours.get(key)!r}" for key in differ)
        raise ValueError(f"out: expected a folder of this configuration, got {str(folder)!r} of another one ({parts})")


def _drop_torn_line(file: Path) -> None:
    """A run that was killed while writing leaves half a line at the end: it was never counted as done."""
    if not file.exists():
        return
    with file.open("rb+") as handle:
        data = handle.read()
        if data and not data.endswith(b"\n"):
            handle.truncate(data.rfind(b"\n") + 1)


def _write_whole(file: Path, content: Mapping[str, Any]) -> None:
    _write_bytes(file, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())


def _write_bytes(file: Path, data: bytes) -> None:
    temporary = file.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(file)
