"""What the k cheapest keys can cost at most, next to the best k that could have been chosen (§4)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from decantkv.lab.theory.cone import Cone
from decantkv.lab.theory.rows import Rows, length


def bound_factor(c: float, epsilon: float, k: int) -> float:
    """1/[c(1 − ε)(1 − kε)], the paper's Theorem 1 for one row; inf where a precondition (c > 0, kε < 1) fails."""
    return _factor(c, epsilon, k * epsilon)


def mass_factor(c: float, epsilon: float, mass: float) -> float:
    """The same with the pool's k largest weights summed in place of kε: never larger, and finite at any k.

    Our own reading: the proof uses kε only to bound the weight Σ_S p of the set that goes.
    """
    return _factor(c, epsilon, mass)


def window_factor(num_rows: int) -> float:
    """√w for a window, √(g·w) where a group shares the keys: what several rows add to the factor (Proposition 1)."""
    return math.sqrt(num_rows)


def largest_mass(pool: Rows, k: int) -> float:
    """The largest Σ_S p over the rows and the k-subsets S of a pool."""
    return float(pool.p.topk(min(k, pool.num_keys), dim=-1).values.sum(-1).max())


def _factor(c: float, epsilon: float, mass: float) -> float:
    if c <= 0 or mass >= 1:
        return math.inf
    return 1 / (c * (1 - epsilon) * (1 - mass))


@dataclass(frozen=True)
class Relaxed:
    """The relaxed bound at one aperture: shift ≤ factor · (best + addend).

    Attributes:
        c: the cosine that members of the cone reach.
        outliers: how many of the pool do not.
        mu: µ, the largest Σ p‖r‖ that k outliers can carry.
        addend: (1 + c)µ, what is added to the best set's shift.
        factor: 1/[c(1 − ε)(1 − kε)].
    """

    c: float
    outliers: int
    mu: float
    addend: float
    factor: float

    def bound(self, best: float) -> float:
        """The most that the k cheapest keys can shift the output when the best k shift it by `best`."""
        return self.factor * (best + self.addend)


def relaxed(pool: Rows, k: int, direction: Tensor, *, apertures: int = 64) -> list[Relaxed]:
    """The relaxed bound of a one-row pool at the apertures that a direction offers, widest cone first.

    A k-subset T splits into members of the cone and outliers O. Projected on u its weighted residuals are at least
    c·Σ_{T∖O} p‖r‖ − Σ_{T∩O} p‖r‖ ≥ c·Σ_T p‖r‖ − (1 + c)µ; the rest of Theorem 1's proof carries over. Every c in
    (0, 1] and every direction gives a valid bound, so the smallest of them is one too.

    Args:
        pool: one row.
        k: how many keys go.
        direction: [Dv] unit vector u; the cone's own, or any other.
        apertures: how many numbers of outliers to try: all in a pool no larger, else spread geometrically.

    Returns:
        One entry per aperture with c > 0. Empty where no residual points along u.

    Raises:
        ValueError: a pool of several rows.
    """
    if pool.num_rows != 1:
        raise ValueError(f"pool: expected one row, got {pool.num_rows}")
    residuals = pool.residuals[0]
    cosine, order = residuals.cosine(direction).sort()
    weighted = (pool.p[0] * residuals.distance)[order].cpu().numpy()
    fewest = int((cosine <= 0).sum())
    epsilon, numbers = pool.epsilon, _spread(fewest, pool.num_keys, apertures)
    heaviest, seen, entries = np.empty(0), 0, []
    for outliers, found in zip(numbers, cosine[numbers].tolist(), strict=True):
        heaviest, seen = _largest(np.concatenate([heaviest, weighted[seen:outliers]]), k), outliers
        c, mu = min(found, 1.0), float(heaviest.sum())
        entries.append(Relaxed(c, outliers, mu, (1 + c) * mu, bound_factor(c, epsilon, k)))
    return entries


def _largest(values: np.ndarray, k: int) -> np.ndarray:
    """The k largest, or all of fewer, in no order."""
    return values if len(values) <= k else np.partition(values, len(values) - k)[-k:]


def _spread(start: int, stop: int, most: int) -> list[int]:
    """At most `most` ascending numbers from start to below stop, densest at the start."""
    n = stop - start
    if n <= most:
        return list(range(start, stop))
    return sorted({start, *(start + round((n - 1) ** (i / (most - 2))) for i in range(most - 1))})


def scan(pool: Rows, k: int, found: Cone) -> list[Relaxed]:
    """Relaxed bounds along the cone's direction, the mean of the unit residuals and the mean of the weighted ones."""
    residuals = pool.residuals[0]
    directions = [] if found.direction is None else [found.direction]
    for mean in (residuals.mean_unit, residuals.weighted(pool.p[0])):
        norm = length(mean, dim=-1)
        if norm > 0:
            directions.append(mean / norm)
    return [entry for direction in directions for entry in relaxed(pool, k, direction)]


def tightest(entries: list[Relaxed], best: float) -> Relaxed | None:
    """The entry that says most about a pool whose best k-subset shifts the output by `best`."""
    return min(entries, key=lambda entry: entry.bound(best), default=None)


def certified_ratio(entries: list[Relaxed], shift: float) -> float:
    """Return how many times the best shift the k cheapest keys' `shift` can be at most, without knowing the best one.

    Solving the relaxed bound for it: best ≥ shift/factor − (1 + c)µ. inf where no aperture leaves anything.
    """
    least = max((shift / entry.factor - entry.addend for entry in entries), default=0.0)
    return shift / least if least > 0 else math.inf
