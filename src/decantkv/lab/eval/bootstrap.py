"""Means with 95 % intervals: the bootstrap's, with the same resamples of prompts for everything that is compared on
them, or Student's where a task has few prompts; and which of many differences stand together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

RESAMPLES = 4000
FEW = 30  # prompts per task; with fewer the bootstrap's intervals are too narrow (of 8 they cover 81 to 92 %)

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean and its 95 % interval.

    Attributes:
        p: probability, by Student's t, of a mean at least so far from 0 if the true one is 0.
    """

    mean: float
    low: float
    high: float
    p: float = 1.0

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def clear(self) -> bool:
        """Whether 0 is outside."""
        return self.low > 0 or self.high < 0


class Bootstrap:
    """Intervals of means over tasks of task means.

    With at least `FEW` prompts in every task they are the middle 95 % of resamples of prompts, drawn within tasks and
    shared by everything compared on them; the draws hang on the seed and on how many prompts each task has, in order,
    not on which prompts they are. With fewer they are Student's.
    """

    def __init__(self, prompts: Mapping[str, Sequence[str]], *, seed: int = 0) -> None:
        self.prompts = {task: list(keys) for task, keys in prompts.items()}
        self._seed = seed

    def interval(self, values: Mapping[str, float]) -> Interval:
        """Of the mean over tasks of the task means; `values` is by prompt."""
        return self.intervals(values)[0]

    def intervals(self, *columns: Mapping[str, float]) -> list[Interval]:
        """The same of several columns of values by prompt."""
        return self._of([np.array([[c[key] for key in keys] for c in columns]) for keys in self.prompts.values()])

    def by_task(self, values: Mapping[str, float]) -> dict[str, Interval]:
        """Of each task's mean alone."""
        return {task: Bootstrap({task: keys}, seed=self._seed).interval(values) for task, keys in self.prompts.items()}

    def differences(
        self, values: Mapping[str, Mapping[str, float]], pairs: Sequence[tuple[str, str]]
    ) -> list[Interval]:
        """Of pairs of columns: a difference's resamples are the differences of the two columns' resamples."""
        names = list(dict.fromkeys(name for pair in pairs for name in pair))
        first, second = ([names.index(pair[side]) for pair in pairs] for side in (0, 1))
        columns = [np.array([[values[name][key] for key in keys] for name in names]) for keys in self.prompts.values()]
        return self._of([one[first] - one[second] for one in columns])  # not of means: ties would round apart

    def _of(self, values: Sequence[Floats]) -> list[Interval]:
        """Of M things, whose values are [M, prompts] per task."""
        found = student(values)
        sizes = tuple(one.shape[1] for one in values)
        if min(sizes) < FEW:
            return found
        counts = _counts(sizes, self._seed)
        resampled = sum(one @ drawn / len(drawn) for one, drawn in zip(values, counts, strict=True)) / len(values)
        low, high = ends = np.percentile(resampled, [2.5, 97.5], axis=1)
        ends[abs(ends) < 1e-12] = 0  # which side of 0 it is on must not hang on how a sum was rounded
        return [Interval(one.mean, float(a), float(b), one.p) for one, a, b in zip(found, low, high, strict=True)]


def student(values: Sequence[Floats]) -> list[Interval]:
    """Student's intervals of M means over tasks of task means, degrees of freedom by Satterthwaite.

    A task with one prompt is given the others' average variance.

    Args:
        values: per task, [M, prompts].
    """
    sizes = np.array([one.shape[1] for one in values])
    mean = np.mean([one.mean(1) for one in values], axis=0)
    spread = np.stack([one.var(1, ddof=1) if one.shape[1] > 1 else np.full(len(one), np.nan) for one in values])
    several = sizes > 1
    if not several.any():
        return [Interval(float(m), -np.inf, np.inf) for m in mean]
    spread[~several] = spread[several].mean(0)
    freedoms = np.where(several, sizes - 1, (sizes - 1).sum())[:, None]
    parts = spread / sizes[:, None]
    error = np.sqrt(parts.sum(0)) / len(sizes)
    error[error < 1e-12] = 0
    freedom = parts.sum(0) ** 2 / np.maximum((parts**2 / freedoms).sum(0), 1e-300)
    freedom = np.maximum(freedom, 1.0)
    half = np.where(error > 0, stdtrit(freedom, 0.975) * error, 0.0)
    p = np.where(error > 0, 2 * stdtr(freedom, -abs(mean) / np.where(error > 0, error, 1.0)), abs(mean) < 1e-12)
    low, high = ends = np.stack([mean - half, mean + half])
    ends[abs(ends) < 1e-12] = 0
    return [Interval(*map(float, one)) for one in zip(mean, low, high, p, strict=True)]


def holm(found: Sequence[Interval], *, level: float = 0.05) -> list[bool]:
    """Which differences stand though all of them were looked at: Holm's correction, and 0 outside their interval."""
    order = sorted(range(len(found)), key=lambda i: found[i].p)
    stands = [False] * len(found)
    for rank, i in enumerate(order):
        if found[i].p > level / (len(found) - rank):
            break
        stands[i] = found[i].clear
    return stands


@lru_cache(maxsize=6)  # what is compared has mostly the same prompts, some tasks fewer; 650 prompts are 20 MB
def _counts(sizes: tuple[int, ...], seed: int) -> tuple[Floats, ...]:
    """Per task [n, RESAMPLES]: how often a resample has each prompt, so that resampling is a matrix product."""
    rng = np.random.default_rng(seed)
    counts = []
    for n in sizes:
        draws = rng.integers(0, n, size=(RESAMPLES, n))
        places = draws * RESAMPLES + np.arange(RESAMPLES)[:, None]
        counts.append(np.bincount(places.ravel(), minlength=n * RESAMPLES).reshape(n, RESAMPLES).astype(np.float64))
    return tuple(counts)


def paired(values: Mapping[str, Mapping[str, float]], task_of: Mapping[str, str]) -> dict[tuple[str, str], Interval]:
    """Every two methods' difference, the first one's values minus the second's on the prompts that both have.

    Args:
        values: method -> prompt -> value.
        task_of: prompt -> task; prompts that are not in it do not count.

    Returns:
        (first, second) -> difference, for the pairs in the methods' order that share a prompt.
    """
    pairs_on: dict[frozenset[str], list[tuple[str, str]]] = defaultdict(list)
    for one, other in combinations(values, 2):
        pairs_on[frozenset(values[one].keys() & values[other].keys() & task_of.keys())].append((one, other))
    found: dict[tuple[str, str], Interval] = {}
    for shared, pairs in pairs_on.items():
        if shared:
            groups = grouped(sorted(shared), task_of)
            found.update(zip(pairs, Bootstrap(groups).differences(values, pairs), strict=True))
    return {pair: found[pair] for pair in combinations(values, 2) if pair in found}


def grouped(keys: Iterable[str], task_of: Mapping[str, str]) -> dict[str, list[str]]:
    """Keys by what they belong to, both in order."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        groups[task_of[key]].append(key)
    return dict(sorted(groups.items()))
