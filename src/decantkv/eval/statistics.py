"""What rows say: means with 95 % bootstrap intervals, paired between methods, and how bad it can get."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from decantkv.eval.bootstrap import Bootstrap, Interval, grouped, intervals

LEAST_FULL = 0.3  # a task the full cache itself fails at says nothing about eviction
LEAST_SHARE = 0.1  # of a length's prompts; a method measured on fewer has only been begun, and gets no line
LOSS = 0.1  # a prompt "loses" when its score falls by more than this share of the full cache's


@dataclass(frozen=True)
class Summary:
    """One method at one budget in one regime, over the prompts of one length.

    Attributes:
        score: mean over tasks of the task means.
        full: the full cache's, over the same prompts.
        against: score minus the reference method's on the same prompts, or None for the reference and the full cache.
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
    """The summaries of one length; tasks left out of its averages, with the full cache's score; methods only begun."""

    length: int
    full: Interval
    summaries: tuple[Summary, ...]
    left_out: Mapping[str, float]
    begun: tuple[str, ...] = ()


def tables(rows: Sequence[Mapping[str, Any]], *, reference: str = "dropkv", measure: str = "score") -> list[Table]:
    """A table per length of everything in the rows.

    A method's cell counts only prompts that have it; a comparison counts the prompts that both have.

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
    lengths = sorted({task_of[key][0] for key in full})
    return [_table(length, cells, full, task_of, reference, measure) for length in lengths]


def _table(
    length: int,
    cells: Mapping[tuple[str, str, str], Mapping[str, Mapping[str, Any]]],
    full: Mapping[str, Mapping[str, Any]],
    task_of: Mapping[str, tuple[int, str]],
    reference: str,
    measure: str,
) -> Table:
    here = {key: row for key, row in full.items() if task_of[key][0] == length}
    by_task = grouped(here, {key: task_of[key][1] for key in here})
    means = {task: float(np.mean([here[key][measure] for key in keys])) for task, keys in by_task.items()}
    kept = {task for task, mean in means.items() if measure != "score" or mean >= LEAST_FULL}
    chosen = {task: keys for task, keys in by_task.items() if task in kept} or by_task
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
    shown = tuple(s for s in summaries if s is not None)
    return Table(length, whole, shown, left_out, tuple(sorted(begun - {s.policy for s in shown})))


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
    means, resampled = Bootstrap(prompts).task_means(scores, best)
    score, full_score = intervals(means.mean(1), resampled.mean(1))
    of_tasks = intervals(means[0], resampled[0])
    by_task = {task: (of_tasks[i], float(means[1, i])) for i, task in enumerate(prompts)}
    return Summary(
        length,
        *name,
        score=score,
        full=full_score,
        against=_against(scores, base, prompts, measure),
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
        against: minus the reference on the other half, or None where the reference won.
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

    Args:
        reference, measure: as in `tables`.
    """
    sign = 1 if measure == "score" else -1

    def half(odd: int) -> dict[tuple[int, str, str, str], Summary]:
        chosen = [row for row in rows if int(row["prompt"].rsplit("/", 1)[1]) % 2 == odd]
        found = [s for table in tables(chosen, reference=reference, measure=measure) for s in table.summaries]
        return {(s.length, s.regime, s.budget, s.policy): s for s in found if s.budget != "-"}

    even, odd = half(0), half(1)
    best: dict[tuple[int, str, str], Summary] = {}
    for (length, regime, budget, policy), summary in even.items():
        place = (length, regime, budget)
        better = place not in best or sign * summary.score.mean > sign * best[place].score.mean
        if better and (*place, policy) in odd:
            best[place] = summary
    return [
        Best(*place, s.policy, s.score, (other := odd[*place, s.policy]).score, other.against)
        for place, s in sorted(best.items())
    ]
