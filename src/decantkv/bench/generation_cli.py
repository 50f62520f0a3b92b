"""`decantkv generation`: the tables of decoding, memory and capped prompts, one command each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Measure generation on this GPU, with random weights.", no_args_is_help=True)

Geometries = Annotated[str, typer.Option(help="Of llama-3.1-8b, qwen2.5-7b, mistral-7b; comma-separated.")]
Numbers = Annotated[str, typer.Option(help="Comma-separated.")]
Out = Annotated[Path | None, typer.Option(help="Also append the rows to this file.")]


@app.command()
def decode(
    geometries: Geometries = "llama-3.1-8b", batches: Numbers = "1,32", kept: int = 6553, new: int = 64, out: Out = None
) -> None:
    """Milliseconds a token: dynamic cache, static cache compiled, ours with and without graphs."""
    from decantkv.bench import generation as g

    each(geometries, out, lambda model: (
        row for batch in numbers(batches) for row in g.decode(model, batch=batch, kept=kept, new=new)
    ))  # fmt: skip


@app.command()
def prefill(
    geometries: Geometries = "llama-3.1-8b",
    lengths: Numbers = "131072",
    chunk: int = 4096,
    cap: int = 16384,
    budget: float = 0.05,
    capped_only: Annotated[bool, typer.Option(help="Leave out what holds the whole prompt.")] = False,
    out: Out = None,
) -> None:
    """Seconds and peak memory of a prompt: in one piece, in chunks, and in chunks under a cap."""
    from decantkv.bench import generation as g

    capped: dict[str, Any] = {"prefill_chunk": chunk, "max_kv_tokens": cap}
    settings = [capped] if capped_only else [None, {}, {"prefill_chunk": chunk}, capped]
    each(geometries, out, lambda model: (
        row for length in numbers(lengths)
        for row in g.bounded(model, length=length, settings=settings, budget=budget)
    ))  # fmt: skip


@app.command()
def throughput(
    geometries: Geometries = "llama-3.1-8b",
    lengths: Numbers = "16384,32768,65536,131072",
    batches: Numbers = "1,2,4,8,16,32,64,128,256",
    budget: float = 0.05,
    impl: str = "auto",
    out: Out = None,
) -> None:
    """Tokens a second by batch, until memory ends, full cache and kept."""
    from decantkv.bench import generation as g

    each(geometries, out, lambda model: (
        row for length in numbers(lengths)
        for row in g.throughput(model, length=length, budget=budget, batches=numbers(batches), impl=impl)
    ))  # fmt: skip


@app.command()
def latency(
    geometries: Geometries = "llama-3.1-8b",
    length: int = 32768,
    batches: Numbers = "1,2,4,8,16,32",
    methods: str = "dropkv,snapkv,knorm,streaming",
    budget: float = 0.05,
    new: int = 128,
    out: Out = None,
) -> None:
    """First token, whole generation and the batch at which memory ends, for each method."""
    from decantkv.bench import generation as g

    each(geometries, out, lambda model: g.latency(
        model, length=length, batches=numbers(batches), methods=methods.split(","), budget=budget, new=new
    ))  # fmt: skip


@app.command()
def cap_cost(
    model: Annotated[str, typer.Option(help="A model id, a model folder, or a .gguf file.")],
    text: Annotated[Path, typer.Option(help="UTF-8 text to hide the number in.")],
    length: int = 2000,
    prompts: int = 6,
    budget: float = 0.1,
    chunk: int = 256,
    caps: Numbers = "400,800,1200",
    out: Out = None,
) -> None:
    """What a cap costs in quality: a planted number asked of a real model, on any device."""
    from decantkv.bench.cap_cost import measure
    from decantkv.bench.rows import circumstances
    from decantkv.models import load

    loaded, tokenizer = load(model)
    where = {**circumstances(), "model": Path(model).name, "text": text.name}
    for row in measure(
        loaded, tokenizer, text.read_text(), length=length, prompts=prompts, budget=budget, chunk=chunk,
        caps=numbers(caps),
    ):  # fmt: skip
        tell({**where, **row}, out)


def tell(row: dict[str, Any], out: Path | None) -> None:
    """Print a row, and append it to a file."""
    line = json.dumps(row, sort_keys=True)
    print(line, flush=True)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(line + "\n")


def each(geometries: str, out: Path | None, rows: Callable[[Any], Iterator[dict[str, Any]]]) -> None:
    """Build each model in turn and print its rows as they come."""
    import torch

    from decantkv.bench import generation as g

    if not torch.cuda.is_available():
        raise ValueError("device: expected a CUDA device to measure on, got none")
    for geometry in geometries.split(","):
        model = g.build(geometry)
        for row in g.with_circumstances(geometry, rows(model)):
            tell(row, out)
        del model
        g.collect(torch.device("cuda"))


def numbers(text: str) -> list[int]:
    """Whole numbers from a list like "1,32".

    Raises:
        ValueError: something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"numbers: expected whole numbers like 1,32, got {text!r}") from None
