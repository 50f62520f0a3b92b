"""What the page shows: a section per folder, in it a panel per length and regime, as the page's script reads them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from decantkv.lab.eval.bootstrap import Interval, paired
from decantkv.lab.eval.chat import REGIMES
from decantkv.lab.eval.results import RUN, read_folder, taken
from decantkv.lab.eval.show import heading
from decantkv.lab.eval.statistics import Summary, Table, tables
from decantkv.lab.report.answers import answers_by_length, packed

LABELS = {"score": "score", "kl": "KL to full cache, nats", "nll": "−log likelihood a token"}
Values = Mapping[tuple[int, str, str], Mapping[str, Mapping[str, float]]]


@dataclass(frozen=True)
class Point:
    """One method at one budget.

    Attributes:
        bytes: share of the cache's bytes, above 0.
        score: the mean over tasks and its interval's ends, None if not finite; by_task: the same of each task.
        texts: the table's columns after method and budget.
        clear: whether the difference to the reference is clear of 0.
    """

    method: str
    budget: str
    bytes: float
    score: list[float | None]
    by_task: dict[str, list[float | None]]
    texts: list[str]
    clear: bool


@dataclass(frozen=True)
class Panel:
    """One length in one regime.

    Attributes:
        scored: whether higher is better.
        full: the full cache's mean, of each task in `tasks`; None if it is nothing to compare with.
        points: in the table's order.
        versus: (budget, methods [M], paired differences [M][M] as text, starred when clear of 0).
    """

    length: int
    regime: str
    label: str
    scored: bool
    full: float | None
    tasks: dict[str, float | None]
    left_out: str
    points: list[Point]
    versus: list[tuple[str, list[str], list[list[str]]]]


@dataclass(frozen=True)
class Section:
    """One folder of results.

    Attributes:
        title: suite and model; about: all circumstances in one line.
        methods: all of them, those without options first.
        answers: per length, the answers behind the points, packed: a reader opens few.
    """

    id: str
    title: str
    about: str
    folder: str
    weights: str
    yarn: float
    sessions: list[dict[str, Any]]
    prompts: int
    methods: list[str]
    panels: list[Panel]
    answers: dict[int, str]


def find_folders(paths: Sequence[Path]) -> list[Path]:
    """The folders of results at or under the given ones.

    Raises:
        ValueError: none.
    """
    found = sorted({run.parent for path in paths for run in (path.rglob(RUN) if path.is_dir() else [])})
    if not found:
        names = ", ".join(repr(str(path)) for path in paths)
        raise ValueError(f"results: expected folders with a {RUN} at or under {names}, got none")
    return found


def section(folder: Path, number: int) -> Section:
    """Everything the page says about one folder.

    Raises:
        ValueError: a broken folder; the line is named.
    """
    run, rows = read_folder(folder)
    about = f"{heading(run['configuration'])}; {taken(rows)}"
    measure = _measure(rows)
    values = _values(rows, measure)
    prompts = [row for row in rows if row["row"] == "prompt"]
    panels = []
    for table in tables(rows, measure=measure):
        here = [prompt for prompt in prompts if prompt["length"] == table.length]
        for regime in REGIMES:
            summaries = [s for s in table.summaries if s.regime == regime]
            if summaries:
                panels.append(_panel(table, summaries, measure, values, here))
    return Section(
        id=f"run-{number}",
        title=f"{run['configuration']['suite']} on {run['configuration']['model']}",
        about=about,
        folder=str(folder),
        weights=str(run["configuration"]["weights"]),
        yarn=run["configuration"]["yarn"],
        sessions=run["sessions"],
        prompts=len(prompts),
        methods=_methods(rows),
        panels=panels,
        answers={length: packed(here) for length, here in answers_by_length(rows, measure).items()},
    )


def _methods(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    budgets = {row["policy"]: row["budget"] for row in rows if row["row"] == "answer" and row["policy"] != "full"}
    return sorted(budgets, key=lambda name: (budgets[name] == "-", any(mark in name for mark in "[:+"), name))


def _measure(rows: Sequence[Mapping[str, Any]]) -> str:
    have = {name for row in rows if row["row"] == "answer" for name in LABELS if name in row}
    return next((name for name in LABELS if name in have), "score")


def _values(rows: Sequence[Mapping[str, Any]], measure: str) -> Values:
    """(length, regime, budget) -> method -> prompt -> value."""
    lengths = {row["prompt"]: row["length"] for row in rows if row["row"] == "prompt"}
    found: dict[tuple[int, str, str], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["row"] == "answer" and measure in row:
            found[lengths[row["prompt"]], row["regime"], row["budget"]][row["policy"]][row["prompt"]] = row[measure]
    return found


def _panel(
    table: Table, summaries: Sequence[Summary], measure: str, values: Values, prompts: Sequence[Mapping[str, Any]]
) -> Panel:
    scored = measure == "score"
    full_of = {task: full for s in reversed(summaries) for task, (_, full) in s.by_task.items()}
    tasks = {task: round(full_of[task], 3) if scored else None for task in sorted(full_of)}
    task_of = {prompt["prompt"]: prompt["task"] for prompt in prompts if prompt["task"] in tasks}
    megabytes = [prompt["kv_bytes"] / 2**20 for prompt in prompts if "kv_bytes" in prompt]
    memory = float(np.mean(megabytes)) if megabytes else None
    ranked = sorted(summaries, key=lambda s: (s.budget, -s.score.mean if scored else s.score.mean))
    return Panel(
        length=table.length,
        regime=summaries[0].regime,
        label=LABELS[measure],
        scored=scored,
        full=round(table.full.mean, 3) if scored else None,
        tasks=tasks,
        left_out=", ".join(f"{task} {score:.2f}" for task, score in table.left_out.items()) if scored else "",
        points=[_point(s, memory, scored) for s in ranked],
        versus=_versus(summaries, values, task_of),
    )


def _point(s: Summary, memory: float | None, scored: bool) -> Point:
    worst, full = s.by_task[s.worst]
    places = 3 if scored else 7  # a score's chart ends at 1, a divergence's anywhere
    return Point(
        method=s.policy,
        budget=s.budget,
        bytes=round(max(s.bytes, 1e-3), 5),
        score=_rounded(s.score, places),
        by_task={task: _rounded(interval, places) for task, (interval, _) in s.by_task.items()},
        texts=[
            f"{s.bytes:.1%}",
            f"{s.bytes * memory:,.1f} MB" if memory is not None else "",
            str(s.score),
            str(s.against) if s.against else "",
            f"{s.worst} {worst.mean:.2f} of {full:.2f}" if scored else "",
            f"{s.losing:.0%}" if scored else "",
            f"{s.drift:+.1f}" if scored else "",
            str(s.prompts),
        ],
        clear=bool(s.against and _clear(s.against)),
    )


def _rounded(interval: Interval, places: int) -> list[float | None]:
    return [round(x, places) if math.isfinite(x) else None for x in (interval.mean, interval.low, interval.high)]


def _clear(interval: Interval) -> bool:
    return interval.low > 0 or interval.high < 0


def _versus(
    summaries: Sequence[Summary], values: Values, task_of: Mapping[str, str]
) -> list[tuple[str, list[str], list[list[str]]]]:
    """Method against method at each budget: the paired difference, row minus column."""
    found = []
    for budget in sorted({s.budget for s in summaries if s.budget != "-"}):
        names = [s.policy for s in summaries if s.budget == budget]
        scores = values[summaries[0].length, summaries[0].regime, budget]
        text = {}
        for (one, other), interval in paired({name: scores[name] for name in names}, task_of).items():
            star = "*" if _clear(interval) else ""
            text[one, other] = f"{interval.mean:+.3f}{star}"
            text[other, one] = f"{0.0 - interval.mean:+.3f}{star}"
        if len(names) > 1:
            found.append((budget, names, [[text.get((a, b), "") for b in names] for a in names]))
    return found
