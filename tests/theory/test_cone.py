"""c* against closed forms, against a general-purpose solver, and its certificate against the definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from decantkv.lab.theory.cone import cone


def gaussian(m, dim, seed, shift=0.0):
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(m, dim, dtype=torch.float64, generator=gen) + shift


@pytest.mark.parametrize("angle", [1e-3, 0.3, 1.0, 1.5])
def test_two_residuals(angle):
    r = torch.tensor([[math.cos(angle), math.sin(angle)], [3 * math.cos(angle), -3 * math.sin(angle)]])
    found = cone(r.double())
    assert found.c == pytest.approx(math.cos(angle), abs=1e-7)
    assert found.gap <= 1e-7
    assert found.direction.tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


def test_orthants_axes():
    for dim in (1, 2, 5, 30):
        assert cone(torch.eye(dim, dtype=torch.float64)).c == pytest.approx(1 / math.sqrt(dim), abs=1e-7)


def test_no_cone():
    assert not cone(torch.tensor([[1.0], [-2.0]], dtype=torch.float64)).holds
    triangle = [[math.cos(t), math.sin(t)] for t in (0.0, 2.1, 4.2)]
    found = cone(torch.tensor(triangle, dtype=torch.float64))
    assert (found.c, found.direction) == (0.0, None)
    assert found.gap < 1e-8
    assert not cone(gaussian(1000, 8, 0)).holds


def test_zero_residuals_fit_every_cone():
    assert cone(torch.zeros(3, 4, dtype=torch.float64)).c == 1.0
    assert cone(torch.tensor([[0.0, 0.0], [2.0, 0.0]], dtype=torch.float64)).c == pytest.approx(1.0)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.integers(2, 40), st.integers(1, 10), st.integers(0, 2**31), st.sampled_from([0.0, 0.3, 1.0, 3.0]))
def test_certificate_is_what_it_says(m, dim, seed, shift):
    r = gaussian(m, dim, seed, shift)
    found = cone(r)
    assert found.gap <= 1e-6
    if found.holds:
        cosine = torch.nn.functional.normalize(r, dim=-1) @ found.direction
        assert float(cosine.min()) == pytest.approx(found.c, abs=1e-12)
        assert float(found.direction.norm()) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(12))
def test_a_general_solver_agrees(seed):
    """SLSQP on the epigraph form: maximise t with ⟨r_j/‖r_j‖, u⟩ ≥ t and ‖u‖ ≤ 1."""
    r = gaussian(15, 4, seed, shift=0.8)
    unit = torch.nn.functional.normalize(r, dim=-1).numpy()
    start = [*(unit.mean(0) / 2), -1.0]
    solved = minimize(
        lambda x: -x[-1],
        start,
        method="SLSQP",
        constraints=[
            {"type": "ineq", "fun": lambda x: unit @ x[:-1] - x[-1]},
            {"type": "ineq", "fun": lambda x: 1 - x[:-1] @ x[:-1]},
        ],
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert solved.success
    assert max(cone(r).c, 0.0) == pytest.approx(max(-solved.fun, 0.0), abs=1e-5)


def test_a_large_pool_needs_only_a_few_working_sets():
    r = gaussian(20_000, 32, 1)
    r[:, 0] = r[:, 0].abs() + 4.0
    found = cone(r)
    assert found.holds
    assert found.gap <= 1e-7
    assert found.rounds <= 20


def test_it_falls_as_the_pool_grows():
    r = gaussian(512, 16, 2, shift=1.0)
    values = [max(cone(r[:m]).c, 0.0) for m in (4, 16, 64, 256, 512)]
    assert values == sorted(values, reverse=True)
    assert values[0] > values[-1]


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.full((2, 2), math.nan)])
def test_refuses_what_is_no_finite_matrix(bad):
    with pytest.raises(ValueError, match="residuals: expected a finite"):
        cone(bad)
