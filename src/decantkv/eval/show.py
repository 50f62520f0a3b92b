"""Tables of results in the terminal; every number stands under its regime and beside its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from decantkv.eval.chat import REGIMES
from decantkv.eval.statistics import Bootstrap, Summary, best_on_the_other_half, tables


def print_tables(
    run: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    reference: str = "dropkv",
    console: Console | None = None,
) -> None:
    """Print a table per length and regime."""
    console = console or Console(highlight=False)
    configuration = run["configuration"]
    console.print(heading(configuration), style="bold")
    if configuration["suite"] == "fidelity":
        _print_fidelity(rows, console)
        return
    measure = "score" if any("score" in row for row in rows) else "nll"
    for table in tables(rows, reference=reference, measure=measure):
        what = "score" if measure == "score" else "negative log-likelihood a token of the answer, lower is better"
        console.print(f"\n{table.length} tokens; {what}; full cache {table.full}")
        for name in REGIMES:
            here = [s for s in table.summaries if s.regime == name]
            if here:
                console.print(_table(name, here, reference))
        if table.left_out:
            left = ", ".join(f"{task} {score:.2f}" for task, score in table.left_out.items())
            console.print(f"not in the averages, the full cache itself being below 0.3: {left}", style="dim")


def print_best(
    run: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    reference: str = "dropkv",
    console: Console | None = None,
) -> None:
    """Print what was best on one half of the prompts and what it is worth on the other."""
    console = console or Console(highlight=False)
    table = RichTable(title=heading(run["configuration"]), title_justify="left")
    for column in (
        "tokens",
        "regime",
        "budget",
        "best on even prompts",
        "there",
        "on odd prompts",
        f"− {reference} there",
    ):
        table.add_column(column)
    for b in best_on_the_other_half(rows, reference=reference):
        against = str(b.against) if b.against else ""
        table.add_row(f"{b.length}", b.regime, b.budget, b.policy, str(b.seen), str(b.unseen), against)
    console.print(table)


def heading(configuration: Mapping[str, Any]) -> str:
    """Model, weights and circumstances in one line."""
    parts = [configuration["suite"], configuration["model"], configuration["dtype"], configuration["device"]]
    if configuration["note"]:
        parts.append(configuration["note"])
    if configuration["yarn"] != 1.0:
        parts.append(f"YaRN ×{configuration['yarn']:g}")
    return ", ".join(str(part) for part in parts)


def _table(regime: str, summaries: Sequence[Summary], reference: str) -> RichTable:
    table = RichTable(title=f"regime: {regime}", title_justify="left", caption=REGIMES[regime], caption_justify="left")  # type: ignore[index]
    for column in ("method", "budget", "bytes", "score [95 %]", f"− {reference} [95 %]", "worst task", "lose >10 %"):
        table.add_column(column, overflow="fold")
    for column in ("Δ length", "Δ nll", "n"):
        table.add_column(column, justify="right")
    for s in sorted(summaries, key=lambda s: (s.budget, -s.score.mean)):
        worst, full = s.by_task[s.worst]
        table.add_row(
            s.policy,
            s.budget,
            f"{s.bytes:.1%}",
            str(s.score),
            str(s.against) if s.against else "",
            f"{s.worst} {worst.mean:.2f} of {full:.2f}",
            f"{s.losing:.0%}",
            f"{s.drift:+.1f}",
            f"{s.nll.mean:+.3f}" if s.nll else "",
            str(s.prompts),
        )
    return table


def _print_fidelity(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    for summary in fidelity(rows):
        console.print(summary)


def fidelity(rows: Sequence[Mapping[str, Any]]) -> list[RichTable]:
    """A table per length and regime: KL, top-1 agreement, output shift, overlap with DropKV's kept set."""
    length_of = {row["prompt"]: row["length"] for row in rows if row["row"] == "prompt"}
    cells: dict[tuple[int, str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["row"] == "answer" and "kl" in row and row["policy"] != "full":
            key = (length_of[row["prompt"]], row["regime"], row["budget"], row["policy"])
            cells.setdefault(key, []).append(row)
    shown = []
    for length, regime in sorted({key[:2] for key in cells}):
        table = RichTable(title=f"{length} tokens, regime: {regime}", title_justify="left")
        for column in ("method", "budget", "bytes", "KL to full [95 %]", "top-1 agreement [95 %]", "output shift"):
            table.add_column(column)
        for column in ("predicted", "overlap with dropkv", "n"):
            table.add_column(column)
        here = {key: found for key, found in cells.items() if key[:2] == (length, regime)}
        for (_, _, budget, policy), found in sorted(here.items(), key=lambda item: (item[0][2], _mean(item[1], "kl"))):
            table.add_row(policy, budget, f"{_mean(found, 'bytes'):.1%}", *_fidelity_columns(found), str(len(found)))
        shown.append(table)
    return shown


def _fidelity_columns(found: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    bootstrap = Bootstrap({"text": [row["prompt"] for row in found]})
    intervals = (str(bootstrap.interval({row["prompt"]: row[name] for row in found})) for name in ("kl", "top1"))
    shifts = [row["shift"] for row in found if "shift" in row]
    real, predicted = (
        f"{np.mean([np.mean(shift[name]) for shift in shifts]):.3f}" if shifts else "" for name in ("real", "predicted")
    )
    shared = [row["overlap"]["dropkv"] for row in found if "dropkv" in row.get("overlap", {})]
    return (*intervals, real, predicted, f"{np.mean(shared):.2f}" if shared else "")


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))
