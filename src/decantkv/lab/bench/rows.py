"""Rows of results: every number beside the circumstances it was measured in."""

from __future__ import annotations

import datetime
from typing import Any

import torch

from decantkv.lab.provenance import command, commit, device_name, versions

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
