"""Rows made to order: weights and residuals of a pool, and the key outside it that makes them a softmax's."""

import math

import torch

from decantkv.lab.theory.rows import Rows, length


def make_pool(p, residual, seed=0):
    """A pool of R rows from weights [R, M] and residuals [R, M, Dv].

    Rows share their values, so residuals of several rows can only differ by a vector per row; for the theory alone
    they may differ freely, and `FreeRows` lets them.
    """
    p = torch.as_tensor(p, dtype=torch.float64).reshape(-1, len(residual[0]))
    residual = torch.as_tensor(residual, dtype=torch.float64).reshape(*p.shape, -1)
    a = torch.randn(len(p), residual.shape[-1], dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if len(p) == 1:
        return Rows(p, a, a[0] - residual[0], torch.arange(p.shape[1]))
    return FreeRows(p, a, residual, torch.arange(p.shape[1]))


class FreeRows(Rows):
    """Rows with residuals [R, M, Dv] in place of values: every row has its own, as Proposition 1 allows."""

    def residual(self, row):
        return self.v[row]

    def distance(self):
        return self.v.norm(dim=-1)

    def shift(self, subset):
        index = torch.as_tensor(subset)
        p = self.p[:, index]
        return length(torch.einsum("rs,rsd->rd", p, self.v[:, index]), dim=-1) / (1 - p.sum(-1))


def complete(pool):
    """q, k, v of one real attention row whose pool this is: one key more carries the remaining weight."""
    p, rest = pool.p[0], 1 - pool.p[0].sum()
    last = (pool.a[0] - p @ pool.v) / rest
    k = torch.cat([p, rest[None]]).log()[None, None, :, None]
    return torch.ones(1, 1, 1, 1, dtype=torch.float64), k, torch.cat([pool.v, last[None]])[None, None]


def cancelling(c, epsilon, k):
    """The proof's inequalities made equalities: k parallel residuals, and k others that all but cancel.

    The second k lie on the cone's rim, half on either side, and weigh a hair more each, so the proxy takes the first.
    """
    rim = [[c, math.sqrt(1 - c * c)], [c, -math.sqrt(1 - c * c)]] * (k // 2)
    parallel = [[0.999999, 0.0]] * k
    return make_pool([[epsilon] * (2 * k)], [parallel + rim])


def one_row_each(w, epsilon=1e-9):
    """√w made an equality: w keys that all cost row 0, or w keys that cost one row each. All residuals point along u.

    A key weighs next to nothing in the rows that it does not cost.
    """
    p = torch.full((w, 2 * w), epsilon * 1e-9)
    p[0, :w] = epsilon * 0.999999
    for i in range(w):
        p[i, w + i] = epsilon
    return make_pool(p, torch.tensor([1.0, 0.0]).expand(w, 2 * w, 2))
