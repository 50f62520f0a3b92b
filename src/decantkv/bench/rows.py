"""Rows of results: every number beside the circumstances it was measured in."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
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
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def commit() -> str | None:
    """The checkout's commit; DECANTKV_COMMIT where the measured copy has no history."""
    if named := os.environ.get("DECANTKV_COMMIT"):
        return named
    run = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return run.stdout.strip() or None


def write(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))


def read(path: Path) -> list[Row]:
    """What `write` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]
