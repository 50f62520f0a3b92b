"""A hook of mkdocs: files of the repository outside docs/ that pages link to become part of the site."""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")
IN_MENU = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")


def _uri(path: Path) -> str:
    """Return a file's place among the site's sources; code becomes a page that shows it."""
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix()}" + (".md" if path.suffix == ".py" else "")


def _path(uri: str) -> Path:
    """Return the file whose place `uri` is."""
    outside = uri.removeprefix("repository/")
    return DOCS / uri if outside == uri else ROOT / outside.removesuffix(".md" if outside.endswith(".py.md") else "")


def _outside(page: Path) -> list[Path]:
    """Return the files outside docs/ that a page links to."""
    targets = [(page.parent / found[1]).resolve() for found in LINK.finditer(page.read_text(encoding="utf-8"))]
    return [path for path in targets if path.is_file() and not path.is_relative_to(DOCS)]


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to, and what those link to in turn."""
    waiting = [ROOT / name for name in IN_MENU] + [path for page in DOCS.glob("*.md") for path in _outside(page)]
    while waiting:
        path = waiting.pop()
        if files.get_file_from_path(_uri(path)) is not None:
            continue
        if path.suffix == ".py":
            text = f"# {path.relative_to(ROOT)}\n\n```python\n{path.read_text(encoding='utf-8')}```\n"
            files.append(File.generated(config, _uri(path), content=text))
            continue
        files.append(File.generated(config, _uri(path), abs_src_path=str(path)))
        if path.suffix == ".md":
            waiting += _outside(path)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to where the hook put their targets."""
    source, here = _path(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def moved(found: re.Match[str]) -> str:
        path = Path(os.path.normpath(source.parent / found[1]))
        uri = _uri(path) if path.is_relative_to(ROOT) else None
        if uri is None or files.get_file_from_path(uri) is None:
            return found[0]  # mkdocs names it
        return f"]({posixpath.relpath(uri, here or '.')}{found[2] or ''})"

    return markdown if source.suffix == ".py" else LINK.sub(moved, markdown)
