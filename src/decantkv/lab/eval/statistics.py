"""What rows say: means with 95 % intervals, paired between methods, and how bad it can get."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from decantkv.lab.eval.bootstrap import Bootstrap, Interval, grouped, holm

LEAST_FULL = 0.3  # a task the full cache itself fails at says nothing about eviction
LEAST_OF = {"rouge_l": 0.1}  # by a metric's own scale: a summary's ROUGE-L is .25 to .35 whoever wrote it
REPEATED = ("niah_single_1", "vt")  # RULER's tasks whose haystack is one repeated line: averages are shown without, too
LEAST_SHARE = 0.1  # of a length's prompts; a method measured on fewer has only been begun, and gets no line
LOSS = 0.1  # a prompt "loses" when its score falls by more than this share of the full cache's


@dataclass(frozen=True)
class Summary:
    """One method at one budget in one regime, over the prompts of one length.

    Attributes:
        score: mean over tasks of the task means.
        full: the full cache's, over the same prompts.
        against: score minus the reference method's on the same prompts, or None for the reference and the full cache.
        stands: whether that is beyond its interval with Holm's correction for all that the table compares.
        without: score and against without the tasks of one repeated line; None if there are none or no others.
        by_task: task -> (score, full cache's).
        worst: the task with the smallest share of the full cache's score, or the largest distance where lower is
            better.
        losing: share of prompts that lose more than 10 % of the full cache's score, of those where it has any.
        drift: mean new tokens minus the full cache's.
        kept, bytes: mean shares of tokens and of bytes.
        nll: mean negative log-likelihood a token of the references minus the full cache's, or None.
        prompts: how many.
    """

    length: int
    regime: str
    policy: str
    budget: str
    score: Interval
    full: Interval
    against: Interval | None
    stands: bool
    without: tuple[Interval, Interval | None] | None
    by_task: Mapping[str, tuple[Interval, float]]
    worst: str
    losing: float
    drift: float
    kept: float
    bytes: float
    nll: Interval | None
    prompts: int


@dataclass(frozen=True)
class Table:
    """The summaries of one length; tasks left out of its averages, with the full cache's score; methods only begun.

    Attributes:
        prompts: how many the averages have where a method was measured on all.
        without: the full cache's average without the tasks of one repeated line, None as in `Summary`.
    """

    length: int
    prompts: int
    full: Interval
    without: Interval | None
    summaries: tuple[Summary, ...]
    left_out: Mapping[str, float]
    begun: tuple[str, ...] = ()


def tables(
    rows: Sequence[Mapping[str, Any]],
    *,
    reference: str = "dropkv",
    measure: str = "score",
) -> list[Table]:
    """A table per length of everything in the rows.

    A method's cell counts only prompts that have it; a comparison counts the prompts that both have. All lengths
    average over the same tasks, so that their tables may be laid side by side.

    Args:
        reference: the policy others are compared with at the same budget and regime; for methods without budgets,
            none.
        measure: "score"; or "nll" or "kl", where lower is better, where no answers were generated.

    Raises:
        ValueError: no answers of the full cache, against which all is measured.
    """
    task_of = {row["prompt"]: (row["length"], row["task"]) for row in rows if row["row"] == "prompt"}
    cells: dict[tuple[str, str, str], dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        if row["row"] == "answer" and measure in row:
            cells[row["regime"], row["policy"], row["budget"]][row["prompt"]] = row
    full = cells.pop(("any", "full", "1"), {})
    if not full:
        raise ValueError("results: expected answers of the full cache, got none")
    able_at = able(rows) if measure == "score" else {}
    lengths = sorted({task_of[key][0] for key in full})
    common = set.intersection(*able_at.values()) if able_at else set()
    return [_table(length, cells, full, task_of, reference, measure, common) for length in lengths]


def able(rows: Sequence[Mapping[str, Any]]) -> dict[int, set[str]]:
    """Per length, the tasks that the full cache can do, by the scale of each metric; a task not run counts as done."""
    prompts = {row["prompt"]: row for row in rows if row["row"] == "prompt"}
    scores: dict[tuple[int, str], list[float]] = defaultdict(list)
    least = {row["task"]: LEAST_OF.get(row.get("metric", ""), LEAST_FULL) for row in prompts.values()}
    for row in rows:
        if row["row"] == "answer" and row["policy"] == "full" and "score" in row:
            prompt = prompts[row["prompt"]]
            scores[prompt["length"], prompt["task"]].append(row["score"])
    failed = {place for place, found in scores.items() if np.mean(found) < least[place[1]]}
    return {length: {task for task in least if (length, task) not in failed} for length in {one for one, _ in scores}}


def _table(
    length: int,
    cells: Mapping[tuple[str, str, str], Mapping[str, Mapping[str, Any]]],
    full: Mapping[str, Mapping[str, Any]],
    task_of: Mapping[str, tuple[int, str]],
    reference: str,
    measure: str,
    common: set[str],
) -> Table:
    here = {key: row for key, row in full.items() if task_of[key][0] == length}
    by_task = grouped(here, {key: task_of[key][1] for key in here})
    means = {task: float(np.mean([here[key][measure] for key in keys])) for task, keys in by_task.items()}
    chosen = {task: keys for task, keys in by_task.items() if task in common} or by_task
    summaries, begun = [], set()
    for (regime, policy, budget), answers in sorted(cells.items()):
        found = {key: row for key, row in answers.items() if key in here}
        if 0 < len(found) < LEAST_SHARE * len(here):
            begun.add(policy)
        elif found:
            base = cells.get((regime, reference, budget), {}) if policy != reference else {}
            summaries.append(_summary(length, (regime, policy, budget), found, here, base, chosen, task_of, measure))
    left_out = {task: mean for task, mean in sorted(means.items()) if task not in chosen}
    whole = Bootstrap(chosen).interval({key: row[measure] for key, row in here.items()})
    shown = _corrected([s for s in summaries if s is not None])
    prompts = sum(len(keys) for keys in chosen.values())
    others = {task: keys for task, keys in chosen.items() if task not in REPEATED}
    scores = {key: row[measure] for key, row in here.items()}
    without = Bootstrap(others).interval(scores) if 0 < len(others) < len(chosen) else None
    return Table(length, prompts, whole, without, shown, left_out, tuple(sorted(begun - {s.policy for s in shown})))


def _corrected(summaries: Sequence[Summary]) -> tuple[Summary, ...]:
    """With what stands among all differences of a regime, which is what one table shows."""
    stands: set[int] = set()
    for regime in {s.regime for s in summaries}:
        compared = [(i, s.against) for i, s in enumerate(summaries) if s.regime == regime and s.against]
        found = holm([against for _, against in compared])
        stands |= {i for (i, _), yes in zip(compared, found, strict=True) if yes}
    return tuple(replace(s, stands=i in stands) for i, s in enumerate(summaries))


def _summary(
    length: int,
    name: tuple[str, str, str],
    answers: Mapping[str, Mapping[str, Any]],
    full: Mapping[str, Mapping[str, Any]],
    base: Mapping[str, Mapping[str, Any]],
    chosen: Mapping[str, Sequence[str]],
    task_of: Mapping[str, tuple[int, str]],
    measure: str,
) -> Summary | None:
    prompts = {task: [key for key in keys if key in answers] for task, keys in chosen.items()}
    prompts = {task: keys for task, keys in prompts.items() if keys}
    keys = [key for group in prompts.values() for key in group]
    if not keys:
        return None
    scores = {key: float(answers[key][measure]) for key in keys}
    best = {key: float(full[key][measure]) for key in keys}
    whole = Bootstrap(prompts)
    score, full_score = whole.intervals(scores, best)
    alone = whole.by_task(scores)
    by_task = {task: (alone[task], float(np.mean([best[key] for key in keys]))) for task, keys in prompts.items()}
    others = {task: keys for task, keys in prompts.items() if task not in REPEATED}
    return Summary(
        length,
        *name,
        score=score,
        full=full_score,
        against=_against(scores, base, prompts, measure),
        stands=False,  # until all differences are there
        without=(Bootstrap(others).interval(scores), _against(scores, base, others, measure))
        if 0 < len(others) < len(prompts)
        else None,
        by_task=by_task,
        worst=_worst(by_task, higher_is_better=measure == "score"),
        losing=losing_share(scores, best),
        drift=float(np.mean([answers[k].get("new_tokens", 0) - full[k].get("new_tokens", 0) for k in keys])),
        kept=float(np.mean([answers[key]["kept"] for key in keys])),
        bytes=float(np.mean([answers[key]["bytes"] for key in keys])),
        nll=_nll(answers, full, prompts),
        prompts=len(keys),
    )


def _worst(by_task: Mapping[str, tuple[Interval, float]], *, higher_is_better: bool) -> str:
    if higher_is_better:
        return min(by_task, key=lambda task: by_task[task][0].mean / max(by_task[task][1], 1e-9))
    return max(by_task, key=lambda task: by_task[task][0].mean - by_task[task][1])


def _against(
    scores: Mapping[str, float],
    base: Mapping[str, Mapping[str, Any]],
    prompts: Mapping[str, Sequence[str]],
    measure: str,
) -> Interval | None:
    shared = {task: [key for key in keys if key in base] for task, keys in prompts.items()}
    shared = {task: keys for task, keys in shared.items() if keys}
    if not shared:
        return None
    differences = {key: scores[key] - float(base[key][measure]) for keys in shared.values() for key in keys}
    return Bootstrap(shared).interval(differences)


def _nll(
    answers: Mapping[str, Mapping[str, Any]],
    full: Mapping[str, Mapping[str, Any]],
    prompts: Mapping[str, Sequence[str]],
) -> Interval | None:
    having = {task: [k for k in keys if "nll" in answers[k] and "nll" in full[k]] for task, keys in prompts.items()}
    having = {task: keys for task, keys in having.items() if keys}
    if not having:
        return None
    return Bootstrap(having).interval({k: answers[k]["nll"] - full[k]["nll"] for keys in having.values() for k in keys})


def losing_share(scores: Mapping[str, float], full: Mapping[str, float]) -> float:
    """The share of prompts that fall below 90 % of the full cache's score, of those where that is above 0."""
    counted = [key for key in scores if full[key] > 0]
    if not counted:
        return 0.0
    return sum(scores[key] < (1 - LOSS) * full[key] for key in counted) / len(counted)


@dataclass(frozen=True)
class Best:
    """The method that was best on one half of the prompts, and what it is worth on the other.

    Attributes:
        seen: its score on the half it was chosen by, which flatters it.
        unseen: its score on the other half.
        against: minus the reference on the other half, or None if the reference won.
    """

    length: int
    regime: str
    budget: str
    policy: str
    seen: Interval
    unseen: Interval
    against: Interval | None


def best_on_the_other_half(
    rows: Sequence[Mapping[str, Any]], *, reference: str = "dropkv", measure: str = "score"
) -> list[Best]:
    """Choose by prompts with even numbers, report on those with odd ones, for each length, regime and budget.

    A method is chosen by its lead over the reference on the prompts that both have, since methods may have different
    ones, and by its score where there is no reference. Both halves average over the same tasks.

    Args:
        reference, measure: as in `tables`.

    Raises:
        ValueError: as `tables`, or a prompt without a number.
    """
    if unnumbered := [row["prompt"] for row in rows if not row["prompt"].rpartition("/")[2].isdecimal()]:
        raise ValueError(f"results: expected prompts that end in a number, such as vt/4096/7, got {unnumbered[0]!r}")
    sign = 1 if measure == "score" else -1
    able_at = able(rows) if measure == "score" else {}
    common = set.intersection(*able_at.values()) if able_at else None
    prompts = {row["prompt"]: row for row in rows if row["row"] == "prompt"}
    task_of = {
        key: row["task"] for key, row in prompts.items() if common is None or not common or row["task"] in common
    }
    cells: dict[tuple[int, str, str], dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row["row"] == "answer" and measure in row and row["budget"] not in ("-", "1") and row["prompt"] in task_of:
            place = (prompts[row["prompt"]]["length"], row["regime"], row["budget"])
            cells[place][row["policy"]][row["prompt"]] = float(row[measure])
    found = []
    for place, methods in sorted(cells.items()):
        least = LEAST_SHARE * sum(prompts[key]["length"] == place[0] for key in task_of)
        halves = [
            {name: _half(values, odd) for name, values in methods.items() if len(values) >= least} for odd in (0, 1)
        ]
        even, odd = ({name: values for name, values in half.items() if values} for half in halves)
        names = sorted(even.keys() & odd.keys())
        if not names:
            continue
        base = even.get(reference, {})
        best = max(names, key=lambda name: sign * _lead(even[name], base, task_of))
        against = _minus(odd[best], odd.get(reference, {})) if best != reference else {}
        found.append(
            Best(
                *place,
                best,
                Bootstrap(grouped(even[best], task_of)).interval(even[best]),
                Bootstrap(grouped(odd[best], task_of)).interval(odd[best]),
                Bootstrap(grouped(against, task_of)).interval(against) if against else None,
            )
        )
    return found


def _half(values: Mapping[str, float], odd: int) -> dict[str, float]:
    return {key: value for key, value in values.items() if int(key.rsplit("/", 1)[1]) % 2 == odd}


def _minus(values: Mapping[str, float], base: Mapping[str, float]) -> dict[str, float]:
    return {key: value - base[key] for key, value in values.items() if key in base}


def _lead(values: Mapping[str, float], base: Mapping[str, float], task_of: Mapping[str, str]) -> float:
    """Mean over tasks of values minus the base's where both are; of the values themselves without any base."""
    leads = _minus(values, base) if base else values
    if not leads:
        return -np.inf
    return float(np.mean([np.mean([leads[key] for key in keys]) for keys in grouped(leads, task_of).values()]))
