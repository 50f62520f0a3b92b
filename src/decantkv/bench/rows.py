"""Rows of results: every number beside the circumstances it was measured in."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]


def circumstances() -> Row:
    """Device, versions, commit, command, date."""
    versions: dict[str, str | None] = {}
    for package in ("torch", "triton", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cuda": torch.version.cuda,
        "versions": versions,
        "commit": commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def commit(*, mark: bool = False) -> str | None:
    """The checkout's commit; DECANTKV_COMMIT where the measured copy has no history; None where nobody knows.

    Args:
        mark: twelve digits, and "+" where files differ from them.
    """
    if named := os.environ.get("DECANTKV_COMMIT"):
        return named
    head = _git("rev-parse", *(["--short=12"] if mark else []), "HEAD")
    return f"{head}+" if head and mark and _git("status", "--porcelain", "-uno") else head


def _git(*arguments: str) -> str | None:
    """What git says of this checkout; None for nothing, without git, and outside a checkout."""
    try:
        run = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except OSError:
        return None
    return run.stdout.strip() or None


def write(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))


def read(path: Path) -> list[Row]:
    """What `write` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]
