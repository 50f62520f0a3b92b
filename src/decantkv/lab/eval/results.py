"""Rows of results on disk: JSON lines that a stopped run goes on with, and that never mix configurations."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decantkv.base import json_lines
from decantkv.base.writing import write_whole as _write_bytes

try:
    import fcntl
except ImportError:  # no such locks: two runs may measure the same prompt, of which the first row counts
    fcntl = None  # type: ignore[assignment]

ROWS, RUN, CLAIMS = "rows.jsonl", "run.json", ".claims"
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
    per answer. Several processes may have it open, write in turn and share the prompts between them (`claim`); the
    folder may be packed and joined meanwhile, since every writer opens the rows under the folder's lock.
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
        self.circumstances: dict[str, Any] = {}
        self._size = self._lines = 0  # of the rows that are noted
        with json_lines.alone(folder):
            if not self._sessions():
                self._write_run([])
            _unpack(folder)
            json_lines.add(folder / ROWS, [])
            self._catch_up()
        self._claims: int | None = None
        if fcntl is not None:
            self._claims = os.open(folder / CLAIMS, os.O_RDWR | os.O_CREAT, 0o666)
        if circumstances is not None:
            self.begin(circumstances)

    def begin(self, circumstances: Mapping[str, Any]) -> None:
        """The rows that follow are made under these circumstances: a session, which processes of one run share."""
        with json_lines.alone(self.folder):
            sessions = self._sessions()
            if circumstances not in sessions:
                sessions.append(dict(circumstances))
                self._write_run(sessions)
            self.session, self.circumstances = sessions.index(circumstances), dict(circumstances)

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows and make sure they are on disk; a row whose place another process took meanwhile stays out.

        Raises:
            ValueError: the folder is not the one that was opened any more, or cannot be written.
        """
        wanted = list(rows)
        with json_lines.alone(self.folder):
            self._expect_own_folder()
            _unpack(self.folder)
            self._catch_up()
            made = [{"config": self.name, "session": self.session, **row} for row in wanted if not self.holds(row)]
            json_lines.add(self.folder / ROWS, [_line_of(row) for row in made])
            self._catch_up()

    def claim(self, prompt: str) -> bool:
        """Return whether this process may measure a prompt: no other one does. What others have finished is noted.

        The claim lasts until `release` or `close`, and no longer than the process, however that ends.
        """
        if self._claims is not None:
            try:
                fcntl.lockf(self._claims, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _claimed_byte(prompt))
            except (BlockingIOError, PermissionError):
                return False
        if (self.folder / ROWS).is_file() and (self.folder / ROWS).stat().st_size == self._size:
            return True
        with json_lines.alone(self.folder):
            self._expect_own_folder()
            _unpack(self.folder)
            self._catch_up()
        return True

    def release(self, prompt: str) -> None:
        """Leave a prompt to others."""
        if self._claims is not None:
            fcntl.lockf(self._claims, fcntl.LOCK_UN, 1, _claimed_byte(prompt))

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Return whether the row's place is taken."""
        return row["prompt"] in self.prompts if row["row"] == "prompt" else cell_of(row) in self.done

    def close(self) -> None:
        """Give all claims back."""
        if self._claims is not None:
            os.close(self._claims)
            self._claims = None

    def _catch_up(self) -> None:
        """Note the rows that were written since the last look; the folder's lock is held."""
        file = self.folder / ROWS
        if not file.is_file() or json_lines.add(file, []) < self._size:
            raise ValueError(f"results: expected the rows of {file} to stay while they are added to, got fewer")
        with file.open("rb") as handle:
            handle.seek(self._size)
            for number, line in enumerate(handle, start=self._lines + 1):
                if line.strip():
                    self._note(_checked(json_lines.parse(line, file, number), file, number, self.name))
                self._lines = number
                self._size += len(line)

    def _expect_own_folder(self) -> None:
        sessions = self._sessions()
        if len(sessions) <= self.session or sessions[self.session] != json.loads(json.dumps(self.circumstances)):
            raise ValueError(
                f"results: expected the folder that this run began in at {str(self.folder)!r}, got none or another one"
            )

    def _sessions(self) -> list[Any]:
        """Return what the folder's `run.json` says now."""
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


def _claimed_byte(prompt: str) -> int:
    """The place in the file of claims that stands for a prompt."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:7], "big")


def _line_of(row: Mapping[str, Any]) -> bytes:
    return json_lines.line_of(row, ensure_ascii=False, separators=(",", ":"))


def cell_of(row: Mapping[str, Any]) -> Cell:
    """The place of an answer's row."""
    return Cell(row["prompt"], row["regime"], row["policy"], row["budget"])


_KINDS = {
    **dict.fromkeys(("config", "prompt", "regime", "policy", "budget", "task", "answer"), ("text", (str,))),
    **dict.fromkeys(
        ("length", "tokens", "kv_bytes", "new_tokens", "score", "nll", "kl", "tv", "top1", "kept", "bytes"),
        ("a number", (float, int)),
    ),
    **dict.fromkeys(("shift", "overlap"), ("an object", (dict,))),
}  # fmt: skip
_NEEDED = {"prompt": ("prompt",), "answer": ("prompt", "regime", "policy", "budget")}


def read_rows(file: Path, *, config: str | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a file, .gz understood; a last line that a killed process left torn is left out.

    Raises:
        ValueError: a line that is no row (it is named), or one of another configuration than `config`.
    """
    for number, line in json_lines.lines(file):
        if not json_lines.is_torn(line):
            yield _checked(json_lines.parse(line, file, number), file, number, config)


def _checked(row: dict[str, Any], file: Path, number: int, config: str | None) -> dict[str, Any]:
    """The row, if it is one of results and of that configuration."""
    needed = _NEEDED.get(str(row.get("row")))
    if needed is None:
        problem = f"a prompt or an answer, got row {row.get('row')!r:.80}"
    elif missing := [name for name in (*needed, *(() if config is None else ("config", "session"))) if name not in row]:
        problem = f"an entry {missing[0]!r}, got none"
    elif wrong := [name for name, x in row.items() if name in _KINDS and not _is_kind(x, _KINDS[name][1])]:
        problem = f"{_KINDS[wrong[0]][0]} as {wrong[0]!r}, got {row[wrong[0]]!r:.80}"
    elif type(row.get("session", 0)) is not int or row.get("session", 0) < 0:
        problem = f"a session's number, got {row['session']!r:.80}"
    elif config is not None and row["config"] != config:
        problem = f"rows of configuration {config}, got {row['config']}"
    else:
        return row
    raise ValueError(f"{json_lines.place(file, number)}: expected {problem}")


def _is_kind(x: object, kinds: tuple[type, ...]) -> bool:
    """Return whether an entry is of these types and, if a number, one that float64 holds."""
    return type(x) in kinds and (type(x) is not int or abs(x) < 2**63)


def read_folder(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(run.json, rows) of a finished or running folder.

    Raises:
        ValueError: not a folder of results, a broken line, or rows of more than one configuration.
    """
    run = _read_run(folder)
    for name in (ROWS, f"{ROWS}.gz", ROWS):  # the first again: rows may be unpacked meanwhile
        if run is None:
            break
        try:
            rows = list(read_rows(folder / name, config=digest(run["configuration"])))
        except FileNotFoundError:
            continue
        run = _read_run(folder) or run  # a session that began meanwhile
        if beyond := [row["session"] for row in rows if row["session"] >= len(run["sessions"])]:
            raise ValueError(f"results: expected {folder / RUN} to hold session {beyond[0]} of {name}, got none")
        return run, rows
    raise ValueError(f"results: expected {RUN} and {ROWS} (or {ROWS}.gz) in {str(folder)!r}, got no such files")


def taken(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return what a table takes of the rows, in words.

    Raises:
        ValueError: a row that tables cannot use.
    """
    rows = list(rows)
    prompts = {row["prompt"] for row in rows if row["row"] == "prompt" and {"task", "length"} <= row.keys()}
    answers = [row for row in rows if row["row"] == "answer"]
    for row in answers:
        if row["prompt"] not in prompts:
            raise ValueError(f"results: expected a row with task and length for prompt {row['prompt']!r}, got none")
        if row.keys() & {"score", "nll", "kl"} and not {"kept", "bytes"} <= row.keys():
            raise ValueError(f"results: expected shares kept and bytes in every answer to {row['prompt']!r}, got none")
    cells = {cell_of(row) for row in answers}
    again = len(answers) - len(cells)
    note = f"; {again:,} of them measured again, of which the last counts" if again else ""
    return f"{len(answers):,} answers on {len(prompts):,} prompts{note}"


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
    """Compress a folder's rows; they are read and gone on with as before, by a run that is under way too.

    Raises:
        ValueError: not a folder of results, or a broken line.
    """
    read_folder(folder)
    packed, file = folder / f"{ROWS}.gz", folder / ROWS
    with json_lines.alone(folder):
        if file.is_file():
            json_lines.add(file, [])  # cuts half a row off
            _write_bytes(packed, gzip.compress(file.read_bytes(), 9, mtime=0))  # the same bytes for the same rows
            file.unlink()
    return packed


def _unpack(folder: Path) -> None:
    """Compressed rows back into the file that is appended to; where that is still there, packing was cut short."""
    packed, rows = folder / f"{ROWS}.gz", folder / ROWS
    if packed.is_file():
        if not rows.is_file():
            _write_bytes(rows, b"".join(line for _, line in json_lines.lines(packed)))
        packed.unlink()


def _read_run(folder: Path) -> dict[str, Any] | None:
    file = folder / RUN
    if not file.is_file():
        if (folder / ROWS).exists():
            raise ValueError(f"results: expected {RUN} beside {ROWS} in {str(folder)!r}, got none")
        return None
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        configuration, sessions = run["configuration"], run["sessions"]
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise ValueError(f"results: expected a configuration and sessions in {file}, got {error!r}") from error
    if not isinstance(configuration, dict) or not isinstance(sessions, list):
        raise ValueError(f"results: expected an object configuration and a list sessions in {file}, got other kinds")
    return {"configuration": configuration, "sessions": sessions}


def _same(theirs: Mapping[str, Any], ours: Mapping[str, Any], folder: Path) -> None:
    differ = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    if differ:
        parts = "; ".join(f"{key}: there {theirs.get(key)!r}, here {ours.get(key)!r}" for key in differ)
        raise ValueError(f"out: expected a folder of this configuration, got {str(folder)!r} of another one ({parts})")


def _write_whole(file: Path, content: Mapping[str, Any]) -> None:
    _write_bytes(file, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
