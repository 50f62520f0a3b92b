"""`decantkv bench`: speeds with their circumstances, and none on a red gate."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import torch
import typer
from rich.table import Table

from decantkv.base.json_lines import read, write
from decantkv.base.options import Impl, expect_choice
from decantkv.cli.console import Console
from decantkv.lab.bench.rows import Row

app = typer.Typer(help="Measure the evict step on this GPU.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")]
Out = Annotated[Path | None, typer.Option(help="Also write the rows to this file.")]
Lengths = Annotated[str, typer.Option(help="Prompt lengths, comma-separated.")]


@app.command()
def score(
    lengths: Lengths = "4096,32768,131072",
    variants: Annotated[bool, typer.Option(help="Also other windows, groups, head sizes and batches.")] = False,
    rivals: Annotated[bool, typer.Option(help="Also torch's implementations and kvpress.")] = True,
    floors: Annotated[
        bool, typer.Option("--floors", help="Instead, scores on today's models' shapes beside what memory allows.")
    ] = False,
    shapes: Annotated[str, typer.Option(help="Of those, names that contain one of these, by semicolons.")] = "",
    sweep: Annotated[bool, typer.Option(help="Of those, also other cuts of the kernels.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes that compile a sweep's kernels.")] = 1,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Scoring, selection and compaction of one layer."""
    need_gpu()
    if floors:
        from decantkv.lab.bench import floors as beside

        names = [name.strip() for name in shapes.split(";") if name.strip()]
        show(while_green(beside.measure(names, sweep=sweep, seed=seed, jobs=jobs), out), as_json)
        return
    from decantkv.lab.bench.score import LLAMA_8B, VARIANTS, measure

    made = (
        row
        for geometry in (LLAMA_8B, *(VARIANTS if variants else ()))
        for row in measure(geometry, parsed(lengths), seed=seed, all_contenders=rivals and geometry is LLAMA_8B)
    )
    show(while_green(made, out), as_json)


@app.command()
def quantities(lengths: Lengths = "4096,32768,131072", seed: int = 0, as_json: Json = False, out: Out = None) -> None:
    """What else the kernels compute: other methods' quantities, and paged storage."""
    need_gpu()
    from decantkv.lab.bench.quantities import measure

    show(while_green(measure(parsed(lengths), seed=seed), out), as_json)


@app.command()
def rehearsal(
    lengths: Lengths = "4096,32768,131072",
    rows: Annotated[int, typer.Option(help="Queries of a head that score at once.")] = 2048,
    sweep: Annotated[bool, typer.Option(help="Also other cuts of the kernel.")] = False,
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Scoring by many queries: what a chunk of a rehearsal adds to its attention in one layer."""
    need_gpu()
    from decantkv.lab.bench.rehearsal import measure

    (window,) = numbers("rows", str(rows))
    show(while_green(measure(parsed(lengths), window=window, sweep=sweep, seed=seed), out), as_json)


@app.command()
def prefill(
    lengths: Lengths = "4096,32768,131072",
    geometries: Annotated[str, typer.Option(help="Of llama-3.1-8b, qwen2.5-7b, mistral-7b.")] = "llama-3.1-8b",
    impls: Annotated[str, typer.Option(help="Implementations, comma-separated.")] = "triton",
    rehearsals: Annotated[str, typer.Option(help="Also after these, such as replay,anchors:0.1.")] = "",
    budget: float = 0.05,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Time to first token of a random-weight model, with and without eviction."""
    need_gpu()
    from decantkv.lab.bench.prefill import measure

    options: dict[str, Any] = {
        "impls": tuple(map(chosen, impls.split(","))),
        "rehearsals": tuple(text.strip() for text in rehearsals.split(",") if text.strip()),
        "budget": budget,
    }
    made = (row for name in geometries.split(",") for row in measure(name.strip(), parsed(lengths), **options))
    show(while_green(made, out), as_json)


@app.command()
def decode(
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,8,32",
    spreads: Annotated[str, typer.Option(help="Longest head over shortest, comma-separated.")] = "1,10",
    seed: int = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Decode attention over heads that keep different numbers of tokens."""
    need_gpu()
    from decantkv.lab.bench.decode import measure

    show(while_green(measure(numbers("batches", batches), numbers("spreads", spreads), seed=seed)), as_json)


@app.command()
def vllm(
    shape: Annotated[str, typer.Option(help="Of llama-3.1-8b, tiny; random weights.")] = "llama-3.1-8b",
    length: Annotated[int, typer.Option(help="Tokens of a prompt.")] = 32768,
    tokens: Annotated[int, typer.Option(help="Tokens of an answer.")] = 192,
    requests: Annotated[int, typer.Option(help="Requests that come at once.")] = 8,
    together: Annotated[int, typer.Option(help="Requests that decode together when a step is timed.")] = 4,
    pool: Annotated[int, typer.Option(help="Tokens that the pool of blocks holds.")] = 49152,
    block_size: int = 16,
    budgets: Annotated[str, typer.Option(help="Comma-separated; stock is vLLM without the plug-in.")] = "stock,0.05",
    backend: Annotated[str | None, typer.Option(help="TRITON_ATTN or FLASH_ATTN; vLLM's choice if left out.")] = None,
    runner: Annotated[int | None, typer.Option(help="Model runner 1 or 2; vLLM's choice if left out.")] = None,
    graphs: Annotated[bool, typer.Option(help="CUDA graphs.")] = True,
    parallel: Annotated[int, typer.Option(help="GPUs that the model is spread over.")] = 1,
    repeats: Annotated[int, typer.Option(help="Prompts that are read alone.")] = 4,
    seed: int = 0,
    lock: Annotated[
        Path | None,
        typer.Option(help="Commands that name the same file start side by side and are timed one after the other."),
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say how long it would take on an H200.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Append each row to this file; rows that are in it are not made again.")
    ] = None,
) -> None:
    """vLLM's throughput and time to first token at a fixed pool, with and without eviction."""
    from decantkv.engines.vllm import compat
    from decantkv.lab.bench.cases import run
    from decantkv.lab.bench.rows import circumstances
    from decantkv.lab.bench.vllm import SHAPES, Load, cases, expected_seconds

    expect_choice("shape", shape, SHAPES)
    load = Load(shape, length, tokens, requests, together, pool, block_size, backend, runner, graphs, parallel)
    wanted = [None if part.strip() == "stock" else float(part) for part in budgets.split(",")]
    for budget in wanted:
        about = expected_seconds(load, budget, repeats)
        if about is not None:
            name = "stock" if budget is None else f"budget {budget}"
            typer.echo(f"{name}: about {about['start']:.0f} s to start and {about['timed']:.0f} s timed", err=True)
    if estimate:
        return
    if compat.installed() is None:
        raise ValueError("vllm: expected it installed (pip install 'decantkv[vllm]'), got none")
    made = cases(load, wanted, repeats=repeats, seed=seed, lock=lock)
    for row, new in run(made, {**circumstances(), "geometry": shape}, out):
        typer.echo(json.dumps(row, sort_keys=True) if new else f"there already: budget {row['budget']}")


@app.command()
def plot(rows: Path, image: Path) -> None:
    """Draw committed rows of `bench score`; nothing but the file is read."""
    from decantkv.lab.bench.plot import draw

    draw(read(rows), image)


def parsed(lengths: str) -> list[int]:
    """Numbers from "4096,32768"."""
    try:
        numbers = [int(part) for part in lengths.split(",")]
    except ValueError:
        raise ValueError(f"lengths: expected numbers separated by commas, got {lengths!r}") from None
    if min(numbers) < 64:
        raise ValueError(f"lengths: expected prompts of 64 tokens or more, got {min(numbers)}")
    return numbers


def numbers(option: str, text: str) -> list[int]:
    """Positive whole numbers from "1,8"."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{option}: expected positive whole numbers separated by commas, got {text!r}")
    return [int(part) for part in parts]


def need_gpu() -> None:
    """Say so at once where there is nothing to measure."""
    if not torch.cuda.is_available():
        raise ValueError("bench: expected a CUDA device, got none")


def chosen(impl: str) -> Impl:
    """An implementation's name, checked."""
    expect_choice("impls", impl, get_args(Impl))
    return cast(Impl, impl)


def while_green(rows: Iterable[Row], out: Path | None = None) -> list[Row]:
    """Rows as they are measured, all so far in a file: a run that is cut short loses only its last one.

    Raises:
        typer.Exit: code 1, and a line that says why, at a red gate.
    """
    from decantkv.lab.bench.gate import RedGateError

    made: list[Row] = []
    try:
        for row in rows:
            made.append(row)
            if out is not None:
                write(out, made, sort_keys=True)
    except RedGateError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    return made


def show(rows: list[Row], as_json: bool) -> None:
    """Print rows."""
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row, sort_keys=True))
        return
    beside_floor = any("floor_us" in row for row in rows)
    more = ("times floor", "its kernels, µs") if beside_floor else ("of roofline", "scratch MB")
    table = Table("geometry", "keys", "step", "contender", "GPU µs p50", "wall µs p50", *more)
    for row in rows:
        if "left_out" in row:
            cells = [row["left_out"], "", "", ""]
        else:
            share, scratch = row.get("share_of_roof"), row.get("scratch_bytes")
            cells = [
                f"{row['gpu_us']['p50']:,.1f}" if "gpu_us" in row else "",
                f"{row['wall_us']['p50']:,.0f}",
                f"{share:.0%}" if share else "",
                f"{scratch / 1e6:,.1f}" if scratch is not None else "",
            ]
            if beside_floor:
                each = (f"{name.removesuffix('_kernel')} {spent:.1f}" for name, spent in row["kernels_us"].items())
                cells[2:] = [f"{row['times_floor']:.2f}", ", ".join(each)]
        table.add_row(row["geometry"]["name"], f"{row['kv_len']:,}", row["step"], row["contender"], *cells)
    Console(width=190 if beside_floor else 140).print(table)
