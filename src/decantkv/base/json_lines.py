"""Rows of results on disk, as JSON Lines. Several processes may add to one file; a killed process leaves it whole."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from filelock import FileLock

from decantkv.base.writing import write_whole

Row = dict[str, Any]
LOCK = ".lock"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Make a folder and lock it for this process alone. The lock ends with the process, however it ends.

    Raises:
        ValueError: no such folder can be made or written to.
    """
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise ValueError(f"out: expected a folder that can be written to, got {folder}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.release()


def append(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a file, which is made if need be; other processes may do the same.

    Raises:
        ValueError: the file cannot be written.
    """
    with alone(file.parent):
        add(file, [line_of(row, sort_keys=True) for row in rows])


def add(file: Path, lines: Sequence[bytes]) -> int:
    """Add lines to a file, all or none, and return its size. Call it inside `alone`.

    Raises:
        ValueError: the file cannot be written.
    """
    try:
        with open(os.open(file, os.O_RDWR | os.O_CREAT, 0o666), "rb+", buffering=0) as handle:
            end = _settle(handle)
            try:
                left = memoryview(b"".join(lines))
                while left:
                    left = left[handle.write(left) :]
                os.fsync(handle.fileno())
            except BaseException:  # no space, or Ctrl-C: the next row must not follow half a one
                handle.truncate(end)
                raise
            return handle.tell()
    except OSError as error:
        raise ValueError(f"results: expected a file that can be written, got {file}: {error.strerror}") from error


def _settle(handle: FileIO) -> int:
    """Go to a file's end and return its position; cut off half a row that a killed process left there."""
    end = handle.seek(0, os.SEEK_END)
    handle.seek(max(end - 1, 0))
    if handle.read(1) in (b"", b"\n"):
        return end
    handle.seek(0)
    last = handle.readall().rpartition(b"\n")[2]
    if is_torn(last):
        handle.truncate(end - len(last))
    else:
        handle.write(b"\n")
    return handle.seek(0, os.SEEK_END)


def write(file: Path, rows: Iterable[Mapping[str, Any]], **options: Any) -> None:
    """Replace a file's rows, all at once; `options` are those of `json.dumps`.

    Raises:
        ValueError: the file cannot be written.
    """
    with alone(file.parent):
        write_whole(file, b"".join(line_of(row, **options) for row in rows))


def read(file: Path) -> list[Row]:
    """Return every row of a file; a torn last line is left out, see `numbered`.

    Raises:
        ValueError: no such file, or a line that is no JSON object; it is named.
    """
    return [row for _, row in numbered(file)]


def numbered(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number, row) of a file, also of a .gz; a torn last line, of a killed process, is left out.

    Raises:
        ValueError: no such file, or a line that is no JSON object; it is named.
    """
    try:
        for number, line in lines(file):
            if not is_torn(line):
                yield number, parse(line, file, number)
    except FileNotFoundError as error:
        raise ValueError(f"results: expected a file of rows, got none at {file}") from error


def lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line with its end) for every line that is not blank, also of a .gz.

    Raises:
        FileNotFoundError: no such file.
        ValueError: the file cannot be read, or is a broken or cut .gz; it is named, and the line.
    """
    number = 0
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as found:
            for number, line in enumerate(found, start=1):
                if line.strip():
                    yield number, line
    except FileNotFoundError:
        raise
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"results: {file} line {number + 1}: expected a file that can be read, got {error}") from error


def parse(line: bytes, file: Path, number: int) -> Row:
    """Return the JSON object of a line.

    Raises:
        ValueError: the line is no JSON object; the message names file and line.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{place(file, number)}: expected a JSON object, got {_start(line)} ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{place(file, number)}: expected a JSON object, got {_start(line)}")
    return row


def line_of(row: Mapping[str, Any], **options: Any) -> bytes:
    """Return a row as a line of text; `options` are those of `json.dumps`.

    Raises:
        ValueError: a number that JSON has not: NaN or an infinity, which no table could average.
    """
    try:
        text = json.dumps(row, allow_nan=False, **options)
    except ValueError as error:
        raise ValueError(f"results: expected finite numbers in every row, got {_start(repr(row).encode())}") from error
    return (text + "\n").encode("utf-8", "backslashreplace")  # half a surrogate as JSON writes it


def is_torn(line: bytes) -> bool:
    """Return whether a line is half a row: it has no line end and is no JSON object."""
    if line.endswith(b"\n"):
        return False
    try:
        return not isinstance(json.loads(line.decode("utf-8")), dict)
    except (ValueError, RecursionError):
        return True


def place(file: Path, number: int) -> str:
    """Return the name of a line for a message."""
    return f"results: {file} line {number}"


def _start(line: bytes) -> str:
    return repr(line[:80].decode("utf-8", "replace").rstrip("\n"))
