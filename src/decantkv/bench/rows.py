"""Rows of results: every number beside the circumstances it was measured in."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from decantkv.circumstances import command, commit, device_name, versions

Row = dict[str, Any]


def circumstances() -> Row:
    """Device, versions, commit, command, date."""
    return {
        "device": device_name(torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        "cuda": torch.version.cuda,
        "versions": versions(("torch", "triton", "transformers")),
        "commit": commit(),
        "command": command(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def write(path: Path, rows: Iterable[Row]) -> None:
    """One JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))


def read(path: Path) -> list[Row]:
    """What `write` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]
