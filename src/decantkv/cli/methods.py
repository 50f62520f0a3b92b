"""`decantkv methods`: the list of methods."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from decantkv.cli.console import Console

# what a terminal has room for, a wide and a narrow one; --json prints everything
_WIDE = ("name", "kind", "score", "keeps", "pooling", "allocation", "cost", "needs", "source")
_NARROW = ("name", "kind", "score", "keeps", "needs")


def methods(as_json: Annotated[bool, typer.Option("--json", help="Print JSON rows.")] = False) -> None:
    """List the methods: what they score, what they keep, their authors' settings, and what they need to see."""
    from decantkv.methods.table import table

    rows = [dataclasses.asdict(row) for row in table()]
    if as_json:
        print(json.dumps(rows))
        return
    console = Console()
    columns = _WIDE if console.width >= 140 else _NARROW
    shown = Table(
        title="decantkv methods",
        caption="needs: beyond the window's queries, keys and values. cost: multiply-adds a cached token and KV head; "
        "g query heads share it, w window rows, d head width, E hidden width, N prompt. --json prints all columns.",
    )
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(escape(row[column]) for column in columns))  # formulas have brackets
    console.print(shown)
