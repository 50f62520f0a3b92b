"""Which tokens stay, against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import decantkv
from decantkv.selection import FILLER, pool_scores


def pooled_by_hand(row, pool, size):
    half = size // 2
    out = []
    for j in range(len(row)):
        inside = row[max(0, j - half) : j + half + 1]
        out.append(max(inside) if pool == "max" else sum(inside) / size)
    return out


def chosen_by_hand(row, n_keep, protected, pool, size):
    pooled = pooled_by_hand(row, pool, size) if pool != "none" else row
    order = sorted(range(len(row)), key=lambda j: (j not in protected, -pooled[j], j))
    return sorted(order[:n_keep])


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_select_against_a_plain_loop(data):
    batch, heads, keys = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    lengths = [data.draw(st.integers(1, keys)) for _ in range(batch)]
    window, sinks = data.draw(st.integers(0, 6)), data.draw(st.integers(0, 4))
    start = data.draw(st.integers(0, min(lengths) - 1))
    protect = [(start, data.draw(st.integers(start + 1, min(lengths))))] if data.draw(st.booleans()) else []
    pool, size = data.draw(st.sampled_from([("none", 1), ("max", 3), ("max", 11), ("avg", 5)]))
    # few distinct values, so that ties are the rule
    values = data.draw(st.lists(st.integers(0, 3), min_size=batch * heads * keys, max_size=batch * heads * keys))
    scores = torch.tensor(values, dtype=torch.float32).view(batch, heads, keys)
    protected = [
        set(range(max(0, n - window), n)) | set(range(min(sinks, n))) | {j for a, b in protect for j in range(a, b)}
        for n in lengths
    ]
    wanted = [data.draw(st.integers(max(1, len(p)), n)) for p, n in zip(protected, lengths, strict=True)]
    kept = decantkv.select(
        scores, n_keep=wanted, window=window, pool=pool, kernel_size=size, sinks=sinks, protect=protect, lengths=lengths
    )
    for b in range(batch):
        pads = keys - lengths[b]
        for h in range(heads):
            row = scores[b, h, pads:].tolist()
            by_hand = [j + pads for j in chosen_by_hand(row, wanted[b], protected[b], pool, size)]
            assert kept.counts[b, h] == wanted[b]
            assert kept.indices[b, h].tolist() == [FILLER] * (kept.indices.shape[2] - wanted[b]) + by_hand
            assert kept.mask(keys)[b, h].nonzero().flatten().tolist() == by_hand


def test_the_window_is_protected_by_index_not_by_a_large_score():
    scores = torch.full((1, 1, 64), 2.0**30)
    scores[0, 0, :8] = 2.0**31
    kept = decantkv.select(scores, n_keep=12, window=4)
    assert kept.indices[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 60, 61, 62, 63]


def test_infinite_scores_do_not_displace_protected_tokens():
    scores = torch.full((1, 1, 20), torch.inf)
    assert decantkv.select(scores, n_keep=5, window=5).indices[0, 0].tolist() == [15, 16, 17, 18, 19]


def test_a_shared_allocation_keeps_one_set():
    scores = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0))
    kept = decantkv.select(scores, n_keep=10, window=2, allocation="shared")
    assert (kept.indices == kept.indices[:, :1]).all()
    alone = decantkv.select(scores.mean(1, keepdim=True), n_keep=10, window=2)
    assert torch.equal(kept.indices[:, :1], alone.indices)
    apart = decantkv.select(scores, n_keep=10, window=2)
    assert not (apart.indices == apart.indices[:, :1]).all()


def test_prefix_pooling_leaves_the_window_out():
    scores = torch.zeros(1, 1, 12)
    scores[..., 10] = 5.0
    scores[..., 0] = 1.0
    spilled = decantkv.select(scores, n_keep=4, window=2, pool="max", kernel_size=5)
    assert spilled.indices[0, 0].tolist() == [8, 9, 10, 11]
    apart = decantkv.select(scores, n_keep=4, window=2, pool="max", kernel_size=5, pool_scope="prefix")
    assert apart.indices[0, 0].tolist() == [0, 1, 10, 11]


def test_a_forced_tail_reaches_further_than_the_window():
    scores = torch.arange(20, 0, -1.0).view(1, 1, 20)
    assert decantkv.select(scores, n_keep=6, window=2, forced_tail=5).indices[0, 0].tolist() == [0, 15, 16, 17, 18, 19]


def test_pads_are_the_arrays_edge():
    scores = torch.tensor([[[9.0, 9.0, 1.0, 2.0, 3.0]]])
    assert pool_scores(scores, pool="max", kernel_size=3, lengths=[3])[0, 0, 2:].tolist() == [2.0, 3.0, 3.0]
    assert pool_scores(scores, pool="avg", kernel_size=3, lengths=[3])[0, 0, 2:].tolist() == pytest.approx(
        [1, 2, 5 / 3]
    )


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"n_keep": 3, "window": 4}, ValueError, "n_keep: expected at least 4"),
        ({"n_keep": 0}, ValueError, "n_keep"),
        ({"n_keep": [3]}, ValueError, "n_keep"),
        ({"n_keep": 2.0}, TypeError, "n_keep"),
        ({"window": -1}, ValueError, "window"),
        ({"sinks": "4"}, TypeError, "sinks"),
        ({"kernel_size": 2}, ValueError, "kernel_size"),
        ({"allocation": "fair"}, ValueError, "allocation"),
        ({"protect": [(8, 12)]}, ValueError, "protect"),
        ({"lengths": [10, 0]}, ValueError, "lengths"),
        ({"scores": torch.ones(2, 2)}, ValueError, "scores"),
        ({"scores": torch.ones(2, 2, 10, dtype=torch.int64)}, ValueError, "scores"),
    ],
    ids=str,
)
def test_bad_input(change, error, says):
    arguments = {"scores": torch.rand(2, 2, 10), "n_keep": 5, **change}
    with pytest.raises(error, match=says):
        decantkv.select(arguments.pop("scores"), **arguments)
