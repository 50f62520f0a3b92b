"""The correctness gate: no speed is printed for kernels that are wrong on the very inputs that are timed."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from decantkv import kernels, scoring
from decantkv.scoring import reference
from decantkv.scoring.window import AttentionWindow
from decantkv.selection.selector import select

EXACT_LIMIT = 2**17  # keys up to which float64 on the whole input fits a card


class RedGateError(RuntimeError):
    """The kernels are wrong here."""


def widened(win: AttentionWindow) -> AttentionWindow:
    """The same rounded inputs in float64, W_O by a factor of W_O·W_Oᵀ that is no wider than a head."""
    return dataclasses.replace(
        win, q=win.q.double(), k=win.k.double(), v=win.v.double(), out=None, lse=None,
        sink_logits=None if win.sink_logits is None else win.sink_logits.double(),
        output_projection=None if win.output_projection is None else factor(win.output_projection.double()),
    )  # fmt: skip


def factor(w_o: Tensor) -> Tensor:
    """L [HQ, Dv, Dv] with L·Lᵀ = W_O·W_Oᵀ: no shift's size behind it is another."""
    values, vectors = torch.linalg.eigh(w_o @ w_o.mT)
    return torch.mul(vectors, values.clamp_min(0).sqrt()[:, None])


class Contract(NamedTuple):
    """Exact scores and their largest allowed errors, [B, H, N] float64 each."""

    expected: Tensor
    allowed: Tensor

    def worst_error(self, scores: Tensor) -> float:
        """The largest error over what is allowed; at most 1 where the contract holds, inf for NaN."""
        if scores.isnan().any():
            return float("inf")
        error = (scores.double() - self.expected).abs()
        floor = torch.finfo(torch.float32).tiny
        ratio = torch.where(self.expected > 2 * floor, error / self.allowed.clamp_min(1e-300), error / (4 * floor))
        return float(ratio.max())


def contract(win: AttentionWindow, *, reduce: str = "sum", weigh: str = "value") -> Contract:
    """Judge by 1 % of s64 + 1e-5 · Σ r²(‖a‖² + ‖v‖²)/g, the latter without each row's largest key.

    Heads go one at a time, so that the float64 work fits beside the benchmark.
    """
    g = win.group_size
    expected = win.k.new_empty((win.batch, win.num_kv_heads, win.kv_len), dtype=torch.float64)
    allowed = torch.empty_like(expected)
    for b in range(win.batch):
        for h in range(win.num_kv_heads):
            one = dataclasses.replace(
                win, q=win.q[b : b + 1, h * g : (h + 1) * g], k=win.k[b : b + 1, h : h + 1],
                v=win.v[b : b + 1, h : h + 1], out=None, lse=None,
                lengths=None if win.lengths is None else win.lengths[b : b + 1],
                sink_logits=None if win.sink_logits is None else win.sink_logits[h * g : (h + 1) * g],
                output_projection=None if weigh == "value" or win.output_projection is None
                else win.output_projection[h * g : (h + 1) * g],
            )  # fmt: skip
            wide = widened(one)
            expected[b, h] = reference.perturbation(wide, reduce=reduce, weigh=weigh)[0, 0]
            rows = reference.softmax(wide)
            a, v = rows.a, wide.v[:, :, None].expand(-1, -1, g, -1, -1)
            if weigh == "output":
                a, v = reference.project(a, wide), reference.project(v, wide)
            size = a.square().sum(-1)[..., None] + v.square().sum(-1)[:, :, :, None]
            sizes = reference.reduce_rows(rows.odds.square() * size, reduce)
            allowed[b, h] = 0.01 * expected[b, h] + 1e-5 * sizes[0, 0]
    return Contract(expected, allowed)


def worst_error(scores: Tensor, win: AttentionWindow, *, reduce: str = "sum") -> float:
    """The largest |s − s64| over what the numerics contract allows."""
    return contract(win, reduce=reduce).worst_error(scores)


def check(win: AttentionWindow, hinted: AttentionWindow, *, n_keep: int) -> dict[str, float | bool]:
    """Judge both modes of the kernels on `win`, and selection against the torch implementation.

    Raises:
        RedGateError: something is off, with what and by how much.
    """
    scores = scoring.compute("perturbation", win, impl="triton")
    again = scoring.compute("perturbation", win, impl="triton")
    one_pass = scoring.compute("perturbation", hinted, impl="triton")
    found: dict[str, float | bool] = {"repeats_bit_identical": torch.equal(scores, again)}
    if win.kv_len <= EXACT_LIMIT:
        found["worst_over_contract"] = worst_error(scores, win)
        found["one_pass_worst_over_contract"] = worst_error(one_pass, hinted)
    else:  # float64 no longer fits: the tiled implementation, itself judged against float64, takes its place
        tiled = scoring.compute("perturbation", win, impl="torch")
        spread = (scores - tiled).abs() / (0.01 * tiled + 1e-5 * float(tiled.mean()))
        found["worst_over_contract"] = float(spread.max())
        spread = (one_pass - tiled).abs() / (0.01 * tiled + 1e-5 * float(tiled.mean()))
        found["one_pass_worst_over_contract"] = float(spread.max())
    kept = kernels.select_topk(scores, n_keep, pool="max", kernel_size=11, window=win.window)
    expected = select(scores, n_keep=n_keep, window=win.window, pool="max", kernel_size=11, impl="torch").indices
    found["kept_equal_torch"] = torch.equal(kept, expected)
    k_kept, _ = kernels.gather_kv(win.k, win.v, kept)
    index = kept[..., None].expand(-1, -1, -1, win.k.shape[3])
    found["gather_equal_torch"] = torch.equal(k_kept, win.k.gather(2, index))
    red = [name for name, value in found.items() if value is False or (value is not True and not value <= 1.0)]
    if red:
        raise RedGateError(f"no speed is reported: {', '.join(f'{name} = {found[name]}' for name in red)}")
    return found
