"""Every kernel compiles for the GPUs it is meant for; DECANTKV_COMPILE=full tries every shape, in minutes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["sm80", "sm90", "sm100", "sm120", "gfx942"])
def test_kernels_compile_without_spills(name):
    full = os.environ.get("DECANTKV_COMPILE") == "full"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    command = [sys.executable, "-m", "tests.kernels.compiles", name, *(["--full"] if full else [])]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    if "not judged" in run.stdout:
        pytest.skip(run.stdout.splitlines()[-1])
    assert "no spills" in run.stdout
