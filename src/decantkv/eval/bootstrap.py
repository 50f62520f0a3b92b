"""Means with 95 % bootstrap intervals: the same resamples of prompts for everything that is compared on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A mean and the middle 95 % of its bootstrap distribution."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Bootstrap:
    """Resamples of prompts, task by task, shared by everything compared on them.

    The draws hang on the seed and on how many prompts each task has, in order, not on which prompts they are.
    """

    def __init__(self, prompts: Mapping[str, Sequence[str]], *, seed: int = 0) -> None:
        self.prompts = {task: list(keys) for task, keys in prompts.items()}
        self._counts = _counts(tuple(len(keys) for keys in self.prompts.values()), seed)

    def task_means(self, *columns: Mapping[str, float]) -> tuple[Floats, Floats]:
        """Task means of columns of values by prompt: as measured [C, T], and in each resample [C, T, RESAMPLES]."""
        values = [np.array([[column[key] for key in keys] for column in columns]) for keys in self.prompts.values()]
        resampled = [one @ counts / len(counts) for one, counts in zip(values, self._counts, strict=True)]
        return np.stack([one.mean(1) for one in values], 1), np.stack(resampled, 1)

    def interval(self, values: Mapping[str, float]) -> Interval:
        """Of the mean over tasks of the task means; `values` is by prompt."""
        means, resampled = self.task_means(values)
        return intervals(means.mean(1), resampled.mean(1))[0]


@lru_cache(maxsize=2)  # what is compared has mostly the same prompts; 650 prompts are 20 MB
def _counts(sizes: tuple[int, ...], seed: int) -> tuple[Floats, ...]:
    """Per task [n, RESAMPLES]: how often a resample has each prompt, so that resampling is a matrix product."""
    rng = np.random.default_rng(seed)
    counts = []
    for n in sizes:
        draws = rng.integers(0, n, size=(RESAMPLES, n))
        places = draws * RESAMPLES + np.arange(RESAMPLES)[:, None]
        counts.append(np.bincount(places.ravel(), minlength=n * RESAMPLES).reshape(n, RESAMPLES).astype(np.float64))
    return tuple(counts)


def intervals(means: Floats, resampled: Floats) -> list[Interval]:
    """Of M means [M] and their resamples [M, RESAMPLES]."""
    low, high = ends = np.percentile(resampled, [2.5, 97.5], axis=1)
    ends[abs(ends) < 1e-12] = 0  # which side of 0 it is on must not hang on how a sum was rounded
    return [Interval(float(m), float(a), float(b)) for m, a, b in zip(means, low, high, strict=True)]


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
            found.update(zip(pairs, _differences(values, pairs, groups), strict=True))
    return {pair: found[pair] for pair in combinations(values, 2) if pair in found}


def _differences(
    values: Mapping[str, Mapping[str, float]], pairs: Sequence[tuple[str, str]], prompts: Mapping[str, Sequence[str]]
) -> list[Interval]:
    """Of pairs that share these prompts: a difference's resamples are the differences of the two methods' resamples."""
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    first, second = ([names.index(pair[side]) for pair in pairs] for side in (0, 1))
    resampled = Bootstrap(prompts).task_means(*(values[name] for name in names))[1].mean(1)
    columns = [np.array([[values[name][key] for key in keys] for name in names]) for keys in prompts.values()]
    means = np.stack([(one[first] - one[second]).mean(1) for one in columns], 1)  # not of means: ties would round apart
    return intervals(means.mean(1), resampled[first] - resampled[second])


def grouped(keys: Iterable[str], task_of: Mapping[str, str]) -> dict[str, list[str]]:
    """Keys by what they belong to, both in order."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key in keys:
        groups[task_of[key]].append(key)
    return dict(sorted(groups.items()))
