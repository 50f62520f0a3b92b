"""`decantkv report`: one self-contained page from folders of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from decantkv.cli.console import Console


def report(
    folders: Annotated[
        list[Path], typer.Argument(help="Folders of results, or folders of such folders; with --check, documents.")
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The page to write.")] = Path("report.html"),
    bench: Annotated[
        list[Path] | None, typer.Option(help="A file of measured times to show beside; repeatable.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Make the tables of documents anew from rows; fail where one differs.")
    ] = False,
    rewrite: Annotated[bool, typer.Option("--rewrite", help="Make the tables of documents anew, in place.")] = False,
) -> None:
    """Write one self-contained page from folders of results, or hold documents against rows."""
    if check or rewrite:
        _documents(folders, rewrite)
        return
    from decantkv.lab.report.build import build

    page = build(folders, bench or ())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page, encoding="utf-8")
    Console(stderr=True, highlight=False).print(f"{out}: {len(page) / 2**20:.1f} MB", markup=False)


def _documents(documents: list[Path], rewrite: bool) -> None:
    from decantkv.lab.report import blocks

    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    for document in documents:
        if not document.is_file():
            raise ValueError(f"report: expected a document, got {str(document)!r}")
    if rewrite:
        for document in documents:
            console.print(f"{document}: {'rewritten' if blocks.rewrite(document) else 'as it was'}")
        return
    found = [line for document in documents for line in blocks.differences(document)]
    for line in found:
        console.print(line)
    if found:
        raise typer.Exit(1)
    console.print(f"{sum(map(blocks.count, documents))} tables say what their rows say")
