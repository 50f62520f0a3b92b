"""The units of a cost and the weights of rows, against an oracle that deletes the key and recomputes every head."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

import decantkv
from decantkv.lab.theory import oracle
from decantkv.methods import CriticalKV, DropKV, SnapKV
from decantkv.scoring import tiled
from decantkv.scoring.window import make_window

from .test_scoring import tensors, with_sink

UNITS = ["value", "output", "head", "block", "stream"]
CASES = {
    "groups": {},
    "one head": {"heads": 1, "group": 1, "window": 1},
    "pads": {"batch": 2, "lengths": [40, 17]},
    "queries that are pads": {"batch": 2, "lengths": [40, 2]},
    "sink logits": {"sinks": True, "softcap": 2.0},
    "copied tokens": {"rest": 1e-4},
    "copied tokens of small values": {"rest": 1e-6, "value": 0.05},
}


def window_of(case, dtype=torch.float64):
    """A window with W_O, a residual stream and weights of rows, some of them 0."""
    shape = {name: case[name] for name in ("batch", "heads", "group", "window") if name in case}
    q, k, v = tensors(**shape)
    if "rest" in case:
        q, k, v = with_sink(q, k, v, case["rest"], case.get("value", 1.0))
    g = torch.Generator().manual_seed(3)
    batch, hq, w, dim = q.shape
    weights = torch.rand(batch, hq, w, generator=g) + 0.1
    weights[:, :, 1::3] = 0
    return make_window(
        q.to(dtype), k.to(dtype), v.to(dtype), softcap=case.get("softcap"),
        lengths=torch.tensor(case["lengths"]) if "lengths" in case else None,
        sink_logits=torch.linspace(-1, 2, hq).double() if "sinks" in case else None,
        output_projection=torch.randn(hq, dim, 24, generator=g).to(dtype),
        stream_norm=torch.rand(batch, w, generator=g) * 9 + 1, row_weights=weights,
    )  # fmt: skip


def outputs(win, without=()):
    """[B, HQ, w, Dv] float64 of the keys that are left."""
    return oracle.attention(
        win.q, win.k, win.v, scale=win.scale, lengths=win.lengths, softcap=win.softcap,
        sink_logits=win.sink_logits, without=without,
    )  # fmt: skip


@functools.cache
def shifts(name):
    """A case's window, its outputs, and how they move without each key: [N, B, HQ, w, Dv] float64."""
    win = window_of(CASES[name])
    full = outputs(win)
    return win, full, torch.stack([full - outputs(win, without=[j]) for j in range(win.kv_len)])


def cost_of_leaving_one_out(name, unit, reduce, weighted=True):
    """[B, H, N] float64: every head's output, with and without each key, in the unit."""
    win, full, shift = shifts(name)
    w_o = win.output_projection.double()
    if unit in ("output", "block", "stream"):
        shift = torch.einsum("nbhwd,hde->nbhwe", shift, w_o)
    cost = shift.norm(dim=-1) ** 2
    if unit == "head":
        cost = (cost / full.norm(dim=-1) ** 2).nan_to_num(0.0)
    elif unit == "block":
        behind = torch.einsum("bhwd,hde->bwe", full, w_o)
        cost = (cost / behind.norm(dim=-1)[:, None] ** 2).nan_to_num(0.0)
    elif unit == "stream":
        cost = cost / win.stream_norm[:, None]
    rows = (cost * win.row_weights if weighted else cost).unflatten(2, (win.num_kv_heads, win.group_size))
    return (rows.sum(-1).mean(-1) if reduce == "sum" else rows.amax((-1, -2))).permute(1, 2, 0)


def with_hints(win):
    """The same window with its output and log-sum-exp, which lets the keys be read once."""
    s = win.scale * (win.grouped_q() @ win.k[:, :, None].mT)
    s = s if win.softcap is None else win.softcap * torch.tanh(s / win.softcap)
    s = s.masked_fill(~win.visible(), -torch.inf)
    if win.sink_logits is not None:
        sink = win.sink_logits.view(1, win.num_kv_heads, win.group_size, 1, 1).expand(*s.shape[:4], 1)
        s = torch.cat([s, sink], -1)
    return replace(win, out=outputs(win), lse=s.logsumexp(-1).view(win.q.shape[:3]))


@pytest.mark.parametrize("way", ["reference", "torch", "torch, once"])
@pytest.mark.parametrize("name", CASES)
def test_costs_in_every_unit_are_those_of_leaving_one_out(name, way, monkeypatch):
    monkeypatch.setattr(tiled, "_tile_length", lambda win: 7)
    win, *_ = shifts(name)
    given, impl = with_hints(win) if way == "torch, once" else win, way.split(",")[0]
    for unit in UNITS:
        reduce = "max" if unit == "block" else "sum"
        wanted = cost_of_leaving_one_out(name, unit, reduce)
        got = DropKV(weigh=unit, reduce=reduce).score(given, impl=impl).double()
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=1e-9, msg=lambda text, unit=unit: f"{unit}: {text}")
        unweighted = DropKV(weigh=unit).score(replace(given, row_weights=None), impl=impl)
        wanted = cost_of_leaving_one_out(name, unit, "sum", weighted=False)
        torch.testing.assert_close(unweighted.double(), wanted, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("impl", ["reference", "torch"])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_rows_of_weight_0_are_as_if_they_were_not_there(impl, reduce):
    q, k, v = tensors(window=6)
    weights = torch.tensor([0.0, 0, 0, 1, 1, 1])[None, None]
    q[:, :, :3] = torch.nan  # a pad's query may be anything
    win = make_window(q, k, v, row_weights=weights, output_projection=torch.ones(6, 16, 5).double())
    last = replace(win.last(3), row_weights=None)
    for unit in ("value", "head", "block"):
        method = DropKV(weigh=unit, reduce=reduce)
        torch.testing.assert_close(method.score(win, impl=impl), method.score(last, impl=impl))
    for method in (SnapKV(reduce=reduce), CriticalKV(reduce=reduce, epsilon=0)):
        torch.testing.assert_close(method.score(win, impl=impl), method.score(last, impl=impl))


@pytest.mark.parametrize("impl", ["reference", "torch"])
def test_the_largest_weight_over_all_rows_is_kvzips_score(impl):
    win = window_of(CASES["pads"])
    s = (win.grouped_q() @ win.k[:, :, None].mT) / 4
    p = s.masked_fill(~win.visible(), -torch.inf).softmax(-1).nan_to_num(0.0).flatten(1, 2)
    expected = (p * win.row_weights[..., None]).view(2, 2, 12, 40).amax(2).float()
    method = SnapKV.preset("kvzip")
    assert (method.sinks, method.window, method.pool) == (4, 8, "none")
    torch.testing.assert_close(method.score(win, impl=impl), expected)


def test_rows_whose_divisor_is_0_cost_nothing():
    win = window_of({})
    win.v[:, 1] = 0
    silent = replace(win, stream_norm=torch.zeros(1, 4), row_weights=None)
    for impl in ("reference", "torch"):
        assert (DropKV(weigh="head").score(win, impl=impl)[:, 1] == 0).all()
        assert (DropKV(weigh="stream").score(silent, impl=impl) == 0).all()
        assert (DropKV(weigh="block").score(win, impl=impl)[:, 0] > 0).any()


def test_the_last_rows_take_their_weights_and_streams_with_them():
    win = window_of(CASES["pads"]).last(2)
    assert win.row_weights.shape == (2, 6, 2)
    assert win.stream_norm.shape == (2, 2)
    assert win.bare().row_weights is win.row_weights
    shared = replace(win, row_weights=win.row_weights[:, :1])
    expected = DropKV().score(replace(win, row_weights=win.row_weights[:, :1].expand(-1, 6, -1)))
    torch.testing.assert_close(DropKV().score(shared), expected)


def test_a_unit_that_lacks_its_numbers_names_the_way_out():
    win = replace(window_of({}), stream_norm=None)
    assert DropKV(weigh="stream").needs == {"W_O", "stream"}
    assert DropKV(weigh="block").needs == {"W_O"}
    assert DropKV(weigh="head").needs == frozenset()
    with pytest.raises(ValueError, match=r"stream_norm: expected by dropkv\(.*got None; pass the residual stream's"):
        DropKV(weigh="stream").score(win)
    with pytest.raises(ValueError, match=r"DropKV.weigh: expected one of block, head, output, stream, value"):
        DropKV(weigh="layer")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("row_weights", torch.ones(1, 3, 4), r"row_weights: expected a tensor \[1, 6, 4\], got float32 \[1, 3, 4\]"),
        ("row_weights", torch.ones(1, 1, 5), r"row_weights: expected a tensor \[1, 1, 4\]"),
        ("row_weights", -torch.ones(1, 1, 4), "row_weights: expected finite numbers of at least 0"),
        ("stream_norm", torch.ones(1, 5), r"stream_norm: expected a tensor \[1, 4\]"),
        ("stream_norm", torch.full((1, 4), torch.nan), "stream_norm: expected finite numbers"),
    ],
)
def test_weights_and_streams_that_do_not_fit_are_refused(name, given, message):
    q, k, v = tensors()
    with pytest.raises(ValueError, match=message):
        decantkv.score(q, k, v, **{name: given})
