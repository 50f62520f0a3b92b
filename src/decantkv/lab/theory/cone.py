"""The cone constant c* of a set of residuals, with a certificate of how far off it may be.

c* = max over unit u of min_j cos(r_j, u) = the norm of the shortest point in the convex hull of the r_j/‖r_j‖, and 0
where that hull holds the origin. Any point of the hull bounds c* from above by its norm; any direction bounds it from
below by its smallest cosine. The two meet at the solution, so their difference is the certificate's gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from decantkv.lab.theory.rows import Residuals

ORIGIN = 1e-9  # a hull point shorter than this is the origin: unit vectors in float64 are good to 1e-16


@dataclass(frozen=True)
class Cone:
    """Attributes:
    c: the certified constant: every residual's cosine with `direction` is at least c. At most 0: no cone.
    upper: no direction does better than this.
    direction: [Dv] float64 unit vector u, or None if the hull holds the origin.
    rounds: how many working sets were solved.
    """

    c: float
    upper: float
    direction: Tensor | None
    rounds: int

    @property
    def gap(self) -> float:
        """upper − c: c* lies in between. Where there is no cone, how far the hull point is from the origin."""
        return self.upper - max(self.c, 0.0)

    @property
    def holds(self) -> bool:
        """Whether a cone is certain: c > 0 (Assumption 2)."""
        return self.c > 0


def cone(residuals: Tensor | Residuals, *, tol: float = 1e-7, max_rounds: int = 200) -> Cone:
    """Solve for c* over a pool of any size.

    The shortest hull point of a working set of residuals is a non-negative least-squares problem (scipy's active-set
    solver); the residuals that cut deepest below it join the set until none cuts by more than `tol`. A working set's
    hull lies inside the pool's, so its shortest point is an upper bound at every round, and once it reaches the
    origin the answer is 0 whatever the other residuals are.

    Args:
        residuals: of one row, or any [M, Dv] float64. Zero residuals fit every cone and are left out.
        tol: the gap to stop at.
        max_rounds: rounds after which the bounds so far are returned, gap and all.

    Raises:
        ValueError: not a matrix of finite numbers.
    """
    if isinstance(residuals, Tensor):
        if residuals.dim() != 2:
            raise ValueError(f"residuals: expected a finite [keys, head_dim] matrix, got {list(residuals.shape)}")
        residuals = Residuals.of(residuals)
    if not bool(torch.isfinite(residuals.distance).all()):
        raise ValueError(f"residuals: expected a finite [keys, head_dim] matrix, got {list(residuals.v.shape)}")
    pointing = len(residuals.distance) - (0 if residuals.zero is None else int(residuals.zero.sum()))
    if not pointing:
        return Cone(1.0, 1.0, None, 0)
    batch = min(2 * residuals.v.shape[1] + 2, pointing)
    working = _lowest(residuals, residuals.mean_unit, batch)
    best = Cone(-1.0, 1.0, None, 0)
    for rounds in range(1, max_rounds + 1):
        x, used = _shortest(residuals.units(working).cpu().numpy())
        upper = min(float(np.linalg.norm(x)), best.upper)
        if upper <= ORIGIN:
            return Cone(0.0, upper, None, rounds)
        direction = torch.from_numpy(x / np.linalg.norm(x)).to(residuals.v.device)
        cut = _lowest(residuals, direction, batch)
        c = float((residuals.units(cut) @ direction).min())
        best = Cone(c, upper, direction, rounds) if c > best.c else Cone(best.c, upper, best.direction, rounds)
        if best.upper - best.c <= tol:
            break
        carrying = working[torch.from_numpy(used).to(working.device)]
        grown = torch.unique(torch.cat([carrying, cut]))
        if len(grown) == len(working) and bool((grown == working.sort().values).all()):
            break  # the solver's own precision is reached
        working = grown
    return best


def _lowest(residuals: Residuals, direction: Tensor, m: int) -> Tensor:
    """[m] the keys whose residuals, 0 aside, have the smallest cosines with a direction."""
    cosine = residuals.cosine(direction)
    if residuals.zero is not None:
        cosine = cosine.masked_fill(residuals.zero, torch.inf)
    return cosine.topk(m, largest=False).indices


def _shortest(unit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[Dv] shortest point in the hull of the rows of `unit` [m, Dv], and which rows carry it [m] bool.

    Minimise ‖Uᵀμ‖² + (1ᵀμ − 1)² over μ ≥ 0. With μ = tλ, Σλ = 1, this is t²‖Uᵀλ‖² + (t − 1)²: whatever t is, the
    best λ is the shortest hull point's.
    """
    system = np.vstack([unit.T, np.ones(len(unit))])
    target = np.zeros(len(system))
    target[-1] = 1.0
    weights, _ = nnls(system, target, maxiter=50 * len(unit) + 1000)
    return (weights @ unit) / weights.sum(), weights > 0
