"""Replace files as a whole. A reader finds the old content or the new one, even if the writer is killed."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks: what a killed writer left stays
    fcntl = None  # type: ignore[assignment]

_SCRATCH = ".decantkv-"


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file, or the target of a link. An existing file keeps its mode; a new one gets the umask's.

    Raises:
        ValueError: the place cannot be written; the message names it.
    """
    try:
        target = Path(os.path.realpath(path))
        if target.is_dir():
            raise ValueError(f"path: expected a file, got the folder {path}")
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        _sweep(target.parent)
        scratch = target.parent / f"{_SCRATCH}{secrets.token_hex(8)}"
        try:
            with open(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666), "wb") as file:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX)  # ends with this process, so that others see what is left over
                if mode is not None:
                    os.chmod(scratch, mode)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(scratch, target)
        finally:
            scratch.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"path: expected a place that can be written, got {path}: {error.strerror}") from error


def _sweep(folder: Path) -> None:
    """Delete temporary files of killed writers: those whose lock is free."""
    for left in folder.glob(f"{_SCRATCH}*") if fcntl is not None else ():
        try:
            with left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if file.seek(0, os.SEEK_END):  # an empty one may be about to be locked
                    left.unlink(missing_ok=True)
        except OSError:  # in use, or another user's
            continue
