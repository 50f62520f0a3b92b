"""The documents' code runs, their links lead somewhere, and their commands exist."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import decantkv
from decantkv.methods import METHODS

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES, *sorted((ROOT / "results").glob("*/README.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name_of(path):
    return str(path.relative_to(ROOT))


def code(path, language):
    blocks = FENCE.findall(path.read_text(encoding="utf-8"))
    return [textwrap.dedent(text) for _, kind, text in blocks if kind == language]


def anchors(path):
    """Return what a heading of the page is reached by, as GitHub and mkdocs make it."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    words = [re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", word).strip().replace(" ", "-") for word in words}


@pytest.mark.model
@pytest.mark.parametrize("page", [page for page in PAGES if code(page, "python")], ids=name_of)
def test_the_code_of_a_page_runs_block_by_block(page, demo_model, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("decantkv.methods.METHODS", dict(METHODS))
    monkeypatch.setattr("decantkv.hf.loading.load", lambda source: demo_model)
    names = {"__name__": page.stem}
    for number, block in enumerate(code(page, "python"), 1):
        exec(compile(block, f"{page.name}, block {number}", "exec", dont_inherit=True), names)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading(document):
    text = FENCE.sub("", document.read_text(encoding="utf-8"))
    for target in LINK.findall(text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        place, _, anchor = target.partition("#")
        path = document if not place else document.parent / place
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_every_command_of_the_documents_exists_with_its_options():
    from decantkv.cli import build

    blocks = [block for document in DOCUMENTS for block in code(document, "bash")]
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("decantkv ")]
    assert len(lines) > 10
    for line in lines:
        command = build()
        words = shlex.split(line, comments=True)[1:]
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        options = {name for parameter in command.params for name in parameter.opts}
        assert [word for word in words if word.startswith("--") and word not in options] == [], line


def test_the_site_is_built_without_a_warning_and_asks_no_other_host(tmp_path):
    pytest.importorskip("material", reason="the extra `docs` is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert (
        re.findall(r'<(?:script|img|iframe)[^>]* src="https?:[^"]*"|<link[^>]*stylesheet"[^>]* href="https?:', home)
        == []
    )
    assert "decantkv.attach" in (tmp_path / "reference" / "attach.html").read_text(encoding="utf-8")


def test_the_citation_has_the_version_of_the_package():
    assert f"version: {decantkv.__version__}" in (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()


def test_the_page_of_public_names_has_every_name_and_option():
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    methods = {cls.__name__ for cls in METHODS.values()}
    named = set(re.findall(r"`([\w.]+)", page))
    assert set(decantkv.__all__) - methods <= named
    assert set(inspect.signature(decantkv.attach).parameters) - {"model", "options"} <= named
    shown = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("*.md")))
    assert [name for name in decantkv.__all__ if f"::: decantkv.{name}\n" not in shown] == []
