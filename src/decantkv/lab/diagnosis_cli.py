"""`decantkv doctor`: what this machine has and what will work on it."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from decantkv.cli.console import Console


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Say what this machine has, and what of decantkv will and will not work here, with the reason."""
    from decantkv.lab.diagnosis import examine

    found = examine()
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    machine = found.machine
    has = Table(title="this machine", show_header=False)
    has.add_row("Python", f"{machine.python}, {machine.system}")
    has.add_row("torch's build", machine.build or "cannot be imported")
    for gpu in machine.gpus:
        capability = ".".join(map(str, gpu.capability))
        has.add_row("GPU", escape(f"{gpu.name}, {gpu.memory / 2**30:.0f} GiB, compute capability {capability}"))
    if not machine.gpus:
        has.add_row("GPU", "none")
    for name, version in machine.packages.items():
        has.add_row(name, version or "–")
    works = Table(title="what works here")
    for column in ("what", "works", "why"):
        works.add_column(column, overflow="fold")
    for verdict in found.verdicts:
        mark = "[green]yes[/]" if verdict.works else "[red]no[/]"
        works.add_row(escape(verdict.what), mark, escape(verdict.reason))
    known = Table(title="versions of vLLM that the plug-in knows")
    for column in ("vLLM", "tried", "places it touches"):
        known.add_column(column, overflow="fold")
    here = None
    for minor, (tried, places) in found.seams.items():
        installed = (machine.vllm or "").startswith(f"{minor}.")
        known.add_row(f"{minor} (here)" if installed else minor, escape(tried), str(len(places)))
        here = places if installed else here
    console = Console()
    for table in (has, works, known):
        console.print(table)
    if here is not None:
        seams = Table("place", "what for", "there", title=f"where vLLM {machine.vllm} is touched")
        for place, purpose in here.items():
            gone = place in machine.vllm_gone or machine.vllm_error is not None
            seams.add_row(escape(place), escape(purpose), "[red]no[/]" if gone else "[green]yes[/]")
        console.print(seams)
