"""The best set there is, by looking at every one: the judge of the k cheapest keys."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from decantkv.theory.rows import Rows

CAP = 2_000_000  # subsets one search may look at; C(20, 8) = 125,970, C(24, 8) = 735,471
_CHUNK = 16_384  # subsets held as a dense 0/1 matrix at a time


@dataclass(frozen=True)
class Best:
    """Attributes:
    subset: indices into the pool's keys, ascending.
    shift: F(S) of that set, recomputed from the residuals themselves.
    """

    subset: tuple[int, ...]
    shift: float


def best_subset(pool: Rows, k: int, *, cap: int = CAP) -> Best:
    """The k-subset of a pool whose removal moves the rows least, F(S) = √Σ_i ‖Δ_i(S)‖², exactly.

    Choosing it is NP-hard (see `hardness`), so every subset is looked at, and pools with more than `cap` refused.

    Raises:
        ValueError: k outside 1..M, or more than `cap` subsets.
    """
    if not 1 <= k <= pool.num_keys:
        raise ValueError(f"k: expected 1 to {pool.num_keys} (the pool's keys), got {k}")
    if math.comb(pool.num_keys, k) > cap:
        raise ValueError(
            f"pool: expected at most {cap} subsets (cap), got {math.comb(pool.num_keys, k)} for "
            f"{k} of {pool.num_keys} keys"
        )
    p = pool.p.cpu().numpy()
    weighted = [p[i, :, None] * pool.residual(i).cpu().numpy() for i in range(pool.num_rows)]
    gram = [w @ w.T for w in weighted]
    subsets = _subsets(pool.num_keys, k)
    squared = np.empty(len(subsets))
    for start in range(0, len(subsets), _CHUNK):
        chosen = subsets[start : start + _CHUNK]
        member = np.zeros((len(chosen), pool.num_keys))
        np.put_along_axis(member, chosen.astype(np.intp), 1.0, axis=1)
        total = np.zeros(len(chosen))
        for i in range(pool.num_rows):
            moved = np.einsum("sm,sm->s", member @ gram[i], member)
            left = np.maximum(1 - member @ p[i], np.finfo(float).tiny)
            total += moved.clip(min=0) / left**2
        squared[start : start + _CHUNK] = total
    # The Gram form loses half the digits near 0; the residuals themselves decide among the smallest few.
    finalists = np.argpartition(squared, min(31, len(squared) - 1))[:32]
    shifts = [pool.joint(subsets[i].tolist()) for i in finalists]
    winner = int(np.argmin(shifts))
    return Best(tuple(int(j) for j in subsets[finalists[winner]]), shifts[winner])


@lru_cache(maxsize=32)
def _subsets(n: int, k: int) -> np.ndarray:
    """[C(n, k), k] uint8: every ascending k-subset of n keys."""
    flat = np.fromiter(itertools.chain.from_iterable(itertools.combinations(range(n), k)), dtype=np.uint8)
    return flat.reshape(-1, k)
