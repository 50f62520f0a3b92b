"""Selection and compaction in Triton's interpreter against the torch implementation, index by index."""

from __future__ import annotations

import os

import pytest
import torch

from decantkv.selection.selector import select

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


def broken(x):
    """NaN of either sign, infinities and numbers whose sums overflow, among ordinary ones."""
    odd = torch.tensor([float("nan"), -float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e38, -2e38, 1.0])
    return torch.where(x < 0.5, odd[(1e6 * x).long() % len(odd)], x)


def scores_of(kind, N, seed=0):
    rng = torch.Generator().manual_seed(seed)
    x = torch.rand(2, 2, N, generator=rng)
    return {
        "random": x,
        "ties": (4 * x).floor(),
        "zeros": torch.zeros_like(x),
        "wide, both signs": torch.exp(20 * torch.randn(2, 2, N, generator=rng)) * (6 * x - 3).round(),
        "signed zeros": torch.where(x < 0.5, -0.0, 0.0),
        "broken": broken(x),
    }[kind]


@pytest.mark.parametrize("row_limit", [8192, 0], ids=["row a program", "chunks"])
@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "wide, both signs", "signed zeros", "broken"])
@pytest.mark.parametrize(
    ("N", "pool", "kernel_size", "scope", "lengths"),
    [
        (1, "none", 1, "all", None),
        (2, "max", 11, "all", None),
        (37, "avg", 5, "prefix", [37, 12]),
        (300, "max", 11, "all", None),
        (700, "avg", 7, "all", [350, 700]),
        (700, "max", 7, "prefix", [700, 5]),
    ],
)
def test_selects_what_torch_selects(N, pool, kernel_size, scope, lengths, kind, row_limit):
    from decantkv.kernels.compaction import launch_select

    scores = scores_of(kind, N)
    rows = lengths or [N, N]
    window = min(3, *rows)
    sinks = 2 if min(rows) > 8 else 0
    spans = [(3, 5)] if min(rows) > 8 else []
    keep = [min(n, n // 3 + window + 6) for n in rows]
    expected = select(
        scores, n_keep=keep, window=window, pool=pool, kernel_size=kernel_size, pool_scope=scope, sinks=sinks,
        protect=spans, lengths=lengths, impl="torch",
    )  # fmt: skip
    forced = torch.zeros(2, N, dtype=torch.bool)
    for b, n in enumerate(rows):
        for start, stop in spans:
            forced[b, N - n + start : N - n + stop] = True
    indices = launch_select(
        scores, max(keep), counts=torch.tensor(keep)[:, None].repeat(1, 2), pool=pool, kernel_size=kernel_size,
        start=torch.tensor([N - n for n in rows]) if lengths else None,
        pool_stop=N - window if scope == "prefix" else None,
        sinks=sinks, window=window, forced=forced if spans else None, chunk=256, row_limit=row_limit,
    )  # fmt: skip
    assert torch.equal(indices, expected.indices)


def test_infinite_scores_do_not_displace_what_is_always_kept():
    from decantkv.kernels import select_topk

    scores = torch.full((1, 1, 20), float("inf"))
    assert select_topk(scores, 4, sinks=1, window=2).tolist() == [[[0, 1, 18, 19]]]
    assert select_topk(-scores, 3, window=1, start=torch.tensor([5])).tolist() == [[[5, 6, 19]]]


def test_gather_copies_and_fills_with_zeros():
    from decantkv.kernels import gather_kv

    rng = torch.Generator().manual_seed(1)
    k = torch.randn(2, 50, 3, 80, generator=rng).transpose(1, 2)
    v = torch.randn(2, 3, 50, 64, generator=rng)
    indices = torch.stack([torch.randperm(50, generator=rng)[:9].sort().values for _ in range(6)]).view(2, 3, 9)
    indices[1, :, :2] = -1
    buffers = torch.full((2, 3, 20, 80), float("nan")), torch.full((2, 3, 20, 64), float("nan"))
    out = buffers[0][:, :, 4:13], buffers[1][:, :, 4:13]
    for got in (gather_kv(k, v, indices), gather_kv(k, v, indices, out=out)):
        for x, kept in zip((k, v), got, strict=True):
            want = x.gather(2, indices.clamp_min(0)[..., None].expand(-1, -1, -1, x.shape[3]))
            assert torch.equal(kept, want.masked_fill((indices < 0)[..., None], 0))
    assert buffers[0][:, :, :4].isnan().all()
    assert buffers[0][:, :, 13:].isnan().all()


def test_wrong_arguments_are_named():
    from decantkv.kernels import gather_kv, select_topk

    scores = torch.zeros(1, 2, 8)
    for message, call in {
        "scores: expected": lambda: select_topk(scores.double(), 2),
        "pool: expected": lambda: select_topk(scores, 2, pool="min"),
        "kernel_size: expected": lambda: select_topk(scores, 2, pool="max", kernel_size=4),
        "n_keep: expected": lambda: select_topk(scores, 9),
        "counts: expected": lambda: select_topk(scores, 2, counts=torch.zeros(2, 1)),
        "forced: expected": lambda: select_topk(scores, 2, forced=torch.zeros(1, 8)),
        "indices: expected": lambda: gather_kv(scores[..., None], scores[..., None], torch.zeros(1, 1, 2)),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
