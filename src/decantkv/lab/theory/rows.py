"""Rows of one KV head over some keys, in float64: weights, outputs, values, and what removing keys does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from decantkv.scoring import reference
from decantkv.scoring.window import AttentionWindow


@dataclass(frozen=True)
class Residuals:
    """r_j = a − v_j of one row, not stored: over 100,000 keys each copy costs more than what is computed from it.

    Attributes:
        a: [Dv] float64.
        v: [M, Dv] float64.
        distance: [M] float64, ‖r_j‖.
    """

    a: Tensor
    v: Tensor
    distance: Tensor

    @classmethod
    def of(cls, residuals: Tensor) -> Residuals:
        """From residuals [M, Dv] as they are."""
        return cls(residuals.new_zeros(residuals.shape[1]), -residuals, torch.linalg.vector_norm(residuals, dim=-1))

    @cached_property
    def inverse(self) -> Tensor:
        """[M]: 1/‖r_j‖; 0 for a residual of 0."""
        return torch.where(self.distance > 0, 1 / self.distance, 0.0)

    @cached_property
    def zero(self) -> Tensor | None:
        """[M] bool, which residuals are 0, or None if none is."""
        zero = self.distance == 0
        return zero if bool(zero.any()) else None

    @cached_property
    def mean_unit(self) -> Tensor:
        """[Dv]: the sum of all r_j/‖r_j‖ over M."""
        return (self.inverse.sum() * self.a - self.inverse @ self.v) / len(self.distance)

    def weighted(self, p: Tensor) -> Tensor:
        """[Dv]: Σ p_j r_j for weights [M]."""
        return p.sum() * self.a - p @ self.v

    def units(self, index: Tensor) -> Tensor:
        """[m, Dv]: r_j/‖r_j‖ of m keys."""
        return (self.a - self.v[index]) * self.inverse[index, None]

    def cosine(self, direction: Tensor) -> Tensor:
        """[M]: cos(r_j, u) for a unit vector u [Dv]; 1 for a residual of 0, which fits every cone.

        Good to 1e-16 · ‖a‖/‖r_j‖: where that matters, `units` gives the few cosines that do.
        """
        cosine = (self.a @ direction - self.v @ direction) * self.inverse
        return cosine if self.zero is None else cosine.masked_fill(self.zero, 1.0)


@dataclass(frozen=True)
class Rows:
    """R rows that share the values of M keys. A pool is the same thing with fewer keys.

    Attributes:
        p: [R, M] float64 softmax weights; they sum to less than 1 where some keys are left out.
        a: [R, Dv] float64 outputs of the rows over *all* their keys.
        v: [M, Dv] float64 values.
        key: [M] int64, where each key stands in the prompt.
    """

    p: Tensor
    a: Tensor
    v: Tensor
    key: Tensor

    @property
    def num_rows(self) -> int:
        """R."""
        return self.p.shape[0]

    @property
    def num_keys(self) -> int:
        """M."""
        return self.p.shape[1]

    @property
    def epsilon(self) -> float:
        """ε, the largest weight in the pool over all rows (Assumption 1)."""
        return float(self.p.max())

    def residual(self, row: int) -> Tensor:
        """[M, Dv]: r_j = a − v_j of one row."""
        return self.a[row] - self.v

    def distance(self) -> Tensor:
        """[R, M]: ‖r_j‖ of every row."""
        return self._distance

    @cached_property
    def _distance(self) -> Tensor:
        return torch.cdist(self.a, self.v, compute_mode="donot_use_mm_for_euclid_dist")

    @cached_property
    def residuals(self) -> tuple[Residuals, ...]:
        """Every row's residuals, for passes over many keys."""
        return tuple(Residuals(a, self.v, d) for a, d in zip(self.a, self.distance(), strict=True))

    def singleton(self) -> Tensor:
        """[R, M]: how far losing key j alone moves row i, p/(1 − p) · ‖a − v_j‖ (Lemma 1)."""
        left = 1 - self.p
        alone = torch.linalg.vector_norm(self.a, dim=-1, keepdim=True)  # a row's only key takes its output along
        return torch.where(left > 0, self.p * self.distance() / left.where(left > 0, 1.0), alone)

    def cost(self) -> Tensor:
        """[M]: √Σ_i (singleton of row i)², the root of the window's score without its mean over the group (§3.3)."""
        return length(self.singleton(), dim=0)

    def shift(self, subset: Tensor | Sequence[int]) -> Tensor:
        """[R]: ‖Σ_S p_j r_j‖ / (1 − Σ_S p_j), the exact move of each row when the whole set goes (Lemma 1).

        Args:
            subset: indices into the M keys. A row left without any weight has output 0.
        """
        index = torch.as_tensor(subset, dtype=torch.int64, device=self.p.device)
        p = self.p[:, index]
        mass = p.sum(-1, keepdim=True)
        moved = mass * self.a - p @ self.v[index]
        left = 1 - mass
        moved = torch.where(left > 0, moved / left.where(left > 0, 1.0), self.a)
        return length(moved, dim=-1)

    def joint(self, subset: Tensor | Sequence[int]) -> float:
        """F(S) = √Σ_i ‖Δ_i(S)‖², the window's joint shift; for one row simply ‖Δ(S)‖."""
        return float(length(self.shift(subset), dim=-1))

    def take(self, keys: Tensor | Sequence[int]) -> Rows:
        """The same rows over some of the keys, given as indices into the M."""
        index = torch.as_tensor(keys, dtype=torch.int64, device=self.p.device)
        return replace(self, p=self.p[:, index], v=self.v[index], key=self.key[index])

    def row(self, i: int) -> Rows:
        """Row i alone."""
        return replace(self, p=self.p[i : i + 1], a=self.a[i : i + 1])


def length(x: Tensor, *, dim: int) -> Tensor:
    """‖x‖ along a dimension, right for numbers whose squares are not: weights of 1e-170 do occur at 128K tokens."""
    unit = x.abs().amax(dim, keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(x / unit.where(unit > 0, 1.0), dim=dim) * unit.squeeze(dim)
    return norm


def smallest(values: Tensor, k: int) -> Tensor:
    """[k] indices of the k smallest of `values` [M]; among equals the earlier key goes first."""
    if not 0 < 4 * k < len(values):
        return torch.argsort(values, stable=True)[:k]
    near = torch.nonzero(values <= values.kthvalue(k).values).flatten()
    return near[torch.argsort(values[near], stable=True)[:k]]


def rows_of(win: AttentionWindow, batch: int, kv_head: int) -> Rows:
    """All g·w rows of a KV head over all N keys, query head by query head.

    Returns:
        Rows with R = g·w; row i belongs to query head i // w of the group and to window position i % w.
    """
    group = slice(kv_head * win.group_size, (kv_head + 1) * win.group_size)
    one = replace(
        win,
        q=win.q[batch : batch + 1, group].double(),
        k=win.k[batch : batch + 1, kv_head : kv_head + 1].double(),
        v=win.v[batch : batch + 1, kv_head : kv_head + 1].double(),
        lengths=None if win.lengths is None else win.lengths[batch : batch + 1],
        sink_logits=None if win.sink_logits is None else win.sink_logits[group].double(),
        mask=win.mask if win.mask is None or win.mask.shape[0] == 1 else win.mask[batch : batch + 1],
        out=None,
        lse=None,
    )
    weights = reference.softmax(one)
    key = torch.arange(win.kv_len, device=win.k.device)
    return Rows(weights.p[0, 0].flatten(0, 1), weights.a[0, 0].flatten(0, 1), one.v[0, 0], key)
