"""Quantities of keys and values without window rows, in one stream over tiles of keys, in at least float32.

Each has one implementation, on any device, but for two which a kernel computes on CUDA where it takes the input: the
projected norms, and a prompt's column sums, unless `impl` names another. Otherwise `impl` names who computes a window's
quantities and says nothing of these. Tests hold them against straight-line float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from decantkv import scoring
from decantkv.base.options import Impl
from decantkv.base.versions import kernels_on
from decantkv.scoring.scratch import scratch_bytes
from decantkv.scoring.window import AttentionWindow

QUERY_BLOCK = 64  # prompt positions whose attention is summed at once


def column_mass(win: AttentionWindow, queries: Tensor, *, impl: Impl = "auto") -> Tensor:
    """H2O's Σ_i p_ij over every query i of the prompt, mean over the group, without an N×N matrix.

    Without its kernel, or where the window holds the sums of the first tokens, each block of queries is a window of its
    own over the keys up to its end.

    Args:
        queries: [B, HQ, N, D].
        impl: as for `scoring.compute`.

    Returns:
        [B, H, N] float32.

    Raises:
        ValueError: the model's own mask is not plainly causal, so the other queries' is not known.
    """
    if win.mask is not None:
        raise ValueError("mask: expected plainly causal attention, which all of the prompt's queries share, got a mask")
    known = 0 if win.column_mass is None else win.column_mass.shape[2]  # earlier queries see no later key
    kernel = kernels_on(win.k.device, "mass") if impl in ("auto", "triton") else None
    if kernel is not None and not known and kernel.unsupported(queries, win.k) is None:
        first = None if win.lengths is None else win.kv_len - win.lengths.to(win.k.device)
        mass: Tensor = kernel.column_mass(
            queries, win.k, scale=win.scale, start=first, softcap=win.softcap, sink_logits=win.sink_logits
        )
        return mass
    scores = torch.zeros(win.k.shape[:3], dtype=torch.float32, device=win.k.device)
    if win.column_mass is not None:
        scores[:, :, :known] = win.column_mass
    for start in range(known, win.kv_len, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, win.kv_len)
        lengths = None if win.lengths is None else win.lengths - (win.kv_len - stop)
        q, k, v = queries[:, :, start:stop], win.k[:, :, :stop], win.v[:, :, :stop]
        block = replace(win.bare(), q=q, k=k, v=v, lengths=lengths, row_weights=None, stream_norm=None)
        scores[:, :, :stop] += scoring.compute("attention_mass", block, impl=impl)
    return scores


def projected_norm(win: AttentionWindow, w_o: Tensor) -> Tensor:
    """CriticalKV's mean over the group of ‖W_O v_j‖₁, each query head with its own slice of W_O.

    Args:
        w_o: [HQ, Dv, E].

    Returns:
        [B, H, N] float32.
    """
    kernel = kernels_on(win.v.device, "project")
    if kernel is not None and kernel.unsupported(win.v, w_o) is None:
        normed: Tensor = kernel.projected_norm(win.v, w_o)
        return normed
    norms = torch.zeros(win.k.shape[:3], dtype=torch.float32, device=win.k.device)
    for start, stop in _tiles(win, w_o.shape[2]):
        for head in range(w_o.shape[0]):
            v = _wide(win.v[:, head // win.group_size, start:stop])
            norms[:, head // win.group_size, start:stop] += (v @ w_o[head].to(v.dtype)).abs_().sum(-1)
    return norms / win.group_size


def weighted_cost(win: AttentionWindow, weights: Tensor) -> Tensor:
    """CAOTE's α/(1−α)·‖a − v_j‖ for one distribution α = weights/Σ weights per head, a = Σ α v.

    The largest key's cost is taken as α·‖a₋ⱼ − v_j‖, with a₋ⱼ accumulated without it: no digits are lost as α → 1.

    Args:
        weights: [B, H, N], not negative; pads at 0.

    Returns:
        [B, H, N] float32.
    """
    weights = weights.to(torch.promote_types(win.v.dtype, torch.float32))
    w_top, top = weights.max(-1, keepdim=True)
    others = weights.scatter(-1, top, 0.0)
    rest = others.sum(-1, keepdim=True)
    total = w_top + rest
    a_rest = torch.zeros(*weights.shape[:2], 1, win.v.shape[3], dtype=weights.dtype, device=weights.device)
    for start, stop in _tiles(win, win.v.shape[3]):
        a_rest += others[:, :, None, start:stop] @ _wide(win.v[:, :, start:stop])
    a_rest = a_rest / rest.where(rest > 0, 1.0)[..., None]
    v_top = _wide(win.v.gather(2, top[..., None].expand(-1, -1, -1, win.v.shape[3])))
    share = (w_top / total.where(total > 0, 1.0))[..., None]
    a = share * v_top + (1 - share) * a_rest
    cost = torch.empty_like(weights)
    for start, stop in _tiles(win, win.v.shape[3]):
        part = others[:, :, start:stop]
        distance = torch.linalg.vector_norm(a - _wide(win.v[:, :, start:stop]), dim=-1)
        cost[:, :, start:stop] = part / (total - part).where(total > part, 1.0) * distance
    cost_top = share[..., 0] * torch.linalg.vector_norm(a_rest - v_top, dim=-1)
    return cost.scatter_(-1, top, cost_top).float()


def expected_mass(win: AttentionWindow, mean: Tensor, covariance: Tensor | None, *, first: int, v_norm: bool) -> Tensor:
    """Expected Attention's weight under normal queries: softmax over keys of c·μᵀk + c²/2·kᵀΣk, mean over the group.

    Args:
        mean: μ, [B, HQ, D]; covariance: Σ, [B, HQ, D, D], both in at least float32, or None for the mean alone. c is
            the scale.
        first: the first real keys, which take no part in the softmax and score 0; pads likewise.
        v_norm: multiply by ‖v_j‖.

    Returns:
        [B, H, N] float32.
    """
    grouped = (win.num_kv_heads, win.group_size)
    mu = mean.view(win.batch, *grouped, 1, -1) * win.scale
    sigma = None if covariance is None else covariance.view(win.batch, *grouped, *covariance.shape[2:])

    def logits(start: int, stop: int) -> Tensor:  # [B, H, g, T]
        k = win.k[:, :, None, start:stop].to(mu.dtype)
        s = (mu @ k.mT)[..., 0, :]
        if sigma is not None:
            s = s + ((k @ sigma) * k).sum(-1) * (win.scale**2 / 2)
        position = torch.arange(start, stop, device=k.device)
        lengths = win.kv_len if win.lengths is None else win.lengths.to(k.device)[:, None]
        return s.masked_fill((position < win.kv_len - lengths + first).view(-1, 1, 1, stop - start), -torch.inf)

    width = win.group_size * (2 * win.k.shape[3])
    lse = torch.full((win.batch, *grouped), -torch.inf, device=win.k.device, dtype=mu.dtype)
    for start, stop in _tiles(win, width):
        lse = torch.logaddexp(lse, logits(start, stop).logsumexp(-1))
    scores = torch.empty(win.k.shape[:3], dtype=torch.float32, device=win.k.device)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    for start, stop in _tiles(win, width):
        mass = torch.exp(logits(start, stop) - lse[..., None]).mean(2)
        norm = torch.linalg.vector_norm(_wide(win.v[:, :, start:stop]), dim=-1) if v_norm else 1.0
        scores[:, :, start:stop] = mass * norm
    return scores


def _tiles(win: AttentionWindow, width: int) -> Iterator[tuple[int, int]]:
    """Spans of keys whose [B, H, T, width] float32 scratch, twice, stays within bounds."""
    per_key = 8 * win.batch * win.num_kv_heads * (width + win.k.shape[3] + win.v.shape[3])
    length = max(16, scratch_bytes(win.k.device) // max(1, per_key))
    for start in range(0, win.kv_len, length):
        yield start, min(start + length, win.kv_len)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
