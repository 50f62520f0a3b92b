"""What the page shows: a section per folder, a panel per length and regime, the rows behind every cell."""

from __future__ import annotations

import base64
import gzip
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from decantkv.eval.chat import REGIMES
from decantkv.eval.results import RUN, read_folder
from decantkv.eval.show import heading
from decantkv.eval.statistics import Bootstrap, Interval, Summary, Table, tables
from decantkv.report.chart import Line, Point, chart

ANSWER_LETTERS = 240  # of an answer; the folder's rows hold all of it


@dataclass
class Panel:
    """One length in one regime.

    Attributes:
        chart: SVG over all tasks; by_task: (task, SVG).
        lines: a dict per method and budget, for the table.
        versus: (budget, methods, matrix of paired differences as text).
    """

    id: str
    title: str
    regime: str
    explains: str
    chart: str
    by_task: list[tuple[str, str]]
    lines: list[dict[str, Any]]
    versus: list[tuple[str, list[str], list[list[str]]]]
    left_out: str = ""
    measure: str = "score"


@dataclass
class Section:
    """One folder of results."""

    id: str
    title: str
    folder: str
    configuration: Mapping[str, Any]
    sessions: Sequence[Mapping[str, Any]]
    prompts: int
    panels: list[Panel] = field(default_factory=list)
    cells: dict[str, str] = field(default_factory=dict)  # cell id -> compressed rows, base64
    legend: list[tuple[str, int]] = field(default_factory=list)


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
    policies = sorted({row["policy"] for row in rows if row["row"] == "answer" and row["policy"] != "full"})
    colours = {policy: i for i, policy in enumerate(policies)}
    made = Section(
        id=f"run-{number}",
        title=heading(run["configuration"]),
        folder=str(folder),
        configuration=run["configuration"],
        sessions=run["sessions"],
        prompts=sum(row["row"] == "prompt" for row in rows),
        legend=list(colours.items()),
    )
    ids = _Cells(made, rows)
    for measure, label in _measures(rows):
        for table in tables(rows, measure=measure):
            for regime in REGIMES:
                here = [s for s in table.summaries if s.regime == regime]
                if here:
                    made.panels.append(_panel(made, table, here, (measure, label), colours, ids, rows))
    return made


def _measures(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    have = {name for row in rows if row["row"] == "answer" for name in ("score", "kl", "nll") if name in row}
    labels = {
        "score": "score",
        "kl": "KL to full cache, nats",
        "nll": "−log likelihood a token",
    }
    wanted = ["score"] if "score" in have else ["kl"] if "kl" in have else ["nll"]
    return [(name, labels[name]) for name in wanted if name in have]


class _Cells:
    """Gives each cell an id and keeps its rows, compressed."""

    def __init__(self, made: Section, rows: Sequence[Mapping[str, Any]]) -> None:
        self._made = made
        self._prompts = {row["prompt"]: row for row in rows if row["row"] == "prompt"}
        self._answers: dict[tuple[int, str, str, str], list[Mapping[str, Any]]] = defaultdict(list)
        self._full = {r["prompt"]: r for r in rows if r["row"] == "answer" and r["policy"] == "full"}
        for row in rows:
            if row["row"] == "answer":
                length = self._prompts[row["prompt"]]["length"]
                self._answers[length, row["regime"], row["policy"], row["budget"]].append(row)
        self._names: dict[tuple[int, str, str, str], str] = {}

    def link(self, s: Summary, measure: str) -> str:
        """The id of a summary's rows."""
        key = (s.length, s.regime, s.policy, s.budget)
        if key not in self._names:
            name = self._names[key] = f"{self._made.id}-cell-{len(self._names)}"
            self._made.cells[name] = _packed([self._line(row, measure) for row in self._answers[key]])
        return self._names[key]

    def _line(self, row: Mapping[str, Any], measure: str) -> list[Any]:
        prompt, full = self._prompts[row["prompt"]], self._full.get(row["prompt"], {})
        answer = str(row.get("answer", ""))[:ANSWER_LETTERS]
        said = str(full.get("answer", ""))[:ANSWER_LETTERS]
        return [
            row["prompt"],
            row.get(measure),
            full.get(measure),
            answer,
            said,
            " | ".join(prompt["references"])[:200],
        ]


def _packed(lines: list[list[Any]]) -> str:
    data = json.dumps(lines, ensure_ascii=False, separators=(",", ":")).encode()
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()


def _panel(
    made: Section,
    table: Table,
    summaries: list[Summary],
    measure: tuple[str, str],
    colours: Mapping[str, int],
    ids: _Cells,
    rows: Sequence[Mapping[str, Any]],
) -> Panel:
    name, label = measure
    regime = summaries[0].regime
    scored = name == "score"

    def lines_of(values: Mapping[tuple[str, str], Interval]) -> list[Line]:
        lines = []
        for policy in sorted({s.policy for s in summaries}):
            points = tuple(
                Point(max(s.bytes, 1e-3), v.mean, v.low, v.high, ids.link(s, name), f"{s.policy} at {s.budget}: {v}")
                for s in summaries
                if s.policy == policy and (v := values.get((s.policy, s.budget))) is not None
            )
            lines.append(Line(policy, colours[policy], points))
        return lines

    whole = lines_of({(s.policy, s.budget): s.score for s in summaries})
    by_task = [
        (
            task,
            chart(
                lines_of({(s.policy, s.budget): s.by_task[task][0] for s in summaries if task in s.by_task}),
                label=label,
                full=next(s.by_task[task][1] for s in summaries if task in s.by_task) if scored else None,
            ),
        )
        for task in sorted({task for s in summaries for task in s.by_task})
    ]
    return Panel(
        id=f"{made.id}-{table.length}-{regime}",
        title=f"{table.length:,} tokens",
        regime=regime,
        explains=REGIMES[regime],  # type: ignore[index]  # summaries carry known regimes
        measure=label,
        chart=chart(whole, label=label, full=table.full.mean if scored else None),
        by_task=by_task if len(by_task) > 1 else [],
        lines=[_line(s, ids.link(s, name), rows, scored) for s in _ranked(summaries, scored)],
        versus=_versus(summaries, rows, name),
        left_out=", ".join(f"{task} {score:.2f}" for task, score in table.left_out.items()) if scored else "",
    )


def _ranked(summaries: Sequence[Summary], high_first: bool) -> list[Summary]:
    return sorted(summaries, key=lambda s: (s.budget, -s.score.mean if high_first else s.score.mean))


def _line(s: Summary, link: str, rows: Sequence[Mapping[str, Any]], scored: bool) -> dict[str, Any]:
    worst, full = s.by_task[s.worst]
    megabytes = [
        row["kv_bytes"] / 2**20
        for row in rows
        if row["row"] == "prompt" and "kv_bytes" in row and row["length"] == s.length
    ]
    return {
        "link": link,
        "policy": s.policy,
        "budget": s.budget,
        "bytes": f"{s.bytes:.1%}",
        "memory": f"{s.bytes * float(np.mean(megabytes)):,.1f} MB" if megabytes else "",
        "score": str(s.score),
        "against": str(s.against) if s.against else "",
        "decided": bool(s.against and (s.against.low > 0 or s.against.high < 0)),
        "worst": f"{s.worst} {worst.mean:.2f} of {full:.2f}" if scored else "",
        "losing": f"{s.losing:.0%}" if scored else "",
        "drift": f"{s.drift:+.1f}" if scored else "",
        "prompts": s.prompts,
    }


def _versus(
    summaries: Sequence[Summary], rows: Sequence[Mapping[str, Any]], measure: str
) -> list[tuple[str, list[str], list[list[str]]]]:
    """Method against method at each budget: the paired difference, row minus column, starred when clear of 0."""
    found = []
    length, regime = summaries[0].length, summaries[0].regime
    task_of = {r["prompt"]: (r["length"], r["task"]) for r in rows if r["row"] == "prompt"}
    for budget in sorted({s.budget for s in summaries if s.budget != "-"}):
        names = [s.policy for s in summaries if s.budget == budget]
        scores: dict[str, dict[str, float]] = {name: {} for name in names}
        for r in rows:
            here = r["row"] == "answer" and measure in r and (r["regime"], r["budget"]) == (regime, budget)
            if here and r["policy"] in scores and task_of[r["prompt"]][0] == length:
                scores[r["policy"]][r["prompt"]] = r[measure]
        tasks = sorted({task for s in summaries for task in s.by_task})
        matrix = [[_difference(scores[a], scores[b], tasks, task_of) if a != b else "" for b in names] for a in names]
        if len(names) > 1:
            found.append((budget, names, matrix))
    return found


def _difference(
    one: Mapping[str, float], other: Mapping[str, float], tasks: Sequence[str], task_of: Mapping[str, tuple[int, str]]
) -> str:
    groups: dict[str, list[str]] = defaultdict(list)
    for prompt in sorted(one.keys() & other.keys()):
        if task_of[prompt][1] in tasks:
            groups[task_of[prompt][1]].append(prompt)
    if not groups:
        return ""
    found = Bootstrap(groups).interval({p: one[p] - other[p] for keys in groups.values() for p in keys})
    return f"{found.mean:+.3f}{'*' if found.low > 0 or found.high < 0 else ''}"
