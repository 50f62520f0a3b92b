"""The best set is NP-hard to find: Balanced Partition, written as an eviction (§C.1).

Balanced Partition asks whether n numbers (n even) split into two halves of n/2 numbers each with equal sums. It is
NP-complete. Give every number one key of weight ε with the one-dimensional residual r_j = x_j − mean(x). The residuals
sum to 0, so one more key with the remaining weight 1 − nε and residual 0 makes them consistent: the output is the
weighted sum of the values. Dropping k = n/2 of the n keys then moves the output by ε·|Σ_S x_j − ½Σx| / (1 − kε), which
is 0 exactly for a balanced half. Finding the best k keys therefore answers Balanced Partition, however small ε is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from decantkv.lab.theory.rows import Rows


@dataclass(frozen=True)
class EvictionInstance:
    """One row with one-dimensional values, in exact numbers. The last key is the remainder, outside the pool.

    Attributes:
        p: weights of the n + 1 keys, summing to 1.
        v: their values.
        k: how many of the first n keys have to go.
    """

    p: tuple[Fraction, ...]
    v: tuple[Fraction, ...]
    k: int

    @property
    def output(self) -> Fraction:
        """a = Σ p v."""
        return sum((p * v for p, v in zip(self.p, self.v, strict=True)), Fraction(0))

    def output_without(self, subset: Sequence[int]) -> Fraction:
        """The output over the keys that are left, renormalised: deletion itself, not Lemma 1."""
        left = [j for j in range(len(self.p)) if j not in set(subset)]
        mass = sum((self.p[j] for j in left), Fraction(0))
        return sum((self.p[j] * self.v[j] for j in left), Fraction(0)) / mass

    def pool(self) -> Rows:
        """The n candidate keys in float64, as the other tools take them."""
        n = len(self.p) - 1
        p = torch.tensor([[float(x) for x in self.p[:n]]], dtype=torch.float64)
        v = torch.tensor([[float(x)] for x in self.v[:n]], dtype=torch.float64)
        return Rows(p, torch.tensor([[float(self.output)]], dtype=torch.float64), v, torch.arange(n))


def balanced_partition(numbers: Sequence[int], weight: Fraction) -> EvictionInstance:
    """The eviction instance whose best k = n/2 keys move the output by 0 iff `numbers` have a balanced half.

    Args:
        numbers: an even number of integers.
        weight: ε, the weight of every candidate, 0 < ε < 1/n; as small as one likes.

    Raises:
        ValueError: an odd number of integers, or a weight outside (0, 1/n).
    """
    n = len(numbers)
    if n == 0 or n % 2:
        raise ValueError(f"numbers: expected an even number of integers, got {n}")
    if not 0 < weight < Fraction(1, n):
        raise ValueError(f"weight: expected between 0 and 1/{n}, got {weight}")
    mean = Fraction(sum(numbers), n)
    values = tuple(mean - x for x in numbers)  # a = 0, so v_j = −r_j
    return EvictionInstance((*(weight,) * n, 1 - n * weight), (*values, Fraction(0)), n // 2)
