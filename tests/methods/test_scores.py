"""Every method's score against straight-line float64, one query, one key at a time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from decantkv.methods import (
    CAOTE,
    H2O,
    TOVA,
    AnDPro,
    AnDProChunks,
    Compactor,
    CriticalKV,
    DefensiveKV,
    DropKV,
    ExpectedAttention,
    KeyDiff,
    KNorm,
    ReSTKV,
    SnapKV,
)
from decantkv.scoring import reference, tiled

from .shapes import SHAPES, Shape, example, heads_of, real_scores, rows_of, values_of

IMPLS = ["reference", "torch"]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)
impls = pytest.mark.parametrize("impl", IMPLS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Force several tiles on shapes this small, so that halos and merges are crossed."""
    monkeypatch.setattr(tiled, "_tile_length", lambda win: 7)


def expect(win, scores, wanted, rtol=2e-5):
    """`wanted(b, head)` is [n]; only keys before the window count where it says NaN elsewhere."""
    assert scores.dtype == torch.float32
    assert scores.shape == win.k.shape[:3]
    for b, head in heads_of(win):
        got, want = real_scores(win, scores, b, head), wanted(b, head)
        compared = ~want.isnan()
        torch.testing.assert_close(got[compared], want[compared], rtol=rtol, atol=1e-7)


@shapes
@impls
def test_dropkv_max_is_the_costliest_row(shape, impl):
    win = example(shape)

    def wanted(b, head):
        v = values_of(win, b, head)
        costs = [(p / (1 - p) * (a - v).norm(dim=-1)) ** 2 for p, a in rows_of(win, b, head)]
        return torch.stack(costs).nan_to_num(0.0).amax(0)  # a row's only key has p = 1 and moves nothing

    expect(win, DropKV(window=shape.window, reduce="max").score(win, impl=impl), wanted)


@shapes
@impls
def test_dropkv_behind_the_output_projection(shape, impl):
    win = example(shape)

    def wanted(b, head):
        v = values_of(win, b, head)
        total = torch.zeros(len(v), dtype=torch.float64)
        for row, (p, a) in enumerate(rows_of(win, b, head)):
            w_o = win.output_projection[head * shape.group + row // shape.window].double()
            total += ((p / (1 - p) * ((a - v) @ w_o).norm(dim=-1)) ** 2 / shape.group).nan_to_num(0.0)
        return total

    expect(win, DropKV(window=shape.window, weigh="output").score(win, impl=impl), wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_dropkv_behind_the_output_projection_keeps_a_dominant_sink(impl):
    win = example(Shape(batch=1, heads=1, group=1, window=1), dtype=torch.float32)
    win.k[0, 0, 3] = win.q[0, 0, 0] * 3.0  # p = 1 − 1e-6 or closer
    ((p, _),) = rows_of(win, 0, 0)
    assert p[3] > 1 - 1e-4
    v, w_o = values_of(win, 0, 0), win.output_projection[0].double()
    rest = p.clone()
    rest[3] = 0
    without = (rest / rest.sum()) @ v
    got = DropKV(window=1, weigh="output").score(win, impl=impl)[0, 0, 3]
    assert float(got) == pytest.approx(float((p[3] * (without - v[3]) @ w_o).norm() ** 2), rel=1e-3)


@shapes
@impls
def test_snapkv_sums_weights(shape, impl):
    win = example(shape)
    expect(win, SnapKV(window=shape.window).score(win, impl=impl),
           lambda b, head: sum(p for p, _ in rows_of(win, b, head)) / shape.group)  # fmt: skip


@shapes
@impls
def test_tova_takes_the_last_query_and_all_heads(shape, impl):
    win = example(shape)

    def wanted(b, _):
        weights = [rows_of(win, b, h)[m * shape.window + shape.window - 1][0]
                   for h in range(shape.heads) for m in range(shape.group)]  # fmt: skip
        return sum(weights) / len(weights)

    expect(win, TOVA().score(win, impl=impl), wanted)
    assert TOVA.shared_by_heads


@shapes
@impls
def test_h2o_sums_over_every_query(shape, impl):
    win = example(shape)
    expect(win, H2O().score(win, impl=impl),
           lambda b, head: sum(p for p, _ in rows_of(win, b, head, win.queries)) / shape.group)  # fmt: skip


def test_h2o_crosses_blocks_of_queries(monkeypatch):
    from decantkv.scoring import streams

    win = example(Shape(lengths=(37, 20)))
    whole = H2O().score(win, impl="torch")
    monkeypatch.setattr(streams, "QUERY_BLOCK", 6)
    torch.testing.assert_close(H2O().score(win, impl="torch"), whole, rtol=1e-6, atol=1e-8)


@shapes
def test_knorm(shape):
    win = example(shape)
    expect(win, KNorm().score(win), lambda b, h: -win.k[b, h, -len(values_of(win, b, h)) :].double().norm(dim=-1))


@pytest.mark.parametrize("normalise", [False, True])
@shapes
def test_keydiff(shape, normalise):
    win = example(shape)

    def wanted(b, h):
        k = win.k[b, h, -len(values_of(win, b, h)) :].double()
        mean = sum(x / x.norm() if normalise else x for x in k) / len(k)
        return torch.stack([1 - (x @ mean) / (x.norm() * mean.norm()) for x in k])

    expect(win, KeyDiff(normalise=normalise).score(win), wanted)


@shapes
@impls
def test_andpro_projects_onto_the_output(shape, impl):
    win = example(shape)

    def wanted(b, head):
        v = values_of(win, b, head)
        return sum(p * (v @ a) / a.norm() for p, a in rows_of(win, b, head) if a.norm() > 0) / shape.group

    expect(win, AnDPro(window=shape.window).score(win, impl=impl), wanted)


def pooled_along(p, edge, kernel, how):
    """A row's weights pooled over the keys before `edge`, zeros beyond, by the definition."""
    out = p.clone()
    for j in range(edge):
        near = [
            p[i] if 0 <= i < edge else torch.zeros((), dtype=p.dtype)
            for i in range(j - kernel // 2, j + kernel // 2 + 1)
        ]
        out[j] = max(near) if how == "max" else sum(near) / kernel
    return out


@shapes
@impls
def test_andpro_in_chunks(shape, impl):
    win, chunk = example(shape), 4

    def wanted(b, head):
        v = values_of(win, b, head)
        n = len(v)
        edge = n - shape.window
        score = torch.full((n,), math.nan, dtype=torch.float64)
        score[: max(edge, 0)] = 0
        for p, _ in rows_of(win, b, head):
            p = pooled_along(p, edge, 7, "max")
            chunks = [range(c, min(c + chunk, edge)) for c in range(0, edge, chunk)]
            z = [sum(p[j] * v[j] for j in members) for members in chunks]
            u = sum(z[1:], torch.zeros_like(v[0]))
            for members, z_c in zip(chunks, z, strict=True):
                for j in members:
                    score[j] += (z_c @ u) / shape.group
        return score

    expect(win, AnDProChunks(window=shape.window).score(win, impl=impl), wanted)


@pytest.mark.parametrize("base", ["tova", "snapkv", "h2o"])
@shapes
@impls
def test_caote_removes_from_one_distribution(shape, impl, base):
    win = example(shape)

    def wanted(b, head):
        v = values_of(win, b, head)
        rows = rows_of(win, b, head, win.queries if base == "h2o" else None)
        if base == "tova":
            rows = rows[shape.window - 1 :: shape.window]
        alpha = sum(p for p, _ in rows)
        alpha = alpha / alpha.sum()
        a = alpha @ v
        cost = torch.zeros(len(v), dtype=torch.float64)
        for j in range(len(v)):
            left = alpha.clone()
            left[j] = 0
            if left.sum() > 0:
                cost[j] = (a - (left / left.sum()) @ v).norm()  # delete and renormalise: no closed form
        return cost

    # where one key holds everything, its loss is its own value's: leave single-key rows out
    scores = CAOTE(window=max(shape.window, 1), base=base).score(win, impl=impl)
    expect(win, scores, wanted, rtol=1e-4)


@shapes
@impls
def test_criticalkv_bounds_by_the_projected_value(shape, impl):
    win = example(shape)

    def wanted(b, head):
        v = values_of(win, b, head)
        heads = range(head * shape.group, (head + 1) * shape.group)
        norm = sum((v @ win.output_projection[h].double()).abs().sum(-1) for h in heads) / shape.group
        return (sum(p for p, _ in rows_of(win, b, head)) / shape.group + 1e-4 * shape.window) * norm

    expect(win, CriticalKV(window=shape.window).score(win, impl=impl), wanted)


@shapes
@impls
def test_defensivekv_takes_the_worst_row(shape, impl):
    win = example(shape)

    def wanted(b, head):
        v = values_of(win, b, head)
        edge = len(v) - shape.window
        s = torch.stack([pooled_along(p, edge, 5, "avg") for p, _ in rows_of(win, b, head)]).amax(0)
        heads = range(head * shape.group, (head + 1) * shape.group)
        norm = sum((v @ win.output_projection[h].double()).abs().sum(-1) for h in heads) / shape.group
        guarded = torch.maximum(s[:edge], s[:edge].mean()) * norm[:edge] / norm[:edge].sum() if edge > 0 else s[:0]
        return torch.cat([guarded, torch.full((len(v) - len(guarded),), math.nan, dtype=torch.float64)])

    expect(win, DefensiveKV(window=shape.window).score(win, impl=impl), wanted)


def turn(x, positions, base=100.0):
    """RoPE over neighbouring halves, by complex numbers: [B, H, T, D] turned by [T] or [B, T] positions."""
    half = x.shape[-1] // 2
    angle = positions[..., None].double() * base ** (-torch.arange(half, dtype=torch.float64) / half)
    angle = angle[:, None] if angle.dim() == 3 else angle
    z = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.exp(1j * angle)
    return torch.cat([z.real, z.imag], -1).to(x.dtype)


@shapes
@pytest.mark.parametrize("way", ["reference", "torch", "torch, once"])
def test_restkv_averages_what_the_layer_would_lose(shape, way):
    win = example(shape)

    def wanted(b, head):
        v = values_of(win, b, head)
        total = torch.zeros(len(v), dtype=torch.float64)
        rows = rows_of(win, b, head)
        for member in range(shape.group):
            w_o, average = win.output_projection[head * shape.group + member].double(), None
            for p, _ in rows[member * shape.window : (member + 1) * shape.window]:
                cost = torch.zeros(len(v), dtype=torch.float64)
                for j in range(len(v)):
                    left = p.clone()
                    left[j] = 0
                    kept = left / left.sum() if left.sum() > 0 else left
                    cost[j] = ((p @ v - kept @ v) @ w_o).norm()
                average = cost if average is None else 0.3 * cost + 0.7 * average
            total += average / shape.group
        return total

    given = win
    if way == "torch, once":
        out = [torch.stack([a for h in range(shape.heads) for _, a in rows_of(win, b, h)]) for b in range(shape.batch)]
        lse = reference.logits(win, torch.float64).logsumexp(-1).view(win.q.shape[:3])
        given = replace(win, out=torch.stack(out).view(*win.q.shape[:3], -1), lse=lse)
    expect(win, ReSTKV(window=shape.window).score(given, impl=way.split(",")[0]), wanted)


@pytest.mark.parametrize("block", [512, 6], ids=["whole", "in blocks"])
@pytest.mark.parametrize("future", [0, 5])
@shapes
def test_expected_attention(shape, future, block, monkeypatch):
    from decantkv.methods import expected

    monkeypatch.setattr(expected, "_BLOCK", block)
    monkeypatch.setattr(expected, "scratch_bytes", lambda device: 0)
    win = replace(example(shape), rotate=turn)
    method = ExpectedAttention(sinks=2, future=future)

    def wanted(b, head):
        v = values_of(win, b, head)
        n = len(v)
        k = win.k[b, head, -n:].double()
        mass = torch.zeros(n, dtype=torch.float64)
        for h in range(head * shape.group, (head + 1) * shape.group):
            q = win.queries[b, h, -n:].double()
            if future:
                q = turn(q[None, None], -torch.arange(n))[0, 0]
            q = q[2:]
            mu, sigma = q.mean(0), torch.cov(q.T, correction=0)
            if future:
                basis = torch.eye(shape.head_dim, dtype=torch.float64)[None, None]
                r = sum(turn(basis, torch.full((shape.head_dim,), n + i)) for i in range(future))[0, 0] / future
                mu, sigma = mu @ r, r.T @ sigma @ r
            s = torch.stack([win.scale * (k[j] @ mu) + win.scale**2 / 2 * (k[j] @ sigma @ k[j]) for j in range(n)])
            mass[2:] += torch.softmax(s[2:], 0) / shape.group
        return mass * v.norm(dim=-1)

    expect(win, method.score(win), wanted, rtol=1e-4)


@pytest.mark.parametrize("shape", [Shape(), Shape(group=2, kv_len=63, lengths=(63, 40))], ids=str)
def test_compactor_adds_outliers_to_local_attention(shape):
    win = replace(example(shape), rotate=turn, layer_idx=1)
    method = Compactor(window=4, sinks=3, sketch=5, chunk=7)
    sketch = torch.randn(shape.heads, shape.head_dim, 5, generator=torch.Generator().manual_seed(1)).double() / 5**0.5
    for b in range(shape.batch):
        leverage, local, n = [], [], len(values_of(win, b, 0))
        inner = range(3, n - 4)
        for h in range(shape.heads):
            k, v = win.k[b, h, -n:].double(), values_of(win, b, h)
            x = torch.stack([turn(k[None, None, j : j + 1], torch.tensor([-j]))[0, 0, 0] for j in inner])
            x = (x - x.mean(0)) @ sketch[h]
            gram = sum(torch.outer(r, r) for r in x) + 1e-2 * torch.eye(5, dtype=torch.float64)
            leverage.append([float(r @ torch.linalg.solve(gram, r)) for r in x])
            mass = torch.zeros(n, dtype=torch.float64)
            for member in range(shape.group):
                q = win.queries[b, h * shape.group + member, -n:].double()
                for i in inner:
                    near = [j for j in inner if (j - 3) // 7 == (i - 3) // 7]
                    mass[near] += torch.softmax(win.scale * (k[near] @ q[i]), 0) / shape.group
            s = [float(mass[j] * v[j].norm()) for j in inner]
            local.append([sum(s[max(0, i - 1) : i + 2]) / 3 for i in range(len(s))])
        z = [(t - t.mean()) / t.std() for t in (torch.tensor(local).double(), torch.tensor(leverage).double())]
        got = method.base_score(win)[b, :, win.kv_len - n + 3 : -4].double()
        torch.testing.assert_close(got, z[0], rtol=1e-4, atol=1e-5)
        ranked = method.rank(method.base_score(win), win, [n // 4] * shape.batch)[b, :, win.kv_len - n + 3 : -4]
        torch.testing.assert_close(ranked.double(), z[0] + (1 - (n // 4) / n) * z[1], rtol=1e-4, atol=1e-4)
    whole = method.score(win)
    torch.testing.assert_close(whole, method.base_score(win) + method.leverage(win))


def test_compactor_draws_nothing_from_torchs_random_numbers():
    win = replace(example(Shape()), rotate=turn)
    before = torch.get_rng_state()
    assert torch.equal(Compactor().score(win), Compactor().score(win))
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(Compactor().score(win), Compactor(seed=1).score(win))


def test_where_every_value_is_the_output_losing_a_token_costs_nothing_yet_andpro_prizes_it():
    win = example(Shape(batch=1))
    win.v[:] = win.v[:, :, :1]
    cost = DropKV(window=5).score(win)
    prize = AnDPro(window=5).score(win)
    assert float(cost.max()) < 1e-9
    norm = win.v[0, :, 0].norm(dim=-1).float()
    torch.testing.assert_close(prize[0].sum(-1), norm * 5, rtol=1e-5, atol=1e-6)  # Σ_j p = 1 a row, 5 rows


def test_engines_pass_what_a_method_needs_as_tensors():
    import decantkv

    win = example(Shape(), dtype=torch.float32)
    got = decantkv.score(win.q, win.k, win.v, method="criticalkv", output_projection=win.output_projection)
    torch.testing.assert_close(got, CriticalKV().score(win))
    got = decantkv.score(win.q, win.k, win.v, method="h2o", queries=win.queries)
    torch.testing.assert_close(got, H2O().score(win))
    with pytest.raises(ValueError, match="output_projection: expected a tensor"):
        decantkv.score(win.q, win.k, win.v, method="criticalkv", output_projection=win.output_projection[:2])
