"""Tables of results in the terminal; every number stands under its regime and beside its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.table import Table as RichTable

from decantkv.cli.console import Console
from decantkv.lab.eval.bootstrap import Bootstrap, Interval, holm
from decantkv.lab.eval.chat import REGIMES
from decantkv.lab.eval.results import taken
from decantkv.lab.eval.statistics import REPEATED, Summary, best_on_the_other_half, tables

WIDE = 180  # columns of a console that is no terminal
_NUMBERS = ("lose >10 %", "Δ length", "Δ nll", "total variation", "output shift", "predicted", "n")
_MARKS = "* 0 is outside the 95 % interval; ** also with Holm's correction for all differences of this table"


def print_tables(
    run: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    reference: str = "dropkv",
    console: Console | None = None,
) -> None:
    """Print a table per length and regime."""
    console = console or wide_console()
    configuration = run["configuration"]
    console.print(heading(configuration), style="bold")
    console.print(taken(rows))
    if configuration["suite"] == "fidelity":
        for table in fidelity(rows, reference=reference, width=console.width):
            console.print(table)
        return
    measure = _measure(rows)
    for one in tables(rows, reference=reference, measure=measure):
        what = "score" if measure == "score" else "negative log-likelihood a token of the answer, lower is better"
        bare = f", without {', '.join(REPEATED)} {one.without.mean:.3f}" if one.without else ""
        console.print(
            f"\n{one.length} tokens; {what}; full cache {one.full}{bare}; {one.prompts} prompts in the averages"
        )
        for name in REGIMES:
            here = [s for s in one.summaries if s.regime == name]
            if here:
                console.print(_table(name, here, one.prompts, reference, measure, console.width))
        if one.left_out:
            left = ", ".join(f"{task} {score:.2f}" for task, score in one.left_out.items())
            console.print(
                f"not in the averages, the full cache itself being below 0.3 (ROUGE: 0.1) at a length: {left}",
                style="dim",
            )
        if one.begun:
            console.print(f"begun, on fewer than a tenth of the prompts: {', '.join(one.begun)}", style="dim")


def wide_console() -> Console:
    """Standard output; where that is no terminal, as wide as the tables are.

    Brackets in a method's label are options, not markup.
    """
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=WIDE)


def print_best(
    run: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    reference: str = "dropkv",
    console: Console | None = None,
) -> None:
    """Print what was best on one half of the prompts and what it is worth on the other."""
    console = console or wide_console()
    title = f"{heading(run['configuration'])}; {taken(rows)}"
    measure, against = _measure(rows), f"− {reference} there"
    names = ["tokens", "regime", "budget", "best on even prompts", f"{measure} there", "on odd prompts", against]
    lines = [
        [f"{b.length}", b.regime, b.budget, b.policy, str(b.seen), str(b.unseen), str(b.against) if b.against else ""]
        for b in best_on_the_other_half(rows, reference=reference, measure=measure)
    ]
    console.print(fitted(names, lines, (names[4], against), console.width, title=title))


def _measure(rows: Sequence[Mapping[str, Any]]) -> str:
    return "score" if any("score" in row for row in rows) else "nll"


def heading(configuration: Mapping[str, Any]) -> str:
    """Model, weights and circumstances in one line."""
    needed = ("suite", "model", "dtype", "device", "note", "yarn")
    if missing := [name for name in needed if name not in configuration]:
        raise ValueError(f"results: expected a configuration with {missing[0]!r}, got none")
    if not isinstance(configuration["yarn"], float | int) or abs(configuration["yarn"]) > 1e6:
        raise ValueError(f"results: expected a configuration whose yarn is a factor, got {configuration['yarn']!r:.80}")
    parts = [configuration["suite"], configuration["model"], configuration["dtype"], configuration["device"]]
    if configuration["note"]:
        parts.append(configuration["note"])
    if configuration["yarn"] != 1.0:
        parts.append(f"YaRN ×{configuration['yarn']:g}")
    return ", ".join(str(part) for part in parts)


def _table(
    regime: str, summaries: Sequence[Summary], prompts: int, reference: str, measure: str, width: int
) -> RichTable:
    scored = measure == "score"
    without = f"without {', '.join(REPEATED)}"
    names = ["method", "budget", "bytes", f"{measure} [95 %]", f"− {reference} [95 %]"]
    names += [without] if any(s.without for s in summaries) else []
    names += ["worst task"]
    names += ["lose >10 %", "Δ length", "Δ nll"] if scored else []
    rows = []
    for s in sorted(summaries, key=lambda s: (s.budget, -s.score.mean if scored else s.score.mean)):
        worst, full = s.by_task[s.worst]
        against = f"{s.against}{_mark(s.against, s.stands)}" if s.against else ""
        columns = [s.policy, s.budget, f"{s.bytes:.1%}", str(s.score), against]
        if without in names:
            columns.append(_without(s))
        columns.append(f"{s.worst} {worst.mean:.2f} of {full:.2f}" if scored else f"{s.worst} {worst.mean:.2f}")
        if scored:
            columns += [f"{s.losing:.0%}", f"{s.drift:+.1f}", f"{s.nll.mean:+.3f}" if s.nll else ""]
        rows.append([*columns, str(s.prompts) if s.prompts == prompts else f"{s.prompts} of {prompts}"])
    drop = ("Δ length", "lose >10 %", "worst task", "Δ nll", "bytes", "n", without, names[4])
    caption = REGIMES[regime]  # type: ignore[index]
    if any(s.against for s in summaries):
        caption += f"\n{_MARKS}"
    return fitted([*names, "n"], rows, drop, width, title=f"regime: {regime}", caption=caption)


def _without(s: Summary) -> str:
    if s.without is None:
        return ""
    score, against = s.without
    return f"{score.mean:.3f}" + (f", {against.mean:+.3f}{'*' if against.clear else ''}" if against else "")


def fitted(
    names: Sequence[str],
    rows: Sequence[Sequence[str]],
    drop: Sequence[str],
    width: int,
    *,
    title: str,
    caption: str = "",
) -> RichTable:
    """A table whose cells are never cut: columns that do not fit beside the others are left out and named below it.

    Args:
        drop: columns that may go, the first of them first. Where even the others are too wide, cells are folded.
    """
    widths = {name: max(map(cell_len, (name, *(row[i] for row in rows)))) + 3 for i, name in enumerate(names)}
    gone: list[str] = []
    for name in (name for name in drop if name in widths):
        if sum(size for other, size in widths.items() if other not in gone) < width:
            break
        gone.append(name)
    notes = [caption] if caption else []
    notes += [f"no room for: {', '.join(gone)}"] if gone else []
    table = RichTable(title=title, title_justify="left", caption="\n".join(notes), caption_justify="left")
    whole = 0 if widths[names[0]] + 25 < width else None  # others fold first
    shown = [i for i, name in enumerate(names) if name not in gone]
    for i in shown:
        table.add_column(
            names[i], justify="right" if names[i] in _NUMBERS else "left", overflow="fold", no_wrap=i == whole
        )
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


def fidelity(rows: Sequence[Mapping[str, Any]], *, reference: str = "dropkv", width: int = WIDE) -> list[RichTable]:
    """A table per length and regime: KL, total variation and top-1 against the full cache, output shift, overlap."""
    length_of = {row["prompt"]: row["length"] for row in rows if row["row"] == "prompt"}
    cells: dict[tuple[int, str, str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row["row"] == "answer" and "kl" in row and row["policy"] != "full":
            key = (length_of[row["prompt"]], row["regime"], row["budget"], row["policy"])
            cells.setdefault(key, {})[row["prompt"]] = row
    shown = []
    for length, regime in sorted({key[:2] for key in cells}):
        here = {key: found for key, found in cells.items() if key[:2] == (length, regime)}
        names = ["method", "budget", "bytes", "KL to full [95 %]", f"− {reference} [95 %]"]
        names += ["total variation", "top-1 [95 %]", "output shift", "predicted", f"overlap with {reference}", "n"]
        lines = []
        differences = {key: _difference(found, here.get((*key[:3], reference), {})) for key, found in here.items()}
        compared = {key: one for key, one in differences.items() if one and key[3] != reference}
        stands = dict(zip(compared, holm(list(compared.values())), strict=True))
        for key, found in sorted(here.items(), key=lambda item: (item[0][2], _mean(item[1], "kl"))):
            against = f"{compared[key]}{_mark(compared[key], stands[key])}" if key in compared else ""
            columns = _fidelity_columns(found, against, reference)
            lines.append([key[3], key[2], f"{_mean(found, 'bytes'):.1%}", *columns, str(len(found))])
        drop = ("n", "predicted", "output shift", names[-2], "top-1 [95 %]", "bytes", "total variation", names[4])
        title = f"{length} tokens, regime: {regime}"
        shown.append(fitted(names, lines, drop, width, title=title, caption=_MARKS if compared else ""))
    return shown


def _fidelity_columns(found: Mapping[str, Mapping[str, Any]], against: str, reference: str) -> tuple[str, ...]:
    kl, top1 = (
        Bootstrap({"text": sorted(found)}).interval({prompt: row[name] for prompt, row in found.items()})
        for name in ("kl", "top1")
    )
    shifts = [row["shift"] for row in found.values() if "shift" in row]
    real, predicted = (
        f"{np.mean([np.mean(shift[name]) for shift in shifts]):.3f}" if shifts else "" for name in ("real", "predicted")
    )
    tv = [row["tv"] for row in found.values() if "tv" in row]  # rows of earlier versions have none
    shared = [row["overlap"][reference] for row in found.values() if reference in row.get("overlap", {})]
    shift = (f"{np.mean(tv):.3f}" if tv else "", str(top1), real, predicted)
    return (str(kl), against, *shift, f"{np.mean(shared):.2f}" if shared else "")


def _difference(found: Mapping[str, Mapping[str, Any]], base: Mapping[str, Mapping[str, Any]]) -> Interval | None:
    both = sorted(found.keys() & base.keys())
    return Bootstrap({"text": both}).interval({p: found[p]["kl"] - base[p]["kl"] for p in both}) if both else None


def _mark(difference: Interval, stands: bool) -> str:
    return "**" if stands else "*" if difference.clear else ""


def _mean(rows: Mapping[str, Mapping[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows.values()]))
