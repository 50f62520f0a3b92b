"""The guarantee, as properties: no instance may break it, and some must come close, or the test could not fail."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decantkv.lab.theory import bounds, oracle
from decantkv.lab.theory.cone import cone
from decantkv.lab.theory.rows import smallest
from decantkv.lab.theory.search import best_subset

from .instances import cancelling, complete, make_pool, one_row_each

SLACK = 1 + 1e-9  # float64 on both sides


@st.composite
def pools(draw, rows=1):
    """Pools of 3 to 9 keys: weights from even to wild, residuals from a needle-thin cone to none at all."""
    gen = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    m, dim = draw(st.integers(3, 9)), draw(st.integers(1, 6))
    k = draw(st.integers(1, m - 1))
    spread = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 30.0]))
    axis = torch.nn.functional.normalize(torch.randn(rows, 1, dim, generator=gen, dtype=torch.float64), dim=-1)
    residual = axis + spread * torch.randn(rows, m, dim, generator=gen, dtype=torch.float64) / math.sqrt(dim)
    if draw(st.booleans()):  # reflect all into the half-space: a wide cone instead of none
        residual = residual * torch.sign((residual * axis).sum(-1, keepdim=True))
    stretch = draw(st.sampled_from([0.0, 1.0, 4.0]))
    residual = residual * torch.exp(stretch * torch.randn(rows, m, 1, generator=gen, dtype=torch.float64))
    if draw(st.booleans()):  # identical costs up to a hair: the proxy cannot tell what cancels
        residual = torch.nn.functional.normalize(residual, dim=-1)
    wild = draw(st.sampled_from([0.0, 1.0, 3.0]))
    p = torch.exp(wild * torch.randn(rows, m, generator=gen, dtype=torch.float64))
    p = p / p.sum(-1, keepdim=True) * draw(st.sampled_from([0.9, 0.3, 1e-2, 1e-6]))
    return make_pool(p, residual), k


def check(pool, k):
    """(realised ratio, bound) of the k cheapest keys, with the bound asserted."""
    chosen = smallest(pool.cost(), k)
    best = best_subset(pool, k)
    shift = pool.joint(chosen)
    assert best.shift <= shift * SLACK
    c = min(cone(pool.residual(i)).c for i in range(pool.num_rows))
    scale = bounds.window_factor(pool.num_rows)
    paper = scale * bounds.bound_factor(c, pool.epsilon, k)
    sharper = scale * bounds.mass_factor(c, pool.epsilon, bounds.largest_mass(pool, k))
    assert sharper <= paper * SLACK
    for factor in (paper, sharper):
        if math.isfinite(factor):
            assert shift <= factor * best.shift * SLACK + 1e-300
    return shift / best.shift if best.shift else 1.0, paper


def test_no_row_breaks_the_bound():
    finite = []

    @settings(max_examples=2500, deadline=None, derandomize=True, database=None)
    @given(pools())
    def run(case):
        ratio, paper = check(*case)
        if math.isfinite(paper):
            finite.append(ratio / paper)

    run()
    assert len(finite) >= 1000, f"both conditions held in only {len(finite)} instances"


def test_no_window_breaks_its_bound():
    finite = []

    @settings(max_examples=800, deadline=None, derandomize=True, database=None)
    @given(st.integers(2, 4).flatmap(lambda rows: pools(rows)))
    def run(case):
        ratio, paper = check(*case)
        if math.isfinite(paper):
            finite.append(ratio / paper)

    run()
    assert len(finite) >= 300, f"both conditions held in only {len(finite)} instances"


@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("epsilon", [1e-2, 1e-4, 1e-7])
@pytest.mark.parametrize("c", [0.5, 0.1, 0.01])
def test_a_cancelling_set_comes_close_to_the_bound(c, epsilon, k):
    pool = cancelling(c, epsilon, k)
    assert cone(pool.residual(0)).c == pytest.approx(c, rel=1e-6)
    ratio, paper = check(pool, k)
    assert ratio >= 0.9 * paper
    # and the sets' shifts are what deletion gives, not only what Lemma 1 says
    judged = oracle.joint_shift(*complete(pool), smallest(pool.cost(), k).tolist(), scale=1.0)
    assert judged.item() == pytest.approx(pool.joint(smallest(pool.cost(), k)), rel=1e-5)


@pytest.mark.parametrize("w", [2, 4, 8])
def test_the_windows_root_is_reached(w):
    ratio, paper = check(one_row_each(w), w)
    assert ratio >= 0.9 * paper
    assert paper == pytest.approx(math.sqrt(w), rel=1e-6)


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(pools())
def test_no_row_breaks_the_relaxed_bound(case):
    pool, k = case
    best = best_subset(pool, k).shift
    shift = pool.joint(smallest(pool.cost(), k))
    found = cone(pool.residual(0))
    axis = torch.zeros(pool.v.shape[1], dtype=torch.float64)
    axis[0] = 1.0
    entries = bounds.scan(pool, k, found)
    for entry in [*entries, *bounds.relaxed(pool, k, axis)]:
        assert shift <= entry.bound(best) * SLACK + 1e-15
    assert best * bounds.certified_ratio(entries, shift) >= shift * (1 - 1e-9)
    if found.holds:
        theorem = bounds.bound_factor(found.c, pool.epsilon, k)
        assert bounds.tightest(entries, best).bound(best) <= theorem * best * (1 + 1e-6) + 1e-15
        assert bounds.certified_ratio(entries, shift) <= theorem * (1 + 1e-6)


def test_relaxed_bound_without_outliers_is_the_theorem():
    pool = cancelling(0.3, 1e-3, 2)
    found = cone(pool.residual(0))
    widest = bounds.relaxed(pool, 2, found.direction)[0]
    assert (widest.outliers, widest.mu, widest.addend) == (0, 0.0, 0.0)
    assert widest.factor == pytest.approx(bounds.bound_factor(found.c, pool.epsilon, 2))


def test_relaxed_bound_reaches_where_no_cone_exists():
    """One light residual points the other way: no cone, yet its µ is small and the bound says something."""
    pool = make_pool([[1e-3] * 5 + [1e-9]], [[[1.0, 0.1 * j] for j in range(5)] + [[-1.0, 0.0]]])
    found = cone(pool.residual(0))
    assert not found.holds
    assert bounds.bound_factor(found.c, pool.epsilon, 3) == math.inf
    best = best_subset(pool, 3).shift
    tight = bounds.tightest(bounds.scan(pool, 3, found), best)
    assert tight.outliers == 1
    assert pool.joint(smallest(pool.cost(), 3)) <= tight.bound(best) < 1.2 * best


def test_apertures_of_a_large_pool_are_spread():
    gen = torch.Generator().manual_seed(0)
    p = torch.rand(1, 3000, generator=gen, dtype=torch.float64) * 1e-5
    pool = make_pool(p, torch.randn(1, 3000, 4, generator=gen, dtype=torch.float64))
    entries = bounds.relaxed(pool, 5, torch.nn.functional.normalize(torch.ones(4).double(), dim=0), apertures=40)
    assert 5 <= len(entries) <= 40
    cosines = [entry.c for entry in entries]
    assert cosines == sorted(cosines)
    assert [entry.mu for entry in entries] == sorted(entry.mu for entry in entries)


def test_the_factors_in_numbers():
    assert bounds.bound_factor(0.1, 0.01, 10) == pytest.approx(1 / (0.1 * 0.99 * 0.9))
    assert bounds.bound_factor(0.0, 0.01, 1) == math.inf
    assert bounds.bound_factor(0.5, 0.1, 10) == math.inf
    assert bounds.mass_factor(0.5, 0.1, 0.25) == pytest.approx(1 / (0.5 * 0.9 * 0.75))
    assert bounds.window_factor(8) == pytest.approx(2.8284, abs=1e-4)
