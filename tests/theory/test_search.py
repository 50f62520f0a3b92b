"""The search and the rows against deletion; the example worked by hand; the reduction that says why search is hard."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decantkv.lab.theory import oracle
from decantkv.lab.theory.cone import cone
from decantkv.lab.theory.hardness import balanced_partition
from decantkv.lab.theory.rows import Rows, rows_of, smallest
from decantkv.lab.theory.search import best_subset, best_subsets, squared_shifts
from decantkv.scoring import reference
from decantkv.scoring.window import make_window

from .test_oracle import worked_example


def test_the_worked_example():
    q, k, v = worked_example()
    rows = rows_of(make_window(q, k.float(), v, scale=1.0), 0, 0)
    assert [round(s, 2) for s in rows.singleton()[0].tolist()] == [1.50, 0.64, 1.50, 0.08]
    by_weight, by_score = smallest(rows.p[0], 2), smallest(rows.cost(), 2)
    assert sorted(by_weight.tolist()) == [2, 3]
    assert sorted(by_score.tolist()) == [1, 3]
    assert round(rows.joint(by_weight), 2) == 1.50
    assert round(rows.joint(by_score), 2) == 0.81
    assert best_subset(rows, 2).subset == (1, 3)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}, {"pads": True}])
def test_rows_shift_as_deletion_does(options):
    gen = torch.Generator().manual_seed(5)
    q = torch.randn(2, 6, 3, 4, generator=gen)
    k, v = torch.randn(2, 2, 2, 12, 4, generator=gen)
    kwargs = {
        "scale": 0.6,
        "softcap": options.get("softcap"),
        "sink_logits": torch.randn(6, generator=gen) if "sinks" in options else None,
        "lengths": torch.tensor([12, 9]) if "pads" in options else None,
    }
    win = make_window(q, k, v, **kwargs)
    for batch, head in itertools.product(range(2), range(2)):
        rows = rows_of(win, batch, head)
        for subset in ([4], [3, 5, 8], [4, 5, 6, 7, 8]):
            expected = oracle.joint_shift(q, k, v, subset, **kwargs)[batch, 3 * head : 3 * head + 3].flatten()
            assert torch.allclose(rows.shift(subset), expected, rtol=1e-10, atol=1e-13)
        score = reference.perturbation(make_window(q.double(), k.double(), v.double(), **kwargs))
        assert torch.allclose(rows.cost().square() / 3, score[batch, head], rtol=1e-10)


def random_rows(num_rows, m, seed):
    gen = torch.Generator().manual_seed(seed)
    p = torch.rand(num_rows, m, generator=gen, dtype=torch.float64)
    p = 0.8 * p / p.sum(-1, keepdim=True)
    a = torch.randn(num_rows, 3, generator=gen, dtype=torch.float64)
    return Rows(p, a, torch.randn(m, 3, generator=gen, dtype=torch.float64), torch.arange(m))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("m", "k"), [(5, 1), (7, 3), (9, 8), (6, 6)])
def test_best_subset_is_the_best(num_rows, m, k):
    rows = random_rows(num_rows, m, seed=m + k)
    shifts = {s: rows.joint(s) for s in itertools.combinations(range(m), k)}
    best = best_subset(rows, k)
    assert best.shift == pytest.approx(min(shifts.values()))
    assert shifts[best.subset] == best.shift


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("m", [1, 2, 7])
def test_every_sets_shift_is_its_own(num_rows, m):
    rows = random_rows(num_rows, m, seed=m)
    table = squared_shifts(rows)
    assert len(table) == 2**m
    for bits in range(2**m):
        assert table[bits].sqrt().item() == pytest.approx(rows.joint([j for j in range(m) if bits >> j & 1]))


def test_a_pool_of_twenty():
    """As large as `verify` searches: C(20, 8) sets, checked against the plain loop at k = 3."""
    rows = random_rows(2, 20, seed=1)
    found = best_subsets(rows, (3, 8))
    shifts = {s: rows.joint(s) for s in itertools.combinations(range(20), 3)}
    assert found[3].subset == min(shifts, key=shifts.get)
    assert len(found[8].subset) == 8
    for out, new in itertools.product(found[8].subset, set(range(20)) - set(found[8].subset)):
        assert rows.joint(sorted({*found[8].subset, new} - {out})) >= found[8].shift  # no swap helps


def test_the_cap_is_kept():
    rows = random_rows(1, 20, seed=0)
    with pytest.raises(ValueError, match="expected at most 19 keys"):
        best_subset(rows, 8, cap=19)
    with pytest.raises(ValueError, match="k: expected 1 to 20"):
        best_subset(rows, 21)


def test_a_row_without_other_keys_moves_by_its_output():
    rows = Rows(
        torch.ones(1, 1).double(), torch.tensor([[3.0, 4.0]]).double(), torch.zeros(1, 2).double(), torch.arange(1)
    )
    assert rows.singleton().item() == 5.0
    assert rows.joint([0]) == 5.0


def has_balanced_half(numbers):
    half = len(numbers) // 2
    return any(2 * sum(s) == sum(numbers) for s in itertools.combinations(numbers, half))


def best_move(instance):
    """The smallest exact move over all k-subsets of the candidates, by deletion in fractions."""
    subsets = itertools.combinations(range(len(instance.p) - 1), instance.k)
    return min(abs(instance.output_without(s) - instance.output) for s in subsets)


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(-30, 30), min_size=2, max_size=8).filter(lambda x: len(x) % 2 == 0),
    st.sampled_from([Fraction(1, 9), Fraction(1, 10**6), Fraction(1, 10**40)]),
)
def test_optimum_is_zero_exactly_for_a_balanced_half(numbers, weight):
    instance = balanced_partition(numbers, weight)
    assert sum(instance.p) == 1
    assert instance.output == 0
    assert (best_move(instance) == 0) == has_balanced_half(numbers)


@pytest.mark.parametrize("weight", [Fraction(1, 100), Fraction(1, 10**30)])
def test_both_answers_occur_and_float_search_finds_them(weight):
    yes, no = balanced_partition([5, 8, 3, 6, 2, 4], weight), balanced_partition([5, 8, 3, 6, 2, 5], weight)
    assert (best_move(yes), best_move(no) > 0) == (0, True)
    found = best_subset(yes.pool(), yes.k)
    assert abs(yes.output_without(found.subset)) == 0
    assert best_subset(no.pool(), no.k).shift == pytest.approx(float(best_move(no)))


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.lists(st.integers(-30, 30), min_size=2, max_size=4, unique=True))
def test_reduction_lies_outside_the_guarantee(half):
    """Residuals that can cancel to 0 span no cone, or else Theorem 1 would solve an NP-complete problem."""
    numbers = half + half
    assert has_balanced_half(numbers)
    assert not cone(balanced_partition(numbers, Fraction(1, 1000)).pool().residual(0)).holds


@pytest.mark.parametrize(
    ("numbers", "weight"), [([1, 2, 3], Fraction(1, 9)), ([1, 2], Fraction(1, 2)), ([], Fraction(1, 9))]
)
def test_refuses_what_is_no_instance(numbers, weight):
    with pytest.raises(ValueError, match=r"numbers|weight"):
        balanced_partition(numbers, weight)


def test_weights_can_be_as_small_as_one_likes():
    assert math.log10(balanced_partition([1, 2], Fraction(1, 10**300)).p[0]) == pytest.approx(-300)
