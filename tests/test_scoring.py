"""Scores against an oracle that deletes the key and recomputes, and against the numerics contract in float64."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import decantkv
from decantkv.lab.theory import oracle
from decantkv.methods import resolve
from decantkv.scoring import compute, reference, scratch, tiled
from decantkv.scoring.window import make_window

IMPLS = ["reference", "torch"]


def tensors(batch=1, heads=2, group=3, window=4, keys=40, dim=16, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads * group, window, dim, generator=g, dtype=torch.float64)
    k = torch.randn(batch, heads, keys, dim, generator=g, dtype=torch.float64)
    v = torch.randn(batch, heads, keys, dim, generator=g, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def with_sink(q, k, v, rest, value=1.0, at=3):
    """Give every row the key `at` with weight 1 − rest, by writing the rows' common direction into it."""
    q, k, v = q.clone(), k.clone(), v.clone()
    q[..., 0] = 4.0
    k[..., 0] = 0.0
    s = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT) / q.shape[-1] ** 0.5
    wanted = s.logsumexp(-1).amax() + torch.log(torch.tensor((1 - rest) / rest))
    k[:, :, at] = 0.0
    k[:, :, at, 0] = wanted * q.shape[-1] ** 0.5 / 4.0
    v[:, :, at] *= value
    return q, k, v


def within_contract(scores, win64):
    """|s − s₆₄| ≤ 1 % of s₆₄ + 1e-5 · Σ_i r²(‖a‖² + ‖v‖²)/g for every key."""
    rows = reference.softmax(win64)
    exact = reference.perturbation(win64)
    odds = rows.odds.scatter(-1, rows.top, rows.p_top / (1 - rows.p_top).clamp_min(1e-300))
    sizes = rows.a.square().sum(-1)[..., None] + win64.v.square().sum(-1)[:, :, None, None]
    slack = 1e-5 * reference.reduce_rows(odds.square() * sizes, "sum")
    return (scores.double() - exact).abs() <= 0.01 * exact + slack


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "case",
    [
        {},
        {"window": 1},
        {"keys": 4, "window": 4},
        {"keys": 5, "window": 4},
        {"heads": 1, "group": 7, "window": 8, "keys": 63},
        {"group": 1, "dim": 24},
        {"batch": 3, "lengths": [40, 17, 5]},
        {"batch": 2, "lengths": [40, 2], "window": 4},
        {"softcap": 3.0},
        {"sinks": True},
        {"sinks": True, "softcap": 2.0, "batch": 2, "lengths": [40, 21]},
    ],
    ids=str,
)
def test_score_is_the_cost_of_leaving_one_out(impl, case):
    shape = {key: value for key, value in case.items() if key not in ("lengths", "softcap", "sinks")}
    q, k, v = tensors(**shape)
    options = {"scale": 0.4, "softcap": case.get("softcap")}
    options["lengths"] = torch.tensor(case["lengths"]) if "lengths" in case else None
    options["sink_logits"] = torch.linspace(-1, 2, q.shape[1], dtype=torch.float64) if "sinks" in case else None
    scores = decantkv.score(q, k, v, impl=impl, **options)
    torch.testing.assert_close(scores.double(), oracle.leave_one_out_cost(q, k, v, **options), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_mask_that_is_not_causal_is_followed(impl):
    q, k, v = tensors(batch=2)
    mask = torch.rand(2, 1, 4, 40, generator=torch.Generator().manual_seed(1)) < 0.5
    scores = decantkv.score(q, k, v, impl=impl, mask=mask)
    expected = oracle.leave_one_out_cost(q, k, v, scale=0.25, mask=mask)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rest", [0.5, 0.1, 1e-2, 1e-3, 1e-4, 1e-6])
@pytest.mark.parametrize("value", [1.0, 0.05])
def test_numerics_contract_with_an_attention_sink(impl, dtype, rest, value):
    q, k, v = (x.to(dtype) for x in with_sink(*tensors(keys=200, dim=32, window=8), rest, value))
    win64 = make_window(q.double(), k.double(), v.double())
    exact = reference.perturbation(win64)
    assert reference.softmax(win64).p_top.amin() > 1 - 20 * rest, "the planted sink is one"
    scores = decantkv.score(q, k, v, impl=impl)
    assert within_contract(scores, win64).all()
    above = exact[..., 3] > exact.median(-1).values
    assert (scores[..., 3] > scores.median(-1).values)[above].all()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_numerics_contract_where_a_value_equals_the_average(impl, dtype):
    q, k, v = tensors(keys=64, dim=32, window=1, group=1)
    for _ in range(30):  # the average moves with the value that is set to it
        v[:, :, 7] = oracle.attention(q, k, v, scale=32**-0.5)[:, :, 0]
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    win64 = make_window(q.double(), k.double(), v.double())
    assert reference.perturbation(win64)[..., 7].max() < 1e-4 * reference.perturbation(win64).amax()
    assert within_contract(decantkv.score(q, k, v, impl=impl), win64).all()


def test_the_published_rounding_fails_this_contract():
    """The judge can say no: rounding p and a to bf16 loses the sink, as it does in public code."""
    q, k, v = with_sink(*tensors(keys=200, dim=32, window=8), 1e-4)
    win64 = make_window(q, k, v)
    rows = reference.softmax(win64)
    p, a = rows.p.bfloat16().double(), rows.a.bfloat16().double()
    odds = p / (1 - p).clamp_min(1e-6)
    careless = (odds * torch.cdist(a.flatten(2, 3), v).view_as(odds)).square().sum(3).mean(2)
    assert not within_contract(careless, win64).all()


@pytest.mark.parametrize("quantity", ["perturbation", "attention_mass"])
@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_tiles_of_any_length_agree_with_the_reference(monkeypatch, quantity, reduce):
    q, k, v = tensors(keys=333, batch=2, window=8)
    win = make_window(q, k, v, lengths=torch.tensor([333, 140]), softcap=5.0)
    expected = getattr(reference, quantity)(win, reduce=reduce)
    for size in (1, 300_000, 10**9):
        monkeypatch.setattr(tiled, "scratch_bytes", lambda device, size=size: size)
        torch.testing.assert_close(
            getattr(tiled, quantity)(win, reduce=reduce).double(), expected, rtol=1e-5, atol=1e-12
        )


@pytest.mark.parametrize("weigh", ["value", "output"])
@pytest.mark.parametrize("case", ["plain", "sink of the model", "sink key", "pads", "lone keys", "output given"])
def test_values_a_thousand_spreads_from_zero_keep_their_digits(monkeypatch, case, weigh):
    q, k, v = tensors(keys=200, batch=2, window=4, dtype=torch.float32)
    if case == "sink key":
        q, k, v = with_sink(q, k, v, 1e-3)
    v = v + 1000 * torch.randn(2, 2, 1, 16, generator=torch.Generator().manual_seed(1)).sign()
    if case == "pads":  # whose values lie elsewhere
        v[1, :, :170] = 0.0
    options = {
        "pads": {"lengths": torch.tensor([200, 30])},
        "lone keys": {"lengths": torch.tensor([3, 1])},  # rows that see nothing, one key, two
        "sink of the model": {"sink_logits": torch.linspace(-1, 2, 6)},
    }.get(case, {})
    w_o = torch.randn(6, 16, 24, generator=torch.Generator().manual_seed(2))
    double = {name: x.double() if x.is_floating_point() else x for name, x in options.items()}
    win64 = make_window(q.double(), k.double(), v.double(), output_projection=w_o.double(), **double)
    if case == "output given":
        logits = reference.logits(win64, torch.float64)
        out = (logits.softmax(-1) @ win64.v[:, :, None]).flatten(1, 2)
        options = {"out": out.float(), "lse": logits.logsumexp(-1).flatten(1, 2).float()}
    win = make_window(q, k, v, output_projection=w_o, **options)
    monkeypatch.setattr(tiled, "_tile_length", lambda win: 7)
    exact = reference.perturbation(win64, weigh=weigh)
    assert (exact > 0).any()
    for reduce in ("sum", "max"):
        exact = reference.perturbation(win64, weigh=weigh, reduce=reduce)
        scores = tiled.perturbation(win, weigh=weigh, reduce=reduce)
        torch.testing.assert_close(scores.double(), exact, rtol=1e-3, atol=0)


def test_attention_mass_is_the_softmax_summed_over_the_window():
    q, k, v = tensors(keys=12, window=3, group=2)
    s = (q.view(1, 2, 2, 3, 16) @ k[:, :, None].mT) / 4
    s = s.masked_fill(~torch.ones(3, 12, dtype=torch.bool).tril(9), -torch.inf)
    p = s.softmax(-1)
    for impl in IMPLS:
        scores = compute("attention_mass", make_window(q, k, v), impl=impl)
        torch.testing.assert_close(scores.double(), p.sum(3).mean(2), rtol=1e-5, atol=1e-9)


def test_strided_and_expanded_inputs():
    q, k, v = tensors(keys=50, dtype=torch.float32)
    strided = k.transpose(1, 2).contiguous().transpose(1, 2)
    expanded = v[:, :1].expand(-1, 2, -1, -1)
    same = decantkv.score(q, k, expanded.contiguous())
    torch.testing.assert_close(decantkv.score(q, strided, expanded), same, rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 4), st.floats(-20, 20), st.floats(0.1, 10))
def test_properties_of_the_score(seed, window, group, shift, factor):
    q, k, v = tensors(window=window, group=group, keys=30, seed=seed)
    scores = reference.perturbation(make_window(q, k, v))
    assert (scores >= 0).all()
    moved = reference.perturbation(make_window(q, k, v + shift))
    torch.testing.assert_close(moved, scores, rtol=1e-7, atol=1e-12)
    scaled = reference.perturbation(make_window(q, k, v * factor))
    torch.testing.assert_close(scaled, scores * factor**2, rtol=1e-9, atol=0)
    order = torch.cat([torch.randperm(30 - window), torch.arange(30 - window, 30)])
    permuted = reference.perturbation(make_window(q, k[:, :, order], v[:, :, order]))
    torch.testing.assert_close(permuted, scores[:, :, order], rtol=1e-9, atol=1e-12)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of every storage made while it is on, until the storage dies."""

    def __init__(self, *inputs):
        super().__init__()
        self.live, self.peak = 0, 0
        self.known = {x.untyped_storage()._cdata for x in inputs}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self.known:
                storage = x.untyped_storage()
                self.known.add(storage._cdata)
                self.live += storage.nbytes()
                weakref.finalize(storage, self._died, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return out

    def _died(self, key, size):
        self.known.discard(key)
        self.live -= size


@pytest.mark.parametrize("method", ["dropkv", "dropkv by W_O", "andpro", "andpro-chunks"])
def test_scratch_stays_under_32_mb_at_128k_keys(method):
    keys = 131_072
    k = torch.randn(1, 8, keys, 32, dtype=torch.bfloat16).repeat(1, 1, 1, 4)
    heads, window = {"dropkv": (32, 8), "dropkv by W_O": (8, 8)}.get(method, (32, 3))
    q = torch.randn(1, heads, window, 128, dtype=torch.bfloat16)
    win = make_window(q, k, k, output_projection=torch.randn(heads, 128, 64) if "W_O" in method else None)
    chosen = decantkv.DropKV(weigh="output") if "W_O" in method else resolve(method, window=q.shape[2])
    with LiveBytes(q, k) as counter:
        scores = chosen.score(win, impl="torch")
    held = counter.peak - scores.numel() * 4
    assert 2**20 < held <= 32 * 2**20


def test_tiles_on_a_gpu_are_longer_and_still_bounded(monkeypatch):
    k = torch.randn(1, 8, 32_768, 32, dtype=torch.bfloat16).repeat(1, 1, 1, 4)
    q = torch.randn(1, 32, 8, 128, dtype=torch.bfloat16)
    short = decantkv.score(q, k, k, impl="torch")
    monkeypatch.setattr(tiled, "scratch_bytes", lambda device: scratch.GPU_SCRATCH_BYTES)
    with LiveBytes(q, k) as counter:
        scores = decantkv.score(q, k, k, impl="torch")
    torch.testing.assert_close(scores, short, rtol=1e-4, atol=1e-9)
    assert scratch.GPU_SCRATCH_BYTES / 2 < counter.peak - scores.numel() * 4 <= 2 * scratch.GPU_SCRATCH_BYTES


@pytest.mark.parametrize(("memory", "expected"), [(141 * 2**30, 256), (8 * 2**30, 128), (2**29, 16)])
def test_how_long_tiles_are_on_which_card(monkeypatch, memory, expected):
    card = SimpleNamespace(total_memory=memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert scratch.scratch_bytes(torch.device("cuda", 0)) == expected * 2**20
    assert scratch.scratch_bytes(torch.device("cpu")) == 16 * 2**20


BAD_INPUT = [
    ({"q_window": "x"}, TypeError, "q_window"),
    ({"k": torch.ones(2, 2)}, ValueError, "k: expected 4 dimensions"),
    ({"k": torch.ones(1, 2, 40, 16, dtype=torch.int64)}, TypeError, "k: expected a floating-point"),
    ({"q_window": torch.ones(1, 5, 4, 16)}, ValueError, "q_window: expected a multiple of k's 2 KV heads, got 5"),
    ({"q_window": torch.ones(1, 6, 41, 16)}, ValueError, "1 to 40 window positions"),
    ({"v": torch.ones(1, 2, 39, 16)}, ValueError, "v: expected"),
    ({"scale": float("nan")}, ValueError, "scale"),
    ({"lengths": torch.tensor([1, 2])}, ValueError, "lengths"),
    ({"mask": torch.ones(1, 1, 4, 40)}, ValueError, "mask"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"method": "dropvk"}, ValueError, "did you mean 'dropkv'"),
    ({"method": "dropkv:nature"}, ValueError, "preset"),
    ({"method": 3}, TypeError, "method"),
    ({"impl": "cuda"}, ValueError, "impl"),
    ({"impl": "triton"}, ValueError, "impl"),
    ({"windw": 8}, TypeError, "windw"),
    ({"window": 0}, ValueError, "window"),
    ({"window": "8"}, TypeError, "window"),
    ({"kernel_size": 4}, ValueError, "kernel_size"),
    ({"pool": "median"}, ValueError, "pool"),
]


@pytest.mark.parametrize(
    ("change", "error", "says"), BAD_INPUT, ids=lambda x: str(x)[:40] if isinstance(x, str) else ""
)
def test_bad_input_is_refused_at_the_door(change, error, says):
    q, k, v = tensors(dtype=torch.float32)
    arguments = {"q_window": q, "k": k, "v": v, **change}
    with pytest.raises(error, match=says):
        decantkv.score(**arguments)


@pytest.mark.parametrize("method", ["dropkv", "snapkv", "andpro", "caote"])
def test_an_empty_batch_has_empty_scores(method):
    q, k = torch.zeros(0, 4, 1, 8), torch.zeros(0, 2, 9, 8)
    for impl in ("reference", "torch"):
        assert decantkv.score(q, k, k, method=method, impl=impl, window=1).shape == (0, 2, 9)


@pytest.mark.parametrize("lengths", [[0], [-3], [10], [7.5], [float("nan")]])
def test_lengths_that_no_row_can_have(lengths):
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 9, 8)
    with pytest.raises((TypeError, ValueError), match="lengths: expected whole numbers from 1 to 9"):
        decantkv.score(q, k, k, lengths=torch.tensor(lengths))


@pytest.mark.parametrize("softcap", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_softcap_is_positive_and_finite(softcap):
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 9, 8)
    with pytest.raises(ValueError, match="softcap: expected"):
        decantkv.score(q, k, k, softcap=softcap)
