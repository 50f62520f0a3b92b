"""`decantkv report`: one self-contained page from folders of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decantkv.terminal import Console


def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of results, or folders of such folders.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = Path("report.html"),
    bench: Annotated[
        list[Path] | None, typer.Option(help="A file of measured times to show beside; repeatable.")
    ] = None,
) -> None:
    """Write one self-contained page from folders of results."""
    from decantkv.report.build import build

    page = build(folders, bench or ())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    Console(stderr=True, highlight=False).print(f"{out}: {len(page) / 2**20:.1f} MB", markup=False)
