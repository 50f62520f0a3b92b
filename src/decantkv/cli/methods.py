"""`decantkv methods`: what there is to choose from."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from decantkv.cli import app


@app.command()
def methods(as_json: Annotated[bool, typer.Option("--json", help="Print JSON rows.")] = False) -> None:
    """List the methods: what they score, what they keep, their authors' settings."""
    from decantkv.methods import METHODS

    rows = [
        {
            "name": cls.name,
            "kind": cls.kind,
            "score": cls.formula,
            "window": cls().window,
            "pool": cls().pool if cls().pool == "none" else f"{cls().pool} {cls().kernel_size}",
            "sinks": cls().sinks,
            "presets": ", ".join(cls.presets),
            "source": cls.source,
        }
        for cls in METHODS.values()
    ]
    if as_json:
        print(json.dumps(rows))
        return
    table = Table(title="decantkv methods", caption="window: last tokens that score the rest and always stay")
    for column in rows[0]:
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
