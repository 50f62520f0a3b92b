"""Which tokens stay, against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from decantkv.scoring.window import make_window
from decantkv.selection.selector import FILLER, pool_scores
from decantkv.settings import Settings
from tests.support import tiny


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


BROKEN = [float("nan"), -float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, 2e38, 5.0, 1.0, 0.0]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_the_scores_are_protection_and_counts_hold(data):
    keys, lengths = 24, [24, data.draw(st.integers(14, 24))]
    values = data.draw(st.lists(st.sampled_from(BROKEN), min_size=2 * 3 * keys, max_size=2 * 3 * keys))
    scores = torch.tensor(values, dtype=data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16])))
    allocation = data.draw(st.sampled_from(["uniform", "shared", "ada", "ada-kvpress", "heads", "pyramid"]))
    pool, size = data.draw(st.sampled_from([("none", 1), ("max", 3), ("avg", 5), ("avg", 11)]))
    kept = decantkv.select(
        scores.view(2, 3, keys), n_keep=10, window=3, sinks=2, protect=[(5, 7)], lengths=lengths, pool=pool,
        kernel_size=size, allocation=allocation, pool_scope=data.draw(st.sampled_from(["all", "prefix"])),
        layer=(1, 3),
    )  # fmt: skip
    for b, n in enumerate(lengths):
        start = keys - n
        always = {start, start + 1, start + 5, start + 6, keys - 3, keys - 2, keys - 1}
        assert kept.counts[b].sum() == 30
        for h in range(3):
            chosen = kept.indices[b, h][kept.indices[b, h] != FILLER].tolist()
            assert always <= set(chosen)
            assert min(chosen) >= start
            assert chosen == sorted(set(chosen))
            assert len(chosen) == kept.counts[b, h]


@pytest.mark.parametrize("allocation", ["uniform", "shared", "ada", "heads"])
def test_nan_is_the_lowest_score_and_infinity_the_highest(allocation):
    nan, inf = float("nan"), float("inf")
    scores = torch.tensor([nan, 1.0, -inf, inf, nan, 2.0, -3.0, 3.4e38, 0.5, nan]).expand(1, 2, 10)
    kept = decantkv.select(scores, n_keep=5, window=1, allocation=allocation)
    assert kept.indices[0].tolist() == [[1, 3, 5, 7, 9]] * 2


def test_scores_that_overflow_an_average_keep_their_order():
    scores = torch.tensor([[[3e38, -3e38, 3e38, 3e38, 3e38, 2.0, 0.0, 0.0, 0.0]]])
    kept = decantkv.select(scores, n_keep=3, pool="avg", kernel_size=3)
    assert kept.indices[0, 0].tolist() == [1, 3, 4]


def test_a_layer_of_nan_still_shares_one_budget_over_layers():
    from decantkv.selection.selector import order

    made = order(torch.full((1, 2, 12), float("nan")), n_keep=6, window=2, sinks=1, allocation="layer")
    assert made.priority.isinf().sum() == 6  # what is protected; the other shares are finite
    assert not made.priority.isnan().any()


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


@pytest.mark.parametrize(
    "method", ["dropkv", "adadropkv", "snapkv", "criticalkv", "defensivekv", "tova", "caote", "h2o"]
)
@pytest.mark.parametrize("value", ["inf", "nan", "1e30"])
def test_a_key_beyond_the_dtype_costs_no_protected_token(method, value):
    """As an overflow in half precision makes one; what follows the layer is kept finite."""
    model, ids = tiny.llama(num_hidden_layers=1), tiny.prompt(60)
    projection = model.model.layers[0].self_attn.k_proj
    hook = projection.register_forward_hook(lambda _, __, out: out.index_fill(1, torch.tensor([20]), float(value)))
    cache = decantkv.EvictingCache(model, method, budget=45, sinks=2, protect=[(10, 13)])
    with torch.no_grad():
        model(ids, **{cache_argument(model): cache})
    hook.remove()
    kept = cache.layers[0].kept
    always = [0, 1, 10, 11, 12, *range(60 - cache.settings.method.window, 60)]
    assert kept.mask(60)[..., always].all()
    assert kept.counts.sum() == 2 * 45


@pytest.mark.parametrize("method", ["criticalkv", "defensivekv"])
def test_what_is_forced_comes_before_a_methods_first_stage(method):
    chosen = Settings.parse(method, budget=12, window=1, first_stage=1.0)
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, n, 8, generator=rng) for n in (1, 40, 40))
    win = make_window(q, k, v, output_projection=torch.randn(2, 8, 6, generator=rng))
    forced = torch.zeros(1, 2, 40, dtype=torch.bool)
    forced[..., 28:39] = True
    scores = chosen.score(win)
    kept = chosen.choose(scores, win=win, n_keep=[12], forced=forced)
    assert kept.indices.tolist() == [[list(range(28, 40))] * 2]
