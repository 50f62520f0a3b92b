"""The origin of a row of results: device, versions, commit, command."""

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
    """Return a GPU's name, or a CPU's name and the number of cores that this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    """Return the processor's name from Linux, or on other systems from Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Return installed versions by package; None for packages that are not installed."""
    return {package: installed(package) for package in packages}


def command() -> str:
    """Return this process's command line, to be pasted into a shell."""
    return shlex.join(["decantkv", *sys.argv[1:]])


def commit(*, mark: bool = False) -> str | None:
    """Return $DECANTKV_COMMIT, which a copy without history needs, or the checkout's commit, or None.

    Args:
        mark: shorten to twelve digits, and add "+" if files differ from the commit.
    """
    if named := os.environ.get("DECANTKV_COMMIT"):
        return named
    head = _git("rev-parse", *(["--short=12"] if mark else []), "HEAD")
    return f"{head}+" if head and mark and _git("status", "--porcelain", "-uno") else head


def _git(*arguments: str) -> str | None:
    """Return git's output for this checkout, or None if there is none, no git, or no checkout."""
    try:
        run = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except OSError:
        return None
    return run.stdout.strip() or None
