"""`decantkv generation`: the tables of decoding, memory and capped prompts, one command each."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(help="Measure generation on this GPU, with random weights.", no_args_is_help=True)

Geometries = Annotated[
    str,
    typer.Option(help="Of llama-3.1-8b, qwen2.5-7b, mistral-7b; comma-separated. tiny tries a command out anywhere."),
]
Numbers = Annotated[str, typer.Option(help="Comma-separated.")]
Out = Annotated[Path | None, typer.Option(help="Append each row to this file; rows that are in it are not made again.")]
Names = Annotated[str, typer.Option(help="Contenders; comma-separated.")]


@app.command()
def decode(
    geometries: Geometries = "llama-3.1-8b",
    batches: Numbers = "1,32",
    kept: int = 6553,
    new: int = 64,
    contenders: Names = "dynamic,static compiled,ours,ours eager",
    out: Out = None,
) -> None:
    """Milliseconds a token: dynamic cache, static cache compiled, ours with and without graphs."""
    from decantkv.lab.bench import generation as g

    each(geometries, out, lambda model: g.decode(
        model, batches=numbers(batches), kept=kept, new=new, names=words(contenders)
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
    from decantkv.lab.bench import generation as g

    capped: dict[str, Any] = {"prefill_chunk": chunk, "max_kv_tokens": cap}
    settings = [capped] if capped_only else [None, {}, {"prefill_chunk": chunk}, capped]
    each(geometries, out, lambda model: g.bounded(
        model, lengths=numbers(lengths), settings=settings, budget=budget
    ))  # fmt: skip


@app.command()
def throughput(
    geometries: Geometries = "llama-3.1-8b,qwen2.5-7b,mistral-7b",
    lengths: Numbers = "16384,32768,65536,131072",
    batches: Numbers = "1,2,4,8,16,32,64,128,256",
    budget: float = 0.05,
    impls: Annotated[str, typer.Option(help="Implementations of the scores; comma-separated.")] = "triton,torch",
    new: int = 32,
    contenders: Names = "dynamic,static compiled,ours",
    distinct: Annotated[int, typer.Option(min=1, help="Prompts that are read; their caches take turns as rows.")] = 2,
    out: Out = None,
) -> None:
    """Tokens a second by batch, until memory ends, full cache and kept; a length is read once, not once a batch."""
    from decantkv.lab.bench import generation as g
    from decantkv.lab.bench.cli import chosen

    each(geometries, out, lambda model: g.throughput(
        model, lengths=numbers(lengths), budget=budget, batches=numbers(batches), new=new, names=words(contenders),
        impls=[chosen(impl) for impl in words(impls)], distinct=distinct,
    ))  # fmt: skip


@app.command()
def latency(
    geometries: Geometries = "llama-3.1-8b",
    length: int = 32768,
    batches: Numbers = "1,2,4,8,16,32",
    methods: Annotated[str, typer.Option(help="Methods, comma-separated, or all.")] = "all",
    budget: float = 0.05,
    new: int = 128,
    static: Annotated[bool, typer.Option(help="Also transformers' static cache; compiling takes minutes.")] = True,
    out: Out = None,
) -> None:
    """First token, whole generation and the batch at which memory ends, without eviction and for each method.

    A batch that does not fit fails in the first layer, and larger ones of its method are not tried.
    """
    from decantkv.lab.bench import generation as g

    each(geometries, out, lambda model: g.latency(
        model, length=length, batches=numbers(batches), methods=methods_of(methods), budget=budget, new=new,
        static=static,
    ))  # fmt: skip


@app.command()
def capacity(
    geometries: Geometries = "llama-3.1-8b",
    lengths: Numbers = "32768",
    methods: Annotated[str, typer.Option(help="Methods, comma-separated, or all.")] = "all",
    budget: float = 0.05,
    most: Annotated[int, typer.Option(min=1, help="No larger batch is tried.")] = 256,
    out: Out = None,
) -> None:
    """The largest batch of prompts that is read together, without eviction and for each method, by trial."""
    from decantkv.lab.bench.capacity import capacity as measured

    each(geometries, out, lambda model: measured(
        model, lengths=numbers(lengths), methods=methods_of(methods), budget=budget, most=most
    ))  # fmt: skip


@app.command()
def long(
    geometries: Geometries = "llama-3.1-8b",
    length: int = 8192,
    kept: int = 4096,
    new: int = 32768,
    every: Annotated[str, typer.Option(help="Intervals of re-eviction, comma-separated; 0: none.")] = "128,0",
    marks: Annotated[str, typer.Option(help="After how many tokens bytes are read.")] = "128,4096,8192,16384,32768",
    out: Out = None,
) -> None:
    """A long answer: milliseconds a token and the cache's bytes the further it gets, re-evicted on the way and not."""
    from decantkv.lab.bench.long_answer import long_answer

    each(geometries, out, lambda model: long_answer(
        model, length=length, kept=kept, new=new, intervals=[number or None for number in numbers(every)],
        marks=numbers(marks),
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
    from decantkv.hf.loading import load
    from decantkv.lab.bench.cap_cost import measure
    from decantkv.lab.bench.rows import circumstances

    loaded, tokenizer = load(model)
    where = {**circumstances(), "model": Path(model).name, "text": text.name}
    for row in measure(
        loaded, tokenizer, text.read_text(), length=length, prompts=prompts, budget=budget, chunk=chunk,
        caps=numbers(caps),
    ):  # fmt: skip
        tell({**where, **row}, out)


def tell(row: dict[str, Any], out: Path | None) -> None:
    """Print a row, and append it to a file."""
    from decantkv.lab.bench.cases import append

    print(json.dumps(row, sort_keys=True), flush=True)
    append(out, row)


def each(geometries: str, out: Path | None, cases: Callable[[Any], Iterator[Any]]) -> None:
    """Build each model when its first row is to be made, and print the rows as they come."""
    import torch

    from decantkv.lab.bench import generation as g
    from decantkv.lab.bench.cases import collect, run
    from decantkv.lab.bench.rows import circumstances

    on_gpu = torch.cuda.is_available()
    for geometry in words(geometries):
        if not on_gpu and geometry != "tiny":
            raise ValueError("device: expected a CUDA device to measure on, got none")
        model = functools.cache(functools.partial(g.build, geometry, "cuda" if on_gpu else "cpu"))
        where = {**circumstances(), "geometry": geometry}
        for row, made in run(cases(model), where, out):
            print(json.dumps(row, sort_keys=True) if made else f"there already: {row['step']} {row}", flush=True)
        model.cache_clear()
        collect(torch.device("cuda" if on_gpu else "cpu"))


def methods_of(text: str) -> list[str]:
    """Names from a list, or of every method."""
    from decantkv.methods import METHODS

    return list(METHODS) if text == "all" else words(text)


def words(text: str) -> list[str]:
    """Names from a list like "dynamic,static compiled"."""
    return [part.strip() for part in text.split(",")]


def numbers(text: str) -> list[int]:
    """Whole numbers from a list like "1,32".

    Raises:
        ValueError: something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"numbers: expected whole numbers like 1,32, got {text!r}") from None
