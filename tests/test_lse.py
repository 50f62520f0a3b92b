"""Scoring by the attention's own output and denominators: one pass over the keys, the same tokens, the same output."""

from __future__ import annotations

import json

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from decantkv.hf.sdpa import attend_with_lse
from decantkv.scoring import compute, reference
from decantkv.scoring.window import make_window
from tests.support import tiny
from tests.support.families import build
from tests.support.judge import evicted_and_judged, logits_with
from tests.test_scoring import tensors, with_sink, within_contract

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def hinted(q, k, v, dtype=torch.float32, **options):
    """A window in `dtype` with the output and log-sum-exp that float64 attention gives it, and that in float64."""
    wide = make_window(q.double(), k.double(), v.double(), **options)
    s = reference.logits(wide, torch.float64)
    if wide.sink_logits is not None:
        sink = wide.sink_logits.view(1, wide.num_kv_heads, wide.group_size, 1, 1).expand(*s.shape[:4], 1)
        s = torch.cat([s, sink], -1)
    lse, out = s.logsumexp(-1).flatten(1, 2), reference.softmax(wide).a.flatten(1, 2)
    narrow = {**options, "out": out.to(dtype), "lse": lse.float()}
    return make_window(q.to(dtype), k.to(dtype), v.to(dtype), **narrow), wide


CASES = {
    "plain": ({}, {}),
    "one row": ({"window": 1}, {}),
    "a window of everything": ({"keys": 4, "window": 4}, {}),
    "a wide group": ({"heads": 1, "group": 7, "window": 8, "keys": 63}, {}),
    "padded": ({"batch": 3}, {"lengths": torch.tensor([40, 17, 5])}),
    "capped": ({}, {"softcap": 3.0}),
    "learned sinks": ({}, {"sink_logits": torch.linspace(-1, 2, 6, dtype=torch.float64)}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("reduce", ["sum", "max"])
@pytest.mark.parametrize("quantity", ["perturbation", "attention_mass", "alignment", "chunk_alignment"])
def test_hints_give_what_two_passes_give(name, quantity, reduce):
    shape, options = CASES[name]
    win, wide = hinted(*tensors(**shape), **options)
    expected = getattr(reference, quantity)(wide, reduce=reduce)
    torch.testing.assert_close(
        compute(quantity, win, impl="torch", reduce=reduce).double(), expected, rtol=2e-4, atol=1e-6
    )


def test_hints_are_what_is_used():
    win, _ = hinted(*tensors())
    for quantity in ("perturbation", "attention_mass", "alignment", "chunk_alignment"):
        moved = make_window(win.q, win.k, win.v, out=win.out + 1, lse=win.lse + 1)
        assert not torch.allclose(compute(quantity, moved, impl="torch"), compute(quantity, win, impl="torch"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", [0.3, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("value", [1.0, 1e-3])
def test_a_dominant_key_needs_nothing_of_the_output(dtype, rest, value):
    q, k, v = (x.to(dtype) for x in with_sink(*tensors(window=8, keys=300, dim=64), rest, value))
    win, wide = hinted(q, k, v, dtype)
    scores = compute("perturbation", win, impl="torch")
    assert bool(within_contract(scores, wide)[:, :, 3].all())
    if dtype == torch.float32:
        assert bool(within_contract(scores, wide).all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [8, 2])
def test_the_op_is_the_one_sdpa_runs(device, heads):
    g = torch.Generator().manual_seed(0)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (torch.randn(2, h, 200, 64, generator=g).to(device, dtype) for h in (8, heads, heads))
    for backend in ["default"] if device == "cpu" else ["default", "FLASH_ATTENTION", "CUDNN_ATTENTION"]:
        allowed = list(SDPBackend.__members__.values())
        allowed = allowed if backend == "default" else [SDPBackend.__members__[backend]]
        with sdpa_kernel([b for b in allowed if b not in (SDPBackend.ERROR, SDPBackend.OVERRIDEABLE)]):
            made = attend_with_lse(q, k, v, scale=0.2)
            same = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=0.2, enable_gqa=heads != 8
            )
        assert not isinstance(made, str), made
        out, lse = made
        assert torch.equal(out, same)
        s = q.double() @ k.repeat_interleave(8 // heads, 1).double().mT * 0.2
        s = s.masked_fill(~torch.ones(200, 200, dtype=torch.bool, device=device).tril(), -torch.inf)
        torch.testing.assert_close(lse.double(), s.logsumexp(-1), rtol=0, atol=1e-5)


def test_without_a_fused_op_it_says_so():
    q = torch.randn(1, 2, 30, 16)
    with sdpa_kernel(SDPBackend.MATH):
        assert "math, which gives no denominators" in attend_with_lse(q, q, q, scale=1.0)
    assert "10 new tokens beside 20 older ones" in attend_with_lse(q[:, :, :10], q, q, scale=1.0)
    assert "16 and 8 dimensions" in attend_with_lse(q, q, q[..., :8], scale=1.0)


def kept_and_said(model, inputs, **settings):
    """Kept masks, logits of the answer, and the report."""
    options = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True, **tiny.GREEDY}
    with decantkv.attach(model, budget=0.2, **settings) as run:
        out = model.generate(**inputs, **options)
    layers = out[cache_argument(model)].layers
    return [layer.kept.indices for layer in layers], torch.stack(out.logits), run.report()


ONE = {"input_ids": tiny.prompt(150)}


@pytest.mark.parametrize("settings", [
    {}, {"method": "snapkv"}, {"method": "adadropkv"}, {"method": "criticalkv"}, {"method": "andpro"},
    {"method": "tova"}, {"allocation": "shared"}, {"allocation": "layer"}, {"decode": "own"},
    {"reduce": "max"}, {"weigh": "output"},
], ids=str)  # fmt: skip
def test_attached_it_keeps_the_same_tokens_and_says_the_same(settings):
    model = tiny.llama()
    kept, logits, plain = kept_and_said(model, ONE, **settings)
    kept_once, logits_once, report = kept_and_said(model, ONE, reuse_lse=True, **settings)
    assert all(torch.equal(a, b) for a, b in zip(kept, kept_once, strict=True))
    assert torch.equal(logits[0], logits_once[0]), "the prompt's own output is the same bit for bit"
    assert torch.equal(logits, logits_once)
    assert (report.reused_lse, report.without_lse, plain.reused_lse) == (3, {}, 0)
    assert "scored 3 times by the attention's own output" in str(report)


def test_it_is_judged_by_a_full_cache():
    evicted, judged, _ = evicted_and_judged(
        tiny.llama(), ONE, [torch.tensor([[7]]), torch.tensor([[3, 5]])], budget=0.2, reuse_lse=True
    )
    torch.testing.assert_close(evicted, judged, rtol=0, atol=1e-5)


PADDED = tiny.left_padded([tiny.prompt(150, seed=1), tiny.prompt(60, seed=2)])


@pytest.mark.parametrize(("attention", "inputs", "settings", "says"), [
    ("sdpa", PADDED, {}, "the prompt has a mask"),
    ("eager", ONE, {}, "the attention is 'eager', not 'sdpa'"),
    ("sdpa", ONE, {"prefill_chunk": 64}, "the prompt came in chunks"),
])  # fmt: skip
def test_where_it_cannot_the_report_says_why(attention, inputs, settings, says):
    model = tiny.llama(attention=attention)
    kept, logits, _ = kept_and_said(model, inputs, **settings)
    kept_once, logits_once, report = kept_and_said(model, inputs, reuse_lse=True, **settings)
    assert all(torch.equal(a, b) for a, b in zip(kept, kept_once, strict=True))
    assert torch.equal(logits, logits_once)
    (reason,) = report.without_lse
    assert says in reason
    assert (report.reused_lse, report.without_lse[reason]) == (0, 3)
    assert any(says in warning and "3 times" in warning for warning in report.warnings)
    assert json.loads(report.to_json())["without_lse"] == report.without_lse


def test_heads_whose_values_are_of_another_width_go_on_in_two_passes():
    model = build("deepseek_v3", "sdpa")
    with decantkv.attach(model, budget=0.3, reuse_lse=True) as run:
        logits_with(model, run.new_cache(), ONE, [])
    report = run.report()
    assert report.reused_lse == 0
    assert report.without_lse
    assert all("dimensions" in reason for reason in report.without_lse)


@pytest.mark.parametrize("method", ["knorm", "streaming", "h2o", "random"])
def test_methods_that_look_at_no_windows_attention_refuse_it(method):
    with pytest.raises(ValueError, match="reuse_lse: expected a method that scores by the last queries' attention"):
        decantkv.attach(tiny.llama(), method, budget=0.3, reuse_lse=True)
    with pytest.raises(ValueError, match="got impl='reference'"):
        decantkv.attach(tiny.llama(), budget=0.3, reuse_lse=True, impl="reference")
    with pytest.raises(TypeError, match="reuse_lse: expected True or False, got 1"):
        decantkv.attach(tiny.llama(), budget=0.3, reuse_lse=1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_the_kernels_take_the_hints(dtype):
    model = tiny.llama(head_dim=64).to("cuda", dtype)
    inputs = {"input_ids": tiny.prompt(600).cuda()}
    kept, logits, _ = kept_and_said(model, inputs, impl="triton")
    kept_once, logits_once, report = kept_and_said(model, inputs, impl="triton", reuse_lse=True)
    same = [float((a == b).float().mean()) for a, b in zip(kept, kept_once, strict=True)]
    if dtype == torch.bfloat16:  # flash or cuDNN; float32 runs the memory-efficient op, which takes no groups
        assert (report.reused_lse, report.without_lse) == (3, {})
    assert min(same) > 0.97
    assert torch.equal(logits[0], logits_once[0])


def test_a_prompt_within_its_budget_leaves_no_output_behind():
    model = tiny.llama()
    cache = decantkv.EvictingCache(model, budget=1.0, reuse_lse=True)
    with torch.no_grad():
        model(tiny.prompt(300), **{cache_argument(model): cache})
    assert not any(layer.reading for layer in cache.layers)
