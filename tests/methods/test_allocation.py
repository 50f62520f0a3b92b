"""How budgets are spread: exact totals, the published rules, ties, pads; and methods that choose in stages."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decantkv.methods import METHODS, CriticalKV, DefensiveKV, Method, Streaming
from decantkv.selection.allocation import (
    RULES,
    Ada,
    AdaKvpress,
    Contest,
    Global,
    Heads,
    Pyramid,
    layer_shares,
    resolve_allocation,
)
from decantkv.selection.selector import order, select, select_layers
from decantkv.settings import Settings

from .shapes import Shape, example, values_of

SPREAD = ["uniform", "shared", "ada", "ada-kvpress", "heads"]


def noise(batch, heads, kv_len, seed=0):
    return torch.rand(batch, heads, kv_len, generator=torch.Generator().manual_seed(seed))


@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(2, 60), st.integers(0, 9), st.integers(0, 4),
    st.sampled_from(SPREAD), st.floats(0, 1), st.integers(0, 10), st.integers(1, 4), st.data(),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_totals_are_exact_and_what_is_protected_stays(
    batch, heads, kv_len, window, sinks, name, alpha, seed, levels, data
):
    lengths = [data.draw(st.integers(1, kv_len)) for _ in range(batch)]
    scores = (noise(batch, heads, kv_len, seed) * levels).round()  # few levels: many ties
    rule = {"ada": Ada(alpha), "ada-kvpress": AdaKvpress(alpha)}.get(name, RULES[name])
    n_keep = [data.draw(st.integers(min(n, window + sinks) or 1, n)) for n in lengths]
    kept = select(scores, n_keep=n_keep, window=window, sinks=sinks, allocation=rule, lengths=lengths)
    mask = kept.mask(kv_len)
    for b, (number, length) in enumerate(zip(n_keep, lengths, strict=True)):
        assert int(kept.counts[b].sum()) == heads * number == int(mask[b].sum())
        assert not mask[b, :, : kv_len - length].any()
        assert mask[b, :, kv_len - min(window, length) :].all()
        assert mask[b, :, kv_len - length : kv_len - length + min(sinks, length)].all()
    assert torch.equal(mask.sum(-1), kept.counts)
    assert bool((kept.indices.sort(-1).values == kept.indices).all())
    again = select(scores.clone(), n_keep=n_keep, window=window, sinks=sinks, allocation=rule, lengths=lengths)
    assert torch.equal(kept.indices, again.indices)


@given(st.integers(1, 6), st.integers(12, 80), st.integers(0, 9), st.floats(0, 1), st.integers(0, 50))
@settings(max_examples=100, deadline=None)
def test_ada_is_the_published_interpolation_within_a_rounding(heads, kv_len, window, alpha, seed):
    scores = noise(1, heads, kv_len, seed)
    n_keep = max(window + 1, kv_len // 3)
    free, budget = scores[0, :, : kv_len - window], n_keep - window
    order = sorted(((float(free[h, j]), h) for h in range(heads) for j in range(kv_len - window)), reverse=True)
    won = [sum(h == head for _, h in order[: heads * budget]) for head in range(heads)]
    official = [round((1 - alpha) * c + math.floor(alpha * budget)) + window for c in won]
    got = select(scores, n_keep=n_keep, window=window, allocation=Ada(alpha)).counts[0].tolist()
    whole = float(alpha * budget).is_integer()
    assert all(abs(x - y) <= (1 if whole else 2) for x, y in zip(got, official, strict=True))
    assert sum(got) == heads * n_keep


def test_kvpress_rule_guarantees_a_share_and_gives_the_rest_to_the_highest():
    scores = noise(1, 3, 40)
    scores[0, 2] += 10  # one head would take everything
    kept = select(scores, n_keep=10, allocation=AdaKvpress(0.3))
    assert kept.counts[0].tolist() == [3, 3, 24]
    assert select(scores, n_keep=10, allocation="heads").counts[0].tolist() == [0, 0, 30]
    assert select(scores, n_keep=10, allocation=AdaKvpress(1.0)).counts[0].tolist() == [10, 10, 10]
    assert select(scores, n_keep=10, allocation=Ada(1.0)).counts[0].tolist() == [10, 10, 10]


def test_equal_scores_go_to_the_lower_head_and_index():
    kept = select(torch.ones(1, 3, 5), n_keep=2, allocation=Heads())
    assert kept.counts[0].tolist() == [5, 1, 0]
    assert kept.indices[0].tolist() == [[0, 1, 2, 3, 4], [-1, -1, -1, -1, 0], [-1] * 5]


@given(st.integers(1, 40), st.integers(0, 12), st.integers(1, 300), st.integers(0, 300), st.floats(1, 50))
@settings(max_examples=150, deadline=None)
def test_pyramid_falls_linearly_and_its_layers_sum_exactly(layers, fixed, free, spare, beta):
    n_keep, length = fixed + free, fixed + free + spare
    rule = Pyramid(beta)
    if fixed == 0 and free < 2 * beta:
        return  # the top layer may round to nothing: an error, tested below
    budgets = [rule.layer_budget(n_keep, fixed, length, i, layers) - fixed for i in range(layers)]
    assert sum(budgets) == layers * free
    assert all(0 <= b <= length - fixed for b in budgets)
    assert all(a >= b for a, b in pairwise(budgets))
    if layers > 1 and spare >= free:
        assert abs(budgets[-1] - free / beta) <= 1
        assert abs(budgets[0] - (2 * free - free / beta)) <= 1
        assert all(abs(a - b - (budgets[0] - budgets[-1]) / (layers - 1)) <= 2 for a, b in pairwise(budgets))


def test_a_layer_that_would_keep_nothing_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"layer 31 of 32 keeps none; raise the budget, lower beta or use 'uniform'"):
        Pyramid().layer_budget(5, 0, 1000, 31, 32)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
@pytest.mark.parametrize("rule", [Ada, AdaKvpress])
def test_alpha_outside_its_range_is_refused(rule, alpha):
    with pytest.raises(ValueError, match="alpha: expected a number from 0 to 1"):
        rule(alpha)


def test_unknown_allocations_are_refused():
    with pytest.raises(ValueError, match="allocation: expected one of ada, ada-kvpress"):
        resolve_allocation("adaptive")
    with pytest.raises(TypeError, match="allocation: expected a name"):
        select(torch.rand(1, 2, 9), n_keep=3, allocation=3)
    for name in ("layer", "global"):
        with pytest.raises(ValueError, match=f"got '{name}', which compares all layers"):
            select(torch.rand(1, 2, 9), n_keep=3, allocation=name)
    with pytest.raises(ValueError, match="whose heads share one set"):
        Settings.parse("tova", budget=0.1, allocation="ada")


def test_a_contest_over_layers_is_the_one_over_all_of_them_at_once():
    layers, heads, kv_len, lengths, window = 5, 3, 40, [40, 23], 4
    scores = [noise(2, heads, kv_len, i) ** (i + 1) for i in range(layers)]
    orders = [order(s, n_keep=[10, 6], window=window, lengths=lengths, allocation="layer") for s in scores]
    contest = Contest([layers * heads * (10 - window), layers * heads * (6 - window)])
    history = [contest.enter(o.priority) for o in orders]
    final = history[-1]
    for before, after in pairwise(history):
        assert all(bool((b >= a).all()) for b, a in zip(before, after, strict=False))
    for b, number in enumerate([10, 6]):
        assert sum(int(c[b].sum()) for c in final) == layers * heads * (number - window)
        shares = torch.stack([o.priority[b] for o in orders])  # [layers, H, N]
        free = shares.masked_fill(~shares.isfinite(), -1.0)
        least = free.flatten().sort(descending=True).values[layers * heads * (number - window) - 1]
        assert torch.equal((free >= least).sum(-1), torch.stack([c[b] for c in final]))


def sorted_by_hand(scores, n_keep, lengths, window, sinks, floor):
    """A set of (layer, head, key) per batch row: the protected, each head's floor, then the highest of the model."""
    chosen = []
    for b, (number, length) in enumerate(zip(n_keep, lengths, strict=True)):
        kept, rivals = set(), []
        for i, layer in enumerate(scores):
            pads = layer.shape[2] - length
            for h in range(layer.shape[1]):
                fixed = {*range(pads, pads + sinks), *range(layer.shape[2] - window, layer.shape[2])}
                free = sorted(set(range(pads, layer.shape[2])) - fixed, key=lambda j: (-float(layer[b, h, j]), j))
                safe = max(0, int(floor * number) - len(fixed))
                kept |= {(i, h, j) for j in fixed} | {(i, h, j) for j in free[:safe]}
                rivals += [(-float(layer[b, h, j]), i, h, j) for j in free[safe:]]
        total = sum(number * layer.shape[1] for layer in scores)
        kept |= {key for _, *key in sorted(rivals)[: total - len(kept)] for key in [tuple(key)]}
        chosen.append(kept)
    return chosen


@pytest.mark.parametrize("floor", [0.0, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("levels", [3, None], ids=["ties", "no ties"])
def test_global_keeps_the_highest_of_the_whole_model(floor, levels):
    layers, heads, kv_len, lengths, n_keep, window, sinks = 4, 3, 30, [30, 17], [10, 7], 3, 2
    scores = [(noise(2, heads, kv_len, i) - 0.3) * 10.0**i for i in range(layers)]  # some below 0
    scores = [s if levels is None else s.sign() * (s.abs() > 2) for s in scores]
    orders = [
        order(s, n_keep=n_keep, window=window, sinks=sinks, lengths=lengths, allocation=Global(floor)) for s in scores
    ]
    kept = select_layers(orders)
    for b, wanted in enumerate(sorted_by_hand(scores, n_keep, lengths, window, sinks, floor)):
        got = {(i, h, j) for i, k in enumerate(kept) for _, h, j in k.mask(kv_len)[b : b + 1].nonzero().tolist()}
        assert got == wanted
        assert len(got) == layers * heads * n_keep[b]
    contest = Contest([layers * heads * (n - window - sinks) for n in n_keep])
    last = [contest.enter(each.priority) for each in orders][-1]
    assert all(torch.equal(won + window + sinks, k.counts) for won, k in zip(last, kept, strict=True))


def test_layers_of_unequal_heads_and_lengths_are_decided_together():
    shapes = [(2, 20), (1, 35), (3, 8)]
    scores = [noise(1, heads, length, i) for i, (heads, length) in enumerate(shapes)]
    for name in ("layer", "global"):
        orders = [order(s, n_keep=5, window=2, allocation=name) for s in scores]
        kept = select_layers(orders)
        assert sum(int(k.counts.sum()) for k in kept) == 5 * 6
        free = sorted((float(x) for o in orders for x in o.priority[o.priority.isfinite()]), reverse=True)
        least = free[3 * 6 - 1]
        for each, k in zip(orders, kept, strict=True):
            assert torch.equal(k.mask(each.priority.shape[2]), each.priority >= least)


def test_a_floor_is_a_share_of_each_heads_mean_budget():
    scores = noise(1, 2, 40)
    scores[0, 1] += 10  # one head would take everything
    counts = [select_layers([order(scores, n_keep=10, window=1, allocation=Global(f))])[0].counts for f in (0, 0.35)]
    assert [c[0].tolist() for c in counts] == [[1, 19], [3, 17]]
    assert Global(0.35).describe() == "global(floor=0.35)"
    with pytest.raises(ValueError, match=r"Global\.floor: expected a number from 0 to 1"):
        Global(1.5)


def test_global_takes_nan_for_the_lowest_score():
    scores = noise(1, 2, 12)
    scores[0, 0] = torch.nan
    (kept,) = select_layers([order(scores, n_keep=6, window=2, allocation="global")])
    assert kept.counts[0].tolist() == [2, 10]


def test_layers_compare_by_their_share_of_the_total():
    scores = noise(1, 2, 9)
    a, b = (layer_shares(order(s, n_keep=4, window=2, allocation="layer").priority) for s in (scores, scores * 1000))
    torch.testing.assert_close(a, b)
    with pytest.raises(ValueError, match="expected scores that are not negative"):
        order(-scores, n_keep=4, allocation="layer")


def keeps(method, win, budget, **options):
    """[B, H, N] bool under a method's own rules."""
    return Settings.parse(method, budget=budget, **options).keep(win).mask(win.kv_len)


def test_criticalkv_takes_half_by_the_base_score_and_the_rest_by_its_bound():
    win = example(Shape(kv_len=60, lengths=(60, 41)), dtype=torch.float32)
    method = CriticalKV(window=5, kernel_size=3)
    mask = keeps(method, win, 20)
    for b in range(2):
        for h in range(2):
            n, edge = len(values_of(win, b, h)), len(values_of(win, b, h)) - 5
            s = method.base_score(win)[b, h, -n:].tolist()
            pooled = [max(s[max(0, j - 1) : min(edge, j + 2)]) for j in range(edge)]
            v = win.v[b, h, -n:]
            norm = sum((v @ win.output_projection[q]).abs().sum(-1) for q in range(3 * h, 3 * h + 3))[:edge] / 3
            first = sorted(range(edge), key=lambda j: (-pooled[j], j))[: 20 // 2 - 5]
            bound = [(x + 5e-4) * y for x, y in zip(pooled, norm.tolist(), strict=True)]
            second = sorted(set(range(edge)) - set(first), key=lambda j: (-bound[j], j))[: 15 - len(first)]
            want = {*first, *second, *range(edge, n)}
            assert set((mask[b, h].nonzero().flatten() - (win.kv_len - n)).tolist()) == want


def test_defensivekv_covers_its_share_of_the_mass_first():
    win = example(Shape(kv_len=60, lengths=(60, 41)), dtype=torch.float32, sharp=6.0)
    method = DefensiveKV(window=5, first_stage=0.6)
    mask = keeps(method, win, 40)
    for b in range(2):
        for h in range(2):
            n, edge = len(values_of(win, b, h)), len(values_of(win, b, h)) - 5
            s = method.base_score(win)[b, h, -n:].tolist()[:edge]
            guarded = method.score(win)[b, h, -n:].tolist()[:edge]
            falling, first, covered = sorted(range(edge), key=lambda j: (-s[j], j)), [], 0.0
            while covered < 0.6 * sum(s) and len(first) < min(35, edge):
                first.append(falling[len(first)])
                covered += s[first[-1]]
            second = sorted(set(range(edge)) - set(first), key=lambda j: (-guarded[j], j))
            want = {*first, *second[: min(40, n) - 5 - len(first)], *range(edge, n)}
            assert 0 < len(first) < 35
            assert set((mask[b, h].nonzero().flatten() - (win.kv_len - n)).tolist()) == want


def test_h2o_gives_half_of_the_budget_to_recent_tokens():
    win = example(Shape(kv_len=60, lengths=(60, 41)), dtype=torch.float32)
    mask = keeps("h2o", win, 20)
    assert mask[..., -10:].all()
    assert bool((mask.sum(-1) == 20).all())
    protected = keeps("h2o", win, 20, protect=[(3, 15)], sinks=4)
    assert protected[0, :, 3:15].all()
    assert protected[..., -2:].all()  # (20 − 15) // 2
    assert bool((protected.sum(-1) == 20).all())


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("allocation", [*SPREAD, "pyramid"])
def test_every_method_and_allocation_keeps_exactly_what_is_asked_and_protected(name, allocation):
    from dataclasses import replace

    from .test_scores import turn

    if METHODS[name].shared_by_heads and resolve_allocation(allocation).ragged:
        pytest.skip("its heads share one set")
    shape = Shape(kv_len=90, window=32, group=2, lengths=(90, 61))
    win = replace(example(shape, dtype=torch.float32), rotate=turn)
    chosen = Settings.parse(name, budget=50, allocation=allocation, protect=[(7, 10)], sinks=3)
    counts = []
    for layer in range(3):
        kept = chosen.keep(win, layer=(layer, 3))
        mask = kept.mask(win.kv_len)
        for b, length in enumerate([90, 61]):
            start = win.kv_len - length
            assert mask[b, :, start : start + 3].all()
            assert mask[b, :, start + 7 : start + 10].all()
            assert mask[b, :, win.kv_len - chosen.method.window :].all()
            assert not mask[b, :, :start].any()
        counts.append(mask.sum((1, 2)))
    assert torch.stack(counts).sum(0).tolist() == [3 * 2 * 50] * 2


def test_what_a_method_needs_is_asked_for_by_name():
    win = example(Shape(), dtype=torch.float32)
    from dataclasses import replace

    bare = replace(win, queries=None, output_projection=None, rotate=None)
    for method, argument in (
        (CriticalKV(window=5), "output_projection"),
        (DefensiveKV(window=5), "output_projection"),
        (METHODS["dropkv"](weigh="output"), "output_projection"),
        (METHODS["h2o"](), "queries"),
        (METHODS["expected-attention"](), "queries"),
    ):
        with pytest.raises(
            ValueError, match=rf"{argument}: expected by {method.name}.*choose a method that does without"
        ):
            method.score(bare)


def test_adding_a_method_takes_a_class_and_a_line(monkeypatch):
    from dataclasses import dataclass
    from typing import ClassVar

    from decantkv.methods.table import table

    @dataclass(frozen=True)
    class Loudest(Method):
        """Keep the largest values."""

        name: ClassVar[str] = "loudest"
        kind: ClassVar[str] = "heuristic"
        source: ClassVar[str] = "this test"
        formula: ClassVar[str] = "‖v‖"

        window: int = 2

        def score(self, win, *, impl="auto"):
            return win.v.norm(dim=-1).float()

    monkeypatch.setitem(METHODS, Loudest.name, Loudest)
    win = example(Shape(), dtype=torch.float32)
    mask = keeps("loudest", win, 9, allocation="ada")
    assert int(mask.sum()) == 9 * 2 * 2
    assert any(row.name == "loudest" and row.keeps == "last 2" for row in table())


def test_the_table_has_a_filled_row_for_every_method():
    from decantkv.methods.table import table

    rows = table()
    assert [row.name for row in rows] == list(METHODS)
    assert {row.kind for row in rows} <= {"heuristic", "upper bound", "relaxation", "exact singleton", "control"}
    assert all(all(vars(row).values()) for row in rows)
    assert {row.name: row.needs for row in rows}["criticalkv"] == "W_O"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_has_a_shared_preset_for_fair_comparisons(name):
    method = METHODS[name].preset("shared")
    assert method.window == 8
    assert isinstance(Streaming.preset("paper"), Streaming)
