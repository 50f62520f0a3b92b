"""The best set there is, by looking at every one: the judge of the k cheapest keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from decantkv.lab.theory.rows import Rows

CAP = 22  # keys of a pool that is searched: 2^22 subsets, 32 MiB a table
_FINALISTS = 8


@dataclass(frozen=True)
class Best:
    """Attributes:
    subset: indices into the pool's keys, ascending.
    shift: F(S) of that set, recomputed from the residuals themselves.
    """

    subset: tuple[int, ...]
    shift: float


def best_subset(pool: Rows, k: int, *, cap: int = CAP) -> Best:
    """`best_subsets` for one k."""
    return best_subsets(pool, (k,), cap=cap)[k]


def best_subsets(pool: Rows, ks: Sequence[int], *, cap: int = CAP) -> dict[int, Best]:
    """For every k the k-subset of a pool whose removal moves the rows least, F(S) = √Σ_i ‖Δ_i(S)‖², exactly.

    Choosing it is NP-hard (see `hardness`), so all 2^M subsets are looked at, and larger pools refused.

    Args:
        pool: M keys, M ≤ cap.
        ks: how many keys go, each in 1..M.

    Raises:
        ValueError: a k outside 1..M, or a pool of more than `cap` keys.
    """
    m = pool.num_keys
    if m > cap:
        raise ValueError(f"pool: expected at most {cap} keys (cap: all 2^M subsets are looked at), got {m}")
    if not all(1 <= k <= m for k in ks):
        raise ValueError(f"k: expected 1 to {m} (the pool's keys), got {list(ks)}")
    flat = squared_shifts(pool, unit=float((pool.p * pool.distance()).max())).numpy()
    best = {}
    for k in ks:
        sets = _sets_of(m, k)
        # `squared_shifts` is inexact near 0; the residuals themselves decide among the smallest few
        few = min(_FINALISTS, len(sets))
        finalists = [_keys(int(s), m) for s in sets[np.argpartition(flat[sets], few - 1)[:few]]]
        shifts = [pool.joint(subset) for subset in finalists]
        winner = int(np.argmin(shifts))
        best[k] = Best(finalists[winner], shifts[winner])
    return best


def squared_shifts(pool: Rows, *, unit: float = 1.0) -> Tensor:
    """[2^M] float64: F(S)²/unit² of every set; key j is in set s where bit j of s is 1.

    The keys are split into two halves: ‖Σ_S p r‖² is each half's own part plus twice their product, which for all
    pairs of half sets is one matrix product. Near 0 half the digits are lost; a unit of the shifts' own size keeps
    small shifts' squares from being 0.
    """
    m = pool.num_keys
    low, high = m // 2, m - m // 2
    x_low, x_high = _members(low), _members(high)  # [2^half, half]
    squared = torch.zeros(len(x_high), len(x_low), dtype=torch.float64)
    for i in range(pool.num_rows):
        p = pool.p[i].cpu()
        weighted = (p[:, None] / (unit or 1.0)) * pool.residual(i).cpu()  # [M, Dv]
        _add_squared_shift(squared, x_high @ weighted[low:], x_low @ weighted[:low], x_high @ p[low:], x_low @ p[:low])
    return squared.flatten()


def _add_squared_shift(
    total: Tensor, moved_high: Tensor, moved_low: Tensor, mass_high: Tensor, mass_low: Tensor
) -> None:
    """Add one row's ‖Δ(S)‖² to `total` [2^high, 2^low], a cache's worth at a time."""
    own_low, own_high = moved_low.square().sum(-1), moved_high.square().sum(-1, keepdim=True)
    twice_low = 2 * moved_low.T
    step = max(1, 2**16 // len(mass_low))
    for start in range(0, len(total), step):
        part = slice(start, start + step)
        squared = moved_high[part] @ twice_low
        squared.add_(own_high[part]).add_(own_low).clamp_(min=0.0)
        left = ((1 - mass_high[part])[:, None] - mass_low).clamp_(min=1e-100)
        total[part] += squared.div_(left).div_(left)


@lru_cache(maxsize=32)
def _members(n: int) -> Tensor:
    """[2^n, n] float64: row s holds the bits of s."""
    return (torch.arange(2**n)[:, None] >> torch.arange(n) & 1).double()


@lru_cache(maxsize=64)
def _sets_of(n: int, k: int) -> np.ndarray:
    """[C(n, k)] int64: the bit patterns of all k-subsets of n keys."""
    return np.flatnonzero(np.bitwise_count(np.arange(2**n)) == k)


def _keys(bits: int, n: int) -> tuple[int, ...]:
    return tuple(j for j in range(n) if bits >> j & 1)
