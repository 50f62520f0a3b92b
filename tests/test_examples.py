"""The README's code blocks and the examples run as they stand."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from decantkv.methods import METHODS

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
HUB_ID = '"HuggingFaceTB/SmolLM2-135M-Instruct"'
SERVERS = ("served_model", "serve_with_vllm")  # in processes of their own
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def python(arguments, **environment):
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.model
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_readme_block(number, model_path):
    code = BLOCKS[number].replace(HUB_ID, repr(model_path))
    assert code != BLOCKS[number], "the block loads the model by its public name"
    assert python(["-W", "error::FutureWarning", "-c", code])


@pytest.mark.model
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, model_path, demo_model, monkeypatch, capsys):
    assert len(path.read_text().splitlines()) <= 40
    if path.stem == "serve_with_vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed here; `make test-vllm` asks the same question of it")
    if path.stem in SERVERS:
        out = python([str(path), model_path])
    else:  # in this process, which has read the weights
        monkeypatch.setattr(sys, "argv", [str(path), model_path])
        monkeypatch.setattr("decantkv.methods.METHODS", dict(METHODS))
        monkeypatch.setattr("decantkv.hf.loading.load", lambda source: demo_model)
        runpy.run_path(str(path), run_name="__main__")
        out = capsys.readouterr().out
    assert out.strip()
    if path.stem in ("padded_batch", "chat_two_turns", "beam_search", "served_model"):
        assert "4417" in out
    if path.stem == "padded_batch":
        assert "7392" in out


def test_the_commands_of_the_first_screen_are_in_the_makefile():
    first = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:45])
    makefile = (ROOT / "Makefile").read_text()
    for command in ("demo", "test"):
        assert f"make {command}" in first
        assert f"\n{command}:" in makefile
