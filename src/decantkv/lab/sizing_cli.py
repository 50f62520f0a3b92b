"""`decantkv plan`: what the cache will weigh, before anything is loaded."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from decantkv.cli.console import Console
from decantkv.hf.context import check_context


def plan(
    model: Annotated[
        str, typer.Option(help="A model id, a model folder, a config.json or a .gguf file; no weights are read.")
    ],
    length: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")],
    budget: Annotated[str, typer.Option(help="What is kept: a share like 5% or 0.05, or a number of tokens.")] = "0.05",
    new_tokens: Annotated[int, typer.Option(min=0, help="Tokens of an answer.")] = 0,
    gpu: Annotated[str, typer.Option(help="h200, h100, a100, l40s, ... or a number of GB.")] = "",
    dtype: Annotated[str, typer.Option(help="Of weights and cache, such as bfloat16; default: the model's.")] = "",
    rehearsal: Annotated[
        str, typer.Option(help="Whose queries decide, such as replay+anchors; default: the prompt's last.")
    ] = "",
    beyond_context: Annotated[
        bool, typer.Option("--beyond-context", help="Allow lengths beyond the model's context.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what the KV cache of a prompt weighs, full and kept, and the batch that fits a GPU."""
    import torch

    from decantkv.cli.generate import parse_budget
    from decantkv.hf.loading import name_of
    from decantkv.lab.sizing import parse_memory, plan, read_config

    kind = getattr(torch, dtype, None) if dtype else None
    if dtype and not isinstance(kind, torch.dtype):
        raise ValueError(f"dtype: expected the name of a torch dtype such as bfloat16, got {dtype!r}")
    config = read_config(model)
    check_context(config, length + new_tokens, "length", beyond=beyond_context)
    made = plan(
        config,
        length=length,
        budget=parse_budget(budget),
        new_tokens=new_tokens,
        dtype=kind,
        memory=parse_memory(gpu) if gpu else None,
        rehearsal=rehearsal or None,
    )
    if as_json:
        print(made.to_json())
        return
    table = Table(title=f"{escape(name_of(model))}: {length:,} tokens, {made.n_keep:,} kept per head", show_header=True)
    for column in ("", "full", "kept"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("KV cache of one prompt", gib(made.bytes_full), gib(made.bytes_kept))
    table.add_row("while it is read", gib(made.bytes_full), gib(made.bytes_peak))
    if made.memory is not None:
        table.add_row(f"prompts beside the weights in {made.memory / 1e9:g} GB", f"{made.batch_full:,}",
                      f"{made.batch_kept:,}")  # fmt: skip
    console = Console()
    console.print(table)
    if made.note is not None:
        console.print(f"note: {made.note}", highlight=False)
    console.print(f"weights {gib(made.weights)}; {made.evicting} of {made.layers} layers are evicted; a tenth of the "
                  "GPU is left free", highlight=False)  # fmt: skip


def gib(number: int) -> str:
    """Bytes in GiB, the unit GPUs are counted in, or in the largest smaller unit that does not round to nothing."""
    unit, size = next(((u, s) for u, s in (("GiB", 2**30), ("MiB", 2**20)) if number >= 0.1 * s), ("KiB", 2**10))
    return f"{number / size:,.2f} {unit}"
