"""Tables of answers for documents: methods by lengths, budgets, regimes and groups of tasks.

A recipe, in TOML:

    folders = ["NAME", …]           # under results/eval, of one model
    lengths, regimes, budgets       # lists; what has several values makes columns, by default in this order
    tasks = ["all", "all - vt", "qa_1 qa_2"]   # groups; "all" are those that the full cache can do in every column
    columns = ["lengths"]           # axes that make columns; the others' values share a cell, "a, b" and "a / b"
    rows = [["title", "METHOD"], ["title", "METHOD - METHOD"], ["title", "METHOD / METHOD"], ["title", "prompts"]]
    titles = […]                    # of the columns, where their own would not do
    measure = "score"; scale = 100; digits = 1; intervals = false
    each = false                    # true: "all" are those that the full cache can do in each column

Differences are paired. In a table's differences ° says that 0 is outside the 95 % interval, bold that it is so with
Holm's correction for the whole table. A number in braces says how many prompts a cell has where it has not all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from decantkv.lab.eval.bootstrap import Bootstrap, Interval, grouped, holm
from decantkv.lab.eval.results import ROWS, RUN, digest, read_rows
from decantkv.lab.eval.statistics import able, best_on_the_other_half

AXES = ("lengths", "regimes", "budgets", "tasks")
SHORT = {"aware": "read before", "aware-question": "answer prefix unread", "agnostic": "late"}
MEASURES = ("score", "nll", "kl", "tv", "top1")


@dataclass(frozen=True, eq=False)
class Answers:
    """One folder's rows, without the texts.

    Attributes:
        tasks: length -> prompt -> task.
        values: (length, regime, policy, budget, measure) -> prompt -> value.
        few: the rows of prompts and of the full cache's answers.
        able: length -> tasks that the full cache can do.
    """

    tasks: Mapping[int, Mapping[str, str]]
    values: Mapping[tuple[int, str, str, str, str], Mapping[str, float]]
    few: Sequence[Mapping[str, Any]]
    able: Mapping[int, set[str]]

    def scores(self) -> Iterator[Mapping[str, Any]]:
        """Rows as `decantkv.lab.eval.statistics` reads them, with scores alone."""
        yield from self.few
        for (_, regime, policy, budget, measure), found in self.values.items():
            if measure == "score" and policy != "full":
                cell = {"row": "answer", "regime": regime, "policy": policy, "budget": budget}
                yield from ({**cell, "prompt": prompt, "score": value} for prompt, value in found.items())


@lru_cache(maxsize=32)
def answers(folder: Path) -> Answers:
    """A folder's rows, read once and one by one: hundreds of thousands of them kept whole are slow to walk over."""
    run = json.loads((folder / RUN).read_text(encoding="utf-8"))
    file = folder / ROWS if (folder / ROWS).is_file() else folder / f"{ROWS}.gz"
    tasks: dict[int, dict[str, str]] = defaultdict(dict)
    values: dict[tuple[str, str, str, str], dict[str, float]] = defaultdict(dict)
    lengths: dict[str, int] = {}
    few = []
    for row in read_rows(file, config=digest(run["configuration"])):
        if row["row"] == "prompt":
            lengths[row["prompt"]] = row["length"]
            tasks[row["length"]][row["prompt"]] = row["task"]
        else:
            for measure in MEASURES:
                if measure in row:
                    values[row["regime"], row["policy"], row["budget"], measure][row["prompt"]] = float(row[measure])
        if row["row"] == "prompt" or row["policy"] == "full":
            few.append(row)
    by_length: dict[tuple[int, str, str, str, str], dict[str, float]] = defaultdict(dict)
    for place, found in values.items():
        for prompt, value in found.items():
            by_length[lengths[prompt], *place][prompt] = value
    return Answers(tasks, by_length, few, able(few))


@dataclass(frozen=True, eq=False)
class _Cell:
    found: Interval | None
    kind: str  # "mean", "difference", "share" or "prompts"
    prompts: int = 0
    whole: bool = True


def answer_table(root: Path, recipe: Mapping[str, Any]) -> list[list[str]]:
    """The lines of a table, its head first."""
    folders = [answers(root / "eval" / name) for name in recipe["folders"]]
    axes: dict[str, Sequence[Any]] = {axis: recipe.get(axis, ["all"]) for axis in AXES}
    columns = [axis for axis in AXES if axis in recipe.get("columns", [a for a in AXES if len(axes[a]) > 1])]
    inside = [axis for axis in AXES if axis not in columns]
    heads = list(product(*(axes[axis] for axis in columns)))
    parts = list(product(*(axes[axis] for axis in inside)))
    cells = _cells(folders, recipe, axes["lengths"], [(*columns, *inside), *(h + p for h, p in product(heads, parts))])
    compared = [cell.found for cell in cells.values() if cell.kind == "difference" and cell.found]
    stands = {id(one): yes for one, yes in zip(compared, holm(compared), strict=True)}
    varied = [axis for axis in columns if len(axes[axis]) > 1] or columns
    titles = recipe.get("titles") or [
        ", ".join(_title(axis, value) for axis, value in zip(columns, head, strict=True) if axis in varied)
        for head in heads
    ]
    lines = [[recipe.get("corner", ""), *titles]]
    for i, (title, _) in enumerate(recipe["rows"]):
        texts = []
        for head in heads:
            groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
            for part in parts:  # groups of tasks within, others outside
                groups[part[:-1] if "tasks" in inside else part].append(_text(cells[i, head + part], stands, recipe))
            shown = [" / ".join(dict.fromkeys(group) if set(group) == {"–"} else group) for group in groups.values()]
            texts.append(", ".join(dict.fromkeys(shown) if cells[i, head + parts[0]].kind == "prompts" else shown))
        lines.append([title, *texts])
    return lines


def _cells(
    folders: Sequence[Answers], recipe: Mapping[str, Any], lengths: Sequence[int], places: Sequence[tuple[Any, ...]]
) -> dict[tuple[int, tuple[Any, ...]], _Cell]:
    """(row, place) -> cell; the first of the places names the axes."""
    measure, found = recipe.get("measure", "score"), {}
    can = {length: frozenset(_folder(folders, length).able.get(length, ())) for length in lengths}
    common = frozenset.intersection(*can.values())
    for values in places[1:]:
        place = dict(zip(places[0], values, strict=True))
        length = place["lengths"]
        judged = None if measure != "score" else can[length] if recipe.get("each") else common
        for i, (_, term) in enumerate(recipe["rows"]):
            where = (length, place["regimes"], place["budgets"])
            found[i, values] = _cell(_folder(folders, length), where, place["tasks"], judged, term, measure)
    return found


def halves_table(root: Path, recipe: Mapping[str, Any]) -> list[list[str]]:
    """Return what `decantkv eval best` prints: chosen on one half of the prompts, reported on the other."""
    lines = [["length, question, kept", "best on even prompts", "less DropKV on odd prompts"]]
    for name in recipe["folders"]:
        for one in best_on_the_other_half(list(answers(root / "eval" / name).scores())):
            lead = "" if one.against is None else _interval(one.against, recipe)
            place = f"{_title('lengths', one.length)}, {SHORT[one.regime]}, {_title('budgets', one.budget)}"
            lines.append([place, f"`{one.policy}`", lead])
    return lines


def _interval(found: Interval, recipe: Mapping[str, Any]) -> str:
    scale, digits = recipe.get("scale", 100), recipe.get("digits", 1)
    text, low, high = (_number(scale * x, digits) for x in (found.mean, found.low, found.high))
    return f"{text} [{low}, {high}]" + ("°" if found.clear else "")


def _folder(folders: Sequence[Answers], length: int) -> Answers:
    found = [folder for folder in folders if length in folder.tasks]
    if len(found) != 1:
        raise ValueError(f"expected one folder with prompts of {length} tokens, got {len(found)}")
    return found[0]


@cache  # documents print the same cells
def _cell(
    here: Answers, where: tuple[int, str, str], wanted: str, judged: frozenset[str] | None, term: str, measure: str
) -> _Cell:
    """One cell's number.

    Args:
        where: length, regime, budget.
        wanted: group of tasks; judged: those that "all" means, None for every one.
    """
    tasks = here.tasks[where[0]]
    chosen = _group(wanted, {task for task in tasks.values() if judged is None or task in judged})
    keys = {key for key, task in tasks.items() if task in chosen}
    if term == "prompts":
        return _Cell(None, "prompts", len(keys))
    kind = "difference" if " - " in term else "share" if " / " in term else "mean"
    names = term.split(" - " if kind == "difference" else " / ")
    values = [_values(here, where, name, measure) for name in names]
    shared = sorted(keys.intersection(*values))
    if not shared:
        return _Cell(None, kind)
    groups = Bootstrap(grouped(shared, tasks))
    if kind == "difference":
        found = groups.interval({key: values[0][key] - values[1][key] for key in shared})
    elif kind == "share":
        of, whole = (groups.interval({key: one[key] for key in shared}).mean for one in values)
        found = Interval(of / whole, np.nan, np.nan)
    else:
        found = groups.interval({key: values[0][key] for key in shared})
    return _Cell(found, kind, len(shared), len(shared) == len(keys))


def _values(here: Answers, where: tuple[int, str, str], policy: str, measure: str) -> Mapping[str, float]:
    length, regime, budget = where
    if policy == "full":
        regime, budget = "any", "1"
    found = here.values.get((length, regime, policy, budget, measure))
    return found or here.values.get((length, regime, policy, "-", measure), {})


def _group(text: str, able_tasks: set[str]) -> set[str]:
    """Tasks of a group: "all", "all - vt qa_1", or names, which are taken whether or not the full cache can do them."""
    names, _, without = text.partition(" - ")
    return (able_tasks if names == "all" else set(names.split())) - set(without.split())


def _title(axis: str, value: Any) -> str:
    if axis == "lengths":
        return f"{value // 1024}K" if value % 1024 == 0 else str(value)
    if axis == "budgets":
        return f"{float(value):.0%}".replace("%", " %")
    return str(SHORT.get(value, value))


def _text(cell: _Cell, stands: Mapping[int, bool], recipe: Mapping[str, Any]) -> str:
    if cell.kind == "prompts":
        return str(cell.prompts)
    if cell.found is None:
        return "–"
    scale, digits = recipe.get("scale", 100), recipe.get("digits", 1)
    if cell.kind == "share":
        return f"{100 * cell.found.mean:.0f} %"
    text, low, high = (_number(scale * x, digits) for x in (cell.found.mean, cell.found.low, cell.found.high))
    if recipe.get("intervals") and cell.found.high != cell.found.low:
        text += f" [{low}, {high}]"
    if cell.kind == "difference":
        text = f"**{text}**" if stands[id(cell.found)] else f"{text}°" if cell.found.clear else text
    return text if cell.whole else f"{text} {{{cell.prompts}}}"


def _number(value: float, digits: int) -> str:
    text = f"{round(value, 9):.{digits}f}"  # a half must not hang on how a sum was rounded
    return text.lstrip("-") if float(text) == 0 else text.replace("-", "−")
