"""Small attention calls for the methods' tests, and float64 attention, row by row, that shares nothing with scoring."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decantkv.scoring.window import AttentionWindow, make_window


@dataclass(frozen=True)
class Shape:
    batch: int = 2
    heads: int = 2
    group: int = 3
    window: int = 5
    kv_len: int = 37
    head_dim: int = 8
    value_dim: int = 6
    hidden: int = 11
    lengths: tuple[int, ...] | None = None


SHAPES = [
    Shape(),
    Shape(lengths=(37, 21)),
    Shape(group=1, window=1, kv_len=9),
    Shape(group=7, window=8, kv_len=63, lengths=(9, 63)),
]


def example(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float64, sharp: float = 2.0) -> AttentionWindow:
    """A window cut from a whole prompt's queries, with W_O beside it."""
    g = torch.Generator().manual_seed(seed)
    hq = shape.heads * shape.group

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64).to(dtype)

    queries = normal(shape.batch, hq, shape.kv_len, shape.head_dim) * sharp
    return make_window(
        queries[:, :, -shape.window :],
        normal(shape.batch, shape.heads, shape.kv_len, shape.head_dim),
        normal(shape.batch, shape.heads, shape.kv_len, shape.value_dim) + 0.5,
        lengths=None if shape.lengths is None else torch.tensor(shape.lengths),
        queries=queries,
        output_projection=normal(hq, shape.value_dim, shape.hidden),
    )


def rows_of(win: AttentionWindow, b: int, head: int, queries: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
    """For every row of a KV head: its weights over the real keys [n], and its output [Dv], one query at a time."""
    n = win.kv_len if win.lengths is None else int(win.lengths[b])
    k, v = win.k[b, head, -n:].double(), win.v[b, head, -n:].double()
    q_all = win.q if queries is None else queries[:, :, -n:]
    rows = []
    for member in range(win.group_size):
        q = q_all[b, head * win.group_size + member].double()
        for i in range(q.shape[0]):
            seen = n - q.shape[0] + i + 1
            p = torch.zeros(n, dtype=torch.float64)
            if seen > 0:
                e = torch.exp(win.scale * (k[:seen] @ q[i]))
                p[:seen] = e / e.sum()
            rows.append((p, p @ v))
    return rows


def values_of(win: AttentionWindow, b: int, head: int) -> Tensor:
    """[n, Dv] float64: the real values."""
    n = win.kv_len if win.lengths is None else int(win.lengths[b])
    return win.v[b, head, -n:].double()


def real_scores(win: AttentionWindow, scores: Tensor, b: int, head: int) -> Tensor:
    """[n] float64: the real keys' part of [B, H, N]."""
    n = win.kv_len if win.lengths is None else int(win.lengths[b])
    return scores[b, head, -n:].double()


def heads_of(win: AttentionWindow) -> list[tuple[int, int]]:
    return [(b, h) for b in range(win.batch) for h in range(win.num_kv_heads)]
