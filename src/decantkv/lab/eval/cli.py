"""`decantkv eval`: run suites, print their tables."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from decantkv.cli.console import Console
from decantkv.lab.eval.presets import PRESETS

if TYPE_CHECKING:
    from decantkv.lab.eval.runner import Plan

app = typer.Typer(help="Measure what eviction costs: RULER, LongBench, fidelity, needles; both regimes.")

SUITES = ("ruler", "longbench", "fidelity", "niah", "probes")


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A model id, a model folder, or a .gguf file.")] = "",
    suite: Annotated[str, typer.Option(help=f"One of {', '.join(SUITES)}.")] = "",
    preset: Annotated[str, typer.Option(help=f"Fill in what is not given: {', '.join(PRESETS)}.")] = "",
    task: Annotated[str, typer.Option(help="Tasks of the suite, comma-separated; default: all.")] = "",
    length: Annotated[str, typer.Option(help="Tokens of prompt and answer, comma-separated.")] = "",
    method: Annotated[str, typer.Option(help="NAME, NAME:PRESET, NAME[OPTION=VALUE,…], quantised-4bit; a list.")] = "",
    budget: Annotated[str, typer.Option(help="Shares kept (5% or 0.05) or tokens (512); a list.")] = "",
    regime: Annotated[str, typer.Option(help="aware, aware-question, agnostic; a list.")] = "",
    samples: Annotated[int, typer.Option(min=0, help="Prompts a task and length.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder of the rows; a stopped run goes on there.")] = None,
    haystack: Annotated[Path | None, typer.Option(help="Essay text: a file or a folder of .txt files.")] = None,
    openings: Annotated[
        int, typer.Option(min=1, help="Places of the essay text at which prompts begin in turn; 1: its start alone.")
    ] = 1,
    squad: Annotated[Path | None, typer.Option(help="Questions for qa_1.")] = None,
    hotpot: Annotated[Path | None, typer.Option(help="Questions for qa_2.")] = None,
    longbench: Annotated[Path | None, typer.Option(help="LongBench's files; default: the hub.")] = None,
    likelihood: Annotated[bool, typer.Option("--likelihood", help="Also the references' likelihood.")] = False,
    no_answers: Annotated[bool, typer.Option("--no-answers", help="Likelihood alone, nothing generated.")] = False,
    beyond_context: Annotated[bool, typer.Option("--beyond-context", help="Allow lengths beyond the model's.")] = False,
    yarn: Annotated[float, typer.Option(help="Stretch RoPE by YaRN's rule, e.g. 4.")] = 1.0,
    system: Annotated[str, typer.Option(help="Text of a system turn.")] = "",
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 42,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; default: the model's on a GPU.")] = "",
    note: Annotated[str, typer.Option(help="Said in every table, e.g. how the weights were made.")] = "",
    minutes: Annotated[float, typer.Option(help="Begin no prompt after this long; 0: no limit.")] = 0.0,
    part: Annotated[str, typer.Option(help="K/N: every N-th prompt from the K-th, for runs side by side.")] = "1/1",
    workers: Annotated[int, typer.Option(min=0, help="Processes side by side, over all GPUs; 0: this one alone.")] = 0,
    memory_gb: Annotated[
        float, typer.Option(help="For a GPU's caches; default: three fifths of what is free there.")
    ] = 0.0,
    graphs: Annotated[bool, typer.Option("--graphs/--no-graphs", help="CUDA graphs for decode steps.")] = True,
) -> None:
    """Run a suite; rows go to --out, the table to the terminal."""
    if context.invoked_subcommand is not None:
        return
    if not (model or suite or preset or out):
        typer.echo(context.get_help())
        return
    chosen = _filled(preset, suite=suite, length=length, method=method, budget=budget, regime=regime, samples=samples)
    if not model:
        raise ValueError("model: expected a model id, a model folder or a .gguf file (--model)")
    if out is None:
        raise ValueError("out: expected a folder for the rows (--out)")
    no_answers = no_answers or bool(preset and not PRESETS[preset].answers)
    likelihood = likelihood or no_answers or bool(preset and PRESETS[preset].likelihood)
    from decantkv.lab.eval.session import Session, Sources
    from decantkv.lab.provenance import command

    plan = make_plan(
        chosen["method"],
        chosen["budget"],
        chosen["regime"],
        likelihood=likelihood,
        generate=not no_answers and chosen["suite"] != "fidelity",
        fidelity=chosen["suite"] == "fidelity",
    )
    session = Session(
        model=model,
        suite=chosen["suite"],
        tasks=_list(task),
        lengths=tuple(_length(text) for text in _list(chosen["length"])),
        samples=int(chosen["samples"]),
        sources=Sources(haystack, squad, hotpot, longbench, openings),
        seed=seed,
        dtype=dtype,
        yarn=yarn,
        system=system or None,
        note=note,
        beyond_context=beyond_context,
        part=_part(part),
    )
    memory = int(memory_gb * 2**30) or None
    options: dict[str, Any] = {"minutes": minutes, "memory": memory, "graphs": None if graphs else False}
    if workers:
        from decantkv.lab.eval.workers import run as run_workers

        whole = run_workers(session, plan, out, workers=workers, command=command(), **options)
    else:
        whole = session.run(plan, out, command=command(), **options)
    if not whole:
        typer.echo(f"stopped after {minutes:g} minutes; the same command goes on from here", err=True)
    show_tables(out)


@app.command()
def table(
    folder: Annotated[Path, typer.Argument(help="A folder of rows.")],
    reference: Annotated[str, typer.Option(help="The method that others are compared with.")] = "dropkv",
) -> None:
    """Print the tables of a folder of rows."""
    show_tables(folder, reference)


@app.command()
def best(
    folder: Annotated[Path, typer.Argument(help="A folder of rows.")],
    reference: Annotated[str, typer.Option(help="The method to beat.")] = "dropkv",
) -> None:
    """The best method by one half of the prompts, and its score on the other half."""
    from decantkv.lab.eval.results import read_folder
    from decantkv.lab.eval.show import print_best

    run_of, rows = read_folder(folder)
    print_best(run_of, rows, reference=reference)


@app.command()
def join(
    folder: Annotated[Path, typer.Argument(help="The folder that takes the rows.")],
    parts: Annotated[list[Path], typer.Argument(help="Folders of runs with --part.")],
) -> None:
    """Put together what was measured side by side."""
    from decantkv.lab.eval.results import join as add

    add(folder, parts)
    show_tables(folder)


@app.command()
def pack(folder: Annotated[Path, typer.Argument(help="A folder of finished rows.")]) -> None:
    """Compress a folder's rows; a later run takes them up again."""
    from decantkv.lab.eval.results import pack as compress

    Console(stderr=True, highlight=False, markup=False, soft_wrap=True).print(str(compress(folder)))


@app.command()
def repeat(
    folder: Annotated[Path, typer.Argument(help="A folder of rows.")],
    model: Annotated[str, typer.Option(help="The model that they are of: an id, a model folder, or a .gguf file.")],
    rows: Annotated[int, typer.Option(min=1, help="How many to answer again, evenly spread.")] = 200,
    length: Annotated[str, typer.Option(help="Prompts of this length alone.")] = "",
    haystack: Annotated[Path | None, typer.Option(help="The essay text that the prompts were made of.")] = None,
    openings: Annotated[int, typer.Option(min=1, help="As in the folder's command.")] = 1,
    squad: Annotated[Path | None, typer.Option(help="Questions for qa_1.")] = None,
    hotpot: Annotated[Path | None, typer.Option(help="Questions for qa_2.")] = None,
    longbench: Annotated[Path | None, typer.Option(help="LongBench's files; default: the hub.")] = None,
) -> None:
    """Answer rows of a folder again and count the answers that are the same; the folder stays as it is."""
    from decantkv.lab.eval.repeat import repeat as answer
    from decantkv.lab.eval.session import Sources

    sources = Sources(haystack, squad, hotpot, longbench, openings)
    answers = answer(folder, model, rows=rows, length=_length(length) if length else 0, sources=sources)
    for each in answers:
        if not each.same:
            typer.echo(f"{' '.join(astuple(each.cell))}: {each.then['answer']!r}, now {each.now['answer']!r}")
    typer.echo(f"{sum(each.same for each in answers)} of {len(answers)} answers are the same")


@app.command()
def lm(
    model: Annotated[str, typer.Option(help="A model id, a model folder, or a .gguf file.")],
    tasks: Annotated[str, typer.Option(help="lm-eval tasks or groups, comma-separated.")],
    method: Annotated[str, typer.Option(help="A method, or full for the untouched model.")] = "dropkv",
    budget: Annotated[str, typer.Option(help="Share kept (5% or 0.05) or tokens (512).")] = "0.1",
    allocation: Annotated[str, typer.Option(help="How a layer's budget is spread over its heads.")] = "",
    limit: Annotated[int, typer.Option(min=0, help="Samples a task; 0: all.")] = 0,
    include_path: Annotated[Path | None, typer.Option(help="Folder of task YAML files of your own.")] = None,
    max_length: Annotated[str, typer.Option(help="Lengths of RULER's tasks, comma-separated.")] = "4096",
    chat: Annotated[bool, typer.Option("--chat/--raw", help="Use the model's chat template.")] = True,
    out: Annotated[Path | None, typer.Option(help="File for lm-eval's results as JSON.")] = None,
) -> None:
    """Run lm-eval tasks with eviction on (question-aware: the harness hands over one prompt)."""
    from decantkv.lab.eval.harness import run_tasks

    run_tasks(
        model,
        list(_list(tasks)),
        method=method,
        budget=budget,
        allocation=allocation or None,
        limit=limit or None,
        include_path=include_path,
        lengths=[_length(text) for text in _list(max_length)],
        chat=chat,
        out=out,
    )


def show_tables(folder: Path, reference: str = "dropkv") -> None:
    """Print what a folder holds, each number under its regime."""
    from decantkv.lab.eval.results import read_folder
    from decantkv.lab.eval.show import print_tables

    run, rows = read_folder(folder)
    print_tables(run, rows, reference=reference)


def make_plan(
    method: str, budget: str, regime: str, *, likelihood: bool = False, generate: bool = True, fidelity: bool = False
) -> Plan:
    """A plan from the command line's lists.

    Raises:
        ValueError, TypeError: an entry that is unknown or out of its range.
    """
    from decantkv.lab.eval.chat import REGIMES
    from decantkv.lab.eval.engine.policy import parse_budget, parse_policies
    from decantkv.lab.eval.runner import Plan

    budgets, regimes = _list(budget), _list(regime)
    for text in budgets:
        parse_budget(text)
    for name in regimes:
        if name not in REGIMES:
            raise ValueError(f"regime: expected one of {', '.join(REGIMES)}, got {name!r}")
    return Plan(
        tuple(parse_policies(method)),
        budgets,
        regimes,  # type: ignore[arg-type]  # checked above
        likelihood=likelihood,
        generate=generate,
        fidelity=fidelity,
    )


DEFAULTS = {
    "suite": "",
    "length": "4096",
    "method": "dropkv,snapkv,snapkv:shared,random,recent",
    "budget": "0.05,0.1,0.3",
    "regime": "aware,agnostic",
    "samples": 50,
}


def _filled(preset: str, **given: Any) -> dict[str, Any]:
    """What was typed, else the preset's, else the default."""
    if preset and preset not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {preset!r}")
    base = vars(PRESETS[preset]) if preset else {}
    chosen = {name: value or base.get(name) or DEFAULTS[name] for name, value in given.items()}
    if chosen["suite"] not in SUITES:
        raise ValueError(f"suite: expected one of {', '.join(SUITES)}, got {chosen['suite']!r}")
    if chosen["suite"] == "longbench" and not given["samples"]:
        chosen["samples"] = 0  # all there are
    return chosen


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _part(text: str) -> tuple[int, int]:
    """(2, 8) for 2/8."""
    first, _, every = text.partition("/")
    if not (first.isdecimal() and every.isdecimal() and 1 <= int(first) <= int(every)):
        raise ValueError(f"part: expected K/N with 1 ≤ K ≤ N, such as 2/8, got {text!r}")
    return int(first), int(every)


def _length(text: str) -> int:
    """4096, or 4k for it."""
    number = text.lower().removesuffix("k")
    if not number.isdigit() or int(number) == 0:
        raise ValueError(f"length: expected a number of tokens such as 4096 or 4k, got {text!r}")
    return int(number) * (1024 if text.lower().endswith("k") else 1)
