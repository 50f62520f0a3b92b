"""Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution (2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from decantkv.base.options import Impl, Need, expect_int
from decantkv.methods.base import Kind, Method
from decantkv.scoring import streams
from decantkv.scoring.scratch import scratch_bytes
from decantkv.scoring.window import AttentionWindow, Rotate

_BLOCK = 512  # positions at once, at least
_COPIES = 4  # of a block's queries are alive while it is turned


@dataclass(frozen=True)
class ExpectedAttention(Method):
    """Keep the tokens to which future queries are expected to attend, times ‖v‖; the prompt's end is not special.

    Mean and covariance of the prompt's queries are taken before RoPE and without the first tokens. Both are rotated by
    the average rotation of the next `future` positions. The score is the expected exponential of a normal distribution.

    Attributes:
        future: number of next positions over which the rotation is averaged; 0 takes the queries after RoPE, for models
            whose rotation cannot be read.
        covariance: include the second-order term.
        v_norm: weigh by ‖v‖.
    """

    name: ClassVar[str] = "expected-attention"
    kind: ClassVar[Kind] = "heuristic"
    source: ClassVar[str] = "arXiv 2510.00636"
    formula: ClassVar[str] = "softmax(μᵀk + kᵀΣk/2)·‖v‖"
    cost: ClassVar[str] = "2·g·d² + g·d"
    presets: ClassVar = {"paper": {}, "shared": {"window": 8, "pool": "max", "kernel_size": 11}}
    by_window: ClassVar[bool] = False

    sinks: int = 4
    future: int = 512
    covariance: bool = True
    v_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_int("ExpectedAttention.future", self.future, at_least=0)

    @property
    def needs(self) -> frozenset[Need]:
        """Every query of the prompt, and the rotation that undoes RoPE."""
        return frozenset({"queries", "rotate"}) if self.future else frozenset({"queries"})

    def score(self, win: AttentionWindow, *, impl: Impl = "auto") -> Tensor:
        """[B, H, N] float32: expected weight, times ‖v‖; 0 at the first tokens, which are always kept."""
        queries = self._expect_need(win, "queries")
        rotate = self._expect_need(win, "rotate") if self.future else None
        mean, covariance = query_statistics(win, queries, rotate, first=self.sinks)
        if rotate is not None:
            turn = average_rotation(win, rotate, self.future).to(mean.dtype)  # [B, D, D], row vectors
            mean, covariance = mean @ turn, turn.mT[:, None] @ covariance @ turn[:, None]
        return streams.expected_mass(
            win, mean, covariance if self.covariance else None, first=self.sinks, v_norm=self.v_norm
        )


def query_statistics(
    win: AttentionWindow, queries: Tensor, rotate: Rotate | None, *, first: int
) -> tuple[Tensor, Tensor]:
    """Mean [B, HQ, D] and covariance [B, HQ, D, D], at least float32, of the real queries behind the first ones.

    Positions count from a row's first real token; with `rotate`, RoPE is undone first.
    """
    lengths = torch.full((win.batch,), win.kv_len, device="cpu") if win.lengths is None else win.lengths.cpu()
    start = (win.kv_len - lengths).to(queries.device)[:, None]
    position = torch.arange(win.kv_len, device=queries.device) - start  # [B, N]; negative at pads
    counted = (position >= first)[:, None, :, None]
    dtype = torch.promote_types(queries.dtype, torch.float32)
    number = counted.sum(2, keepdim=True).clamp_min(1).to(dtype)
    per_position = _COPIES * dtype.itemsize * queries[:, :, :1].numel()
    length = max(_BLOCK, scratch_bytes(queries.device) // per_position)

    def block(low: int) -> Tensor:
        q = queries[:, :, low : low + length].to(dtype)
        return q if rotate is None else rotate(q, -position[:, low : low + length].clamp_min(0))

    blocks = range(0, win.kv_len, length)
    mean = torch.zeros_like(queries[:, :, :1], dtype=dtype)
    for low in blocks:
        mean += (block(low) * counted[:, :, low : low + length]).sum(2, keepdim=True)
    mean = mean / number
    covariance = torch.zeros(*queries.shape[:2], *([queries.shape[3]] * 2), dtype=dtype, device=queries.device)
    for low in blocks:
        centred = (block(low) - mean) * counted[:, :, low : low + length]
        covariance += centred.mT @ centred
    return mean[:, :, 0], covariance / number


def average_rotation(win: AttentionWindow, rotate: Rotate, future: int) -> Tensor:
    """[B, D, D]: the mean over the next `future` positions of the rotation, applied to row vectors from the right."""
    width = win.k.shape[3]
    lengths = torch.full((win.batch,), win.kv_len, device="cpu") if win.lengths is None else win.lengths.cpu()
    basis = torch.eye(width, device=win.k.device)[:, None, None]
    turns = []
    for length in lengths.tolist():
        total = torch.zeros(width, width, device=win.k.device)
        for ahead in torch.arange(length, length + future, device=win.k.device).split(_BLOCK // 4):
            total += rotate(basis.expand(width, 1, len(ahead), width), ahead).sum((1, 2))
        turns.append(total / future)
    return torch.stack(turns)
