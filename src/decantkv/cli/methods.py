"""`decantkv methods`: what there is to choose from."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from decantkv.cli import app

# the columns a terminal has room for; --json prints all of them
_SHOWN = ("name", "kind", "score", "keeps", "pooling", "allocation", "cost", "needs", "source")


@app.command()
def methods(as_json: Annotated[bool, typer.Option("--json", help="Print JSON rows.")] = False) -> None:
    """List the methods: what they score, what they keep, their authors' settings, and what they need to see."""
    from decantkv.methods.table import table

    rows = [dataclasses.asdict(row) for row in table()]
    if as_json:
        print(json.dumps(rows))
        return
    shown = Table(
        title="decantkv methods",
        caption="cost: multiply-adds a cached token and KV head; g query heads share it, w window rows, d head width, "
        "E hidden width, N prompt. needs: beyond the window's queries, keys and values. --json adds defaults, presets.",
    )
    for column in _SHOWN:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(
            *(escape(row[column]) for column in _SHOWN)  # formulas have brackets
        )
    Console().print(shown)
