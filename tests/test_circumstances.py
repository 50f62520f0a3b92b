"""What rows say of the run that made them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import torch

from decantkv.lab import provenance


def test_a_command_can_be_pasted_into_a_shell(monkeypatch):
    words = [
        "/some/where/decantkv",
        "generation",
        "throughput",
        "--way",
        "static compiled",
        "--note",
        "it's 4 bits; 100 %",
    ]
    monkeypatch.setattr(sys, "argv", words)
    said = provenance.command()
    echoed = subprocess.run(["sh", "-c", f"printf '%s\\n' {said}"], capture_output=True, text=True, check=True).stdout
    assert echoed.splitlines() == ["decantkv", *words[1:]]
    assert shlex.split(said) == ["decantkv", *words[1:]]


def test_a_processor_is_named_with_the_cores_it_lends():
    name = provenance.device_name(torch.device("cpu"))
    assert name.endswith(" cores")
    if (info := Path("/proc/cpuinfo")).exists() and "model name" in info.read_text():
        assert name.rpartition(", ")[0] in info.read_text()


def test_what_is_not_installed_has_no_version():
    found = provenance.versions(("torch", "no-such-package"))
    assert found["no-such-package"] is None
    assert torch.__version__.startswith(found["torch"])  # which may say more: what it was built for


def test_the_commit_is_the_checkouts_or_what_the_caller_names(monkeypatch, tmp_path):
    monkeypatch.setenv("DECANTKV_COMMIT", "abc")
    assert provenance.commit() == provenance.commit(mark=True) == "abc"
    monkeypatch.delenv("DECANTKV_COMMIT")
    monkeypatch.setenv("PATH", str(tmp_path))  # no git
    assert provenance.commit() is None
