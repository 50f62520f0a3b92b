"""Compactor: Calibrated Query-Agnostic KV Cache Compression with Approximate Leverage Scores (arXiv 2507.08143)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from decantkv import scoring
from decantkv.base.options import Impl, Need, expect_fraction, expect_int
from decantkv.methods.base import Kind, Method
from decantkv.scoring.window import AttentionWindow
from decantkv.selection.selector import pool_scores

_RIDGE = 1e-2  # on the sketch's Gram matrix, as kvpress has it: fewer tokens than columns have a score too


@dataclass(frozen=True)
class Compactor(Method):
    """Keep the tokens whose keys stand out and those that their neighbours attend to; asks no question of the prompt.

    Leverage l_i = x_iᵀ(XᵀX)⁻¹x_i of the keys before RoPE, centred and sketched; attention without a causal mask inside
    chunks, summed over queries, times ‖v‖, averaged over 3 neighbours. Both become z-scores over the layer's heads
    and tokens. The rank is share removed × leverage + attention. The first and last tokens take part in neither.

    Attributes:
        sketch: columns of the Gaussian sketch. chunk: tokens that attend to each other.
        blending: the leverage's factor; None: the share of tokens that is removed.
        seed: of the sketch, which is drawn apart from torch's own random numbers.
    """

    name: ClassVar[str] = "compactor"
    kind: ClassVar[Kind] = "heuristic"
    source: ClassVar[str] = "arXiv 2507.08143"
    formula: ClassVar[str] = "removed·z(xᵀ(XᵀX)⁻¹x) + z(Σ_i p·‖v‖ in chunks)"
    cost: ClassVar[str] = "g·256·d + d·48 + 48²"
    presets: ClassVar = {"paper": {}, "shared": {"window": 8, "pool": "max", "kernel_size": 11}}
    allocation: ClassVar[str] = "heads"
    by_window: ClassVar[bool] = False

    window: int = 4
    sinks: int = 8
    sketch: int = 48
    chunk: int = 256
    blending: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_int("Compactor.sketch", self.sketch, at_least=1)
        expect_int("Compactor.chunk", self.chunk, at_least=1)
        expect_int("Compactor.seed", self.seed, at_least=0)
        if self.blending is not None:
            expect_fraction("Compactor.blending", self.blending)

    @property
    def needs(self) -> frozenset[Need]:
        """Every query of the prompt, and the rotation that undoes RoPE."""
        return frozenset({"queries", "rotate"})

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32, as if everything were removed; 0 at the tokens that take no part."""
        return self.base_score(win, impl=impl) + (1.0 if self.blending is None else self.blending) * self.leverage(win)

    def base_score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: the attention's part."""
        queries = self._expect_need(win, "queries")
        scores = torch.zeros(win.k.shape[:3], dtype=torch.float32, device=win.k.device)
        for row, (start, stop) in enumerate(self._inner(win)):
            for low in range(start, stop, self.chunk):
                here = slice(low, min(low + self.chunk, stop))
                scores[row, :, here] = self._chunk_mass(win, queries, row, here, impl)[0]
            norm = torch.linalg.vector_norm(win.v[row, :, start:stop].float(), dim=-1)
            inner = (scores[row, :, start:stop] * norm)[None]
            scores[row, :, start:stop] = _standard(pool_scores(inner, pool="avg", kernel_size=3))[0]
        return scores

    def rank(self, pooled: Tensor, win: AttentionWindow, n_keep: Sequence[int]) -> Tensor:
        """The attention's part and as much of the leverage's as the share that is removed."""
        leverage = self.leverage(win)
        leverage = leverage if pooled.shape[1] == leverage.shape[1] else leverage.mean(1, keepdim=True)
        lengths = [win.kv_len] * win.batch if win.lengths is None else win.lengths.tolist()
        removed = [1 - n / length if self.blending is None else self.blending
                   for n, length in zip(n_keep, lengths, strict=True)]  # fmt: skip
        return pooled + torch.tensor(removed, device=pooled.device)[:, None, None] * leverage

    def leverage(self, win: AttentionWindow) -> Tensor:
        """[B, H, N] float32: the z-scores of the keys' leverage; 0 at the tokens that take no part."""
        rotate = self._expect_need(win, "rotate")
        (heads, dim), device = win.k.shape[1::2], win.k.device
        drawn = torch.Generator().manual_seed(self.seed * 1009 + win.layer_idx)
        sketch = torch.randn(heads, dim, self.sketch, generator=drawn).to(device) / self.sketch**0.5
        scores = torch.zeros(win.k.shape[:3], dtype=torch.float32, device=device)
        lengths = [win.kv_len] * win.batch if win.lengths is None else win.lengths.tolist()
        for row, (start, stop) in enumerate(self._inner(win)):
            if start == stop:
                continue
            at = torch.arange(start, stop, device=device) - (win.kv_len - lengths[row])
            k = rotate(win.k[row : row + 1, :, start:stop].float(), -at)[0]
            x = (k - k.mean(1, keepdim=True)) @ sketch  # [H, n, sketch]
            gram = (x.mT @ x).double() + _RIDGE * torch.eye(self.sketch, device=device, dtype=torch.float64)
            inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram)).float()
            scores[row, :, start:stop] = _standard(((x @ inverse) * x).sum(-1)[None])[0]
        return scores

    def _inner(self, win: AttentionWindow) -> list[tuple[int, int]]:
        """Return where each batch row's tokens are that take part."""
        lengths = [win.kv_len] * win.batch if win.lengths is None else win.lengths.tolist()
        starts = [win.kv_len - length + min(self.sinks, length) for length in lengths]
        return [(start, max(start, win.kv_len - self.window)) for start in starts]

    def _chunk_mass(self, win: AttentionWindow, queries: Tensor, row: int, here: slice, impl: Impl) -> Tensor:
        """[1, H, n] float32: what a chunk's tokens give each other, without a causal mask; mean over the group."""
        q, k, v = (x[row : row + 1, :, here] for x in (queries, win.k, win.v))
        everything = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=k.device)
        chunk = replace(win.bare(), q=q, k=k, v=v, mask=everything, lengths=None, row_weights=None, stream_norm=None)
        return scoring.compute("attention_mass", chunk, impl="torch" if impl == "triton" else impl)


def _standard(scores: Tensor) -> Tensor:
    """Scores [1, H, n] as z-scores over all heads and tokens."""
    if scores.numel() < 2:
        return torch.zeros_like(scores)
    return (scores - scores.mean()) / scores.std().clamp_min(1e-6)
