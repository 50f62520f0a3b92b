"""What a row of results says of the run that made it: device, versions, commit, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from decantkv.base.versions import installed


def device_name(device: torch.device) -> str:
    """A GPU's name; for a CPU its name and how many cores this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    """What Linux calls the processor, elsewhere what Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Installed versions; None for what is not installed."""
    return {package: installed(package) for package in packages}


def command() -> str:
    """This process's command line, to be pasted into a shell."""
    return shlex.join(["decantkv", *sys.argv[1:]])


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
