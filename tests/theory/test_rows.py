"""Shortcuts over many keys say what the plain formulas say."""

import pytest
import torch

from decantkv.lab.theory.bounds import relaxed
from decantkv.lab.theory.cone import cone
from decantkv.lab.theory.rows import Residuals, Rows, smallest
from decantkv.lab.theory.search import best_subset

from .instances import make_pool


def plain(values, k):
    return torch.tensor(sorted(range(len(values)), key=lambda j: (float(values[j]), j))[:k], dtype=torch.int64)


@pytest.mark.parametrize("k", [0, 1, 7, 24, 25, 60, 100])
@pytest.mark.parametrize("levels", [1, 3, 1000])
def test_the_smallest_in_order_earlier_first_among_equals(k, levels):
    values = torch.randint(levels, (100,), generator=torch.Generator().manual_seed(k)).double()
    assert torch.equal(smallest(values, k), plain(values, k))


def test_residuals_unstored_equal_those_written_out():
    gen = torch.Generator().manual_seed(3)
    a, v = torch.randn(2, 16, dtype=torch.float64, generator=gen), torch.randn(50, 16, generator=gen).double()
    v[7] = a[1]  # a residual of 0
    p = torch.rand(2, 50, dtype=torch.float64, generator=gen) / 50
    direction = torch.nn.functional.normalize(torch.randn(16, dtype=torch.float64, generator=gen), dim=0)
    for i, found in enumerate(Rows(p, a, v, torch.arange(50)).residuals):
        r = a[i] - v
        unit = torch.nn.functional.normalize(r, dim=-1)  # leaves 0 as it is
        cosine = torch.where(r.norm(dim=-1) > 0, unit @ direction, 1.0)
        assert (found.zero is None) == (i == 0)
        torch.testing.assert_close(found.cosine(direction), cosine, rtol=0, atol=1e-14)
        torch.testing.assert_close(found.mean_unit, unit.mean(0), rtol=0, atol=1e-14)
        torch.testing.assert_close(found.weighted(p[i]), p[i] @ r, rtol=0, atol=1e-14)
        torch.testing.assert_close(found.units(torch.tensor([3, 9])), unit[[3, 9]], rtol=0, atol=1e-14)
        assert cone(found).c == pytest.approx(cone(Residuals.of(r)).c, abs=1e-12)


@pytest.mark.parametrize("k", [1, 4, 30])
def test_the_outliers_weight_is_that_of_the_k_heaviest(k):
    gen = torch.Generator().manual_seed(k)
    residual = torch.randn(1, 300, 4, dtype=torch.float64, generator=gen) + torch.tensor([1.5, 0, 0, 0])
    pool = make_pool(torch.rand(1, 300, generator=gen).double() / 300, residual)
    direction = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64)
    r = pool.residual(0)
    length = r.norm(dim=-1)
    cosine = r[:, 0] / length
    entries = relaxed(pool, k, direction)
    assert len(entries) > 20
    for entry in entries:
        outside = cosine.argsort()[: entry.outliers]
        heaviest = (pool.p[0] * length)[outside].sort(descending=True).values[:k]
        assert entry.mu == pytest.approx(float(heaviest.sum()), rel=1e-12)
        assert entry.c == pytest.approx(float(cosine.sort().values[entry.outliers]), abs=1e-12)


@pytest.mark.parametrize("rows", [1, 3])
def test_weights_whose_squares_are_nothing_are_weighed_all_the_same(rows):
    """Shifts of tiny weights are proportional to them, so is everything that is chosen by them."""
    gen = torch.Generator().manual_seed(rows)
    residual = torch.randn(rows, 10, 4, dtype=torch.float64, generator=gen)
    p = torch.rand(rows, 10, dtype=torch.float64, generator=gen) * 1e-12
    plain, tiny = make_pool(p, residual), make_pool(p * 1e-170, residual)
    torch.testing.assert_close(tiny.cost() * 1e170, plain.cost(), rtol=1e-9, atol=0)
    assert tiny.joint([2, 5]) * 1e170 == pytest.approx(plain.joint([2, 5]), rel=1e-9)
    for k in (2, 5):
        assert best_subset(tiny, k).subset == best_subset(plain, k).subset
