"""Stand-ins for a model's small operations: the same numbers, in place only where they are wanted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import decantkv
from decantkv.decode import fused_ops, graphs
from tests.support import tiny
from tests.support.tape import INPUTS

CPU, WIDE = torch.device("cpu"), torch.float32


def turn(q, k, cos, sin):
    """What the kernel computes, written apart from transformers."""
    half = q.shape[3] // 2
    turned = []
    for x in (q, k):
        a, b = x[..., :half], x[..., half:]
        c, s = cos[:, None], sin[:, None]
        turned.append(torch.cat([a * c[..., :half] - b * s[..., :half], b * c[..., half:] + a * s[..., half:]], -1))
    return tuple(turned)


@pytest.mark.parametrize(
    ("norm", "fits"),
    [
        (modeling_llama.LlamaRMSNorm, True),
        (modeling_qwen3.Qwen3RMSNorm, True),
        (modeling_gemma2.Gemma2RMSNorm, False),  # multiplies by 1 + weight
    ],
)
def test_a_norm_stands_in_where_it_is_the_same(norm, fits):
    part = norm(24)
    torch.nn.init.normal_(part.weight, generator=torch.Generator().manual_seed(0))
    found = fused_ops.standins(torch.nn.Sequential(part))
    assert len(found) == fits
    if fits:
        x = torch.randn(2, 3, 24)
        torch.testing.assert_close(found[0].call(x), part(x))


@pytest.mark.parametrize(
    ("file", "fits"), [(modeling_llama, True), (modeling_qwen3, True), (modeling_cohere, False)]
)  # Cohere turns neighbours, not halves
def test_a_rotation_stands_in_where_it_is_the_same(file, fits):
    original = file.apply_rotary_pos_emb
    call = fused_ops.standing_in(original, turn, CPU, WIDE)
    assert (call is not None) == fits
    if call is not None:
        q, k, angle = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.rand(1, 5, 4).repeat(1, 1, 2)
        cos, sin = angle.cos(), angle.sin()
        for x, y in zip(call(q, k, cos, sin), original(q, k, cos, sin), strict=True):
            torch.testing.assert_close(x, y)
        with_heads_behind = [x.transpose(1, 2) for x in (q, k)]  # what it was not made for goes to the original
        for x, y in zip(
            call(*with_heads_behind, cos, sin, unsqueeze_dim=2),
            original(*with_heads_behind, cos, sin, unsqueeze_dim=2),
            strict=True,
        ):
            torch.testing.assert_close(x, y)


def test_everything_is_put_back_even_after_an_error():
    model = tiny.llama()
    norms = [part for part in model.modules() if type(part).__name__ == "LlamaRMSNorm"]
    found = [*fused_ops.standins(model), fused_ops.Standin(vars(modeling_llama), "apply_rotary_pos_emb", turn)]
    assert len(found) == len(norms) + 1
    rotary = modeling_llama.apply_rotary_pos_emb
    with pytest.raises(KeyError):
        _fail_inside(found, norms)
    assert modeling_llama.apply_rotary_pos_emb is rotary
    assert not any("forward" in vars(norm) for norm in norms)


def _fail_inside(found, norms):
    with fused_ops.in_place(found):
        assert modeling_llama.apply_rotary_pos_emb is turn
        assert all("forward" in vars(norm) for norm in norms)
        raise KeyError


def test_a_norm_that_another_library_wrapped_is_left_alone():
    model = tiny.llama()
    model.model.norm.forward = model.model.norm.forward
    assert len(fused_ops.standins(model)) == 2 * len(model.model.layers)


def test_recorded_steps_use_them_and_plain_ones_do_not(tape, monkeypatch):
    used = []
    monkeypatch.setattr(fused_ops, "_rms_norm", lambda x, weight, eps: used.append(1) or _norm(x, weight, eps))
    model = tiny.llama()
    options = {"max_new_tokens": 8, **tiny.GREEDY}
    with decantkv.attach(model, budget=0.3, decode="model"):
        plain = model.generate(**INPUTS["one"], **options)
    assert not used
    with decantkv.attach(model, budget=0.3, decode="own") as run:
        assert torch.equal(model.generate(**INPUTS["one"], **options), plain)
    norms = 2 * len(model.model.layers) + 1
    assert len(used) == 3 * norms  # tried, rehearsed, recorded
    assert (run.trust.broken, run.trust.checked) == (None, 2)


def test_a_stand_in_that_is_wrong_is_found_and_left(tape, monkeypatch):
    model = tiny.llama()
    wrong = [
        fused_ops.Standin(vars(model.model.norm), "forward", lambda x: 1.1 * _norm(x, model.model.norm.weight, 1e-6))
    ]
    monkeypatch.setattr(decantkv.attachment, "standins", lambda model: wrong)
    options = {"max_new_tokens": 10, **tiny.GREEDY}
    with decantkv.attach(model, budget=0.3, decode="model"):
        plain = model.generate(**INPUTS["one"], **options)
    with decantkv.attach(model, budget=0.3, decode="own") as run:
        with pytest.warns(UserWarning, match="without stand-ins"):
            got = model.generate(**INPUTS["one"], **options)
        assert torch.equal(got, plain)
        assert (run.trust.broken, run.trust.checked, list(run.trust.standins)) == (None, graphs.CHECKED, [])
    assert run.trust.replayed == 10 - 3  # the prompt, the step that takes room, the one that differed


def _norm(x, weight, eps):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def _matvec(x, weight, bias=None):
    """What the kernel computes, written apart from torch's linear layer: float32, rounded once."""
    wide = (weight.float() * x.float().flatten()).sum(1) + (0 if bias is None else bias.float())
    return wide.to(x.dtype).reshape(*x.shape[:-1], -1)


def _silu_times(x, gate, up):
    one, two = (_matvec(x, weight).float() for weight in (gate, up))
    return ((one / (1 + (-one).exp())).to(x.dtype).float() * two).to(x.dtype)


@pytest.fixture
def kernels(monkeypatch):
    """The kernels' names on the CPU, in torch; says which of them ran."""
    ran = []

    def counted(name, call):
        return lambda *args: ran.append(name) or call(*args)

    modules = {
        "matvec": SimpleNamespace(
            matvec=counted("matvec", _matvec),
            gated=counted("gated", _silu_times),
            three=counted("three", lambda x, weights, biases: tuple(map(_matvec, [x] * 3, weights, biases))),
        ),
        "step": SimpleNamespace(norm=_norm, rotate=turn),
    }
    monkeypatch.setattr(fused_ops, "kernels_run_on", lambda device: True)
    monkeypatch.setattr(fused_ops, "kernels_on", lambda device, name: modules[name])
    return ran


def bare(inner=24, rows=40, dtype=torch.bfloat16, bias=True):
    torch.manual_seed(0)
    return torch.nn.Linear(inner, rows, bias=bias, dtype=dtype)


@torch.no_grad()
def test_a_linear_layer_stands_in_for_one_token(kernels):
    part = bare()
    (found,) = fused_ops.standins(torch.nn.Sequential(part))
    kernels.clear()
    x = torch.randn(1, 1, 24, dtype=torch.bfloat16)
    with fused_ops.in_place([found]):
        torch.testing.assert_close(part(x), torch.nn.functional.linear(x, part.weight, part.bias))
    assert kernels == ["matvec"]


@torch.no_grad()
@pytest.mark.parametrize(
    "x",
    [torch.randn(2, 1, 24).bfloat16(), torch.randn(1, 48).bfloat16()[:, ::2], torch.randn(0, 24).bfloat16()],
    ids=["two tokens", "strides", "nothing"],
)
def test_other_inputs_go_to_the_layer_itself(kernels, x):
    part = bare()
    (found,) = fused_ops.standins(torch.nn.Sequential(part))
    kernels.clear()
    with fused_ops.in_place([found]):
        assert torch.equal(part(x), torch.nn.functional.linear(x, part.weight, part.bias))
        with pytest.raises(RuntimeError, match="dtype"):
            part(torch.randn(1, 24))
    assert not kernels


@torch.no_grad()
def test_autocast_keeps_its_own_dtype(kernels):
    part, x = bare(), torch.randn(1, 24, dtype=torch.bfloat16)
    (found,) = fused_ops.standins(torch.nn.Sequential(part))
    with fused_ops.in_place([found]), torch.autocast("cpu", torch.float16):
        assert part(x).dtype == torch.float16


def wrapped(part):
    part.forward = part.forward


def transposed(part):
    part.weight = torch.nn.Parameter(part.weight.detach().t().contiguous().t())


class Own(torch.nn.Linear):
    """Another library's linear layer."""


@pytest.mark.parametrize(
    "change",
    [
        wrapped,
        transposed,
        lambda part: part.float(),
        lambda part: part.register_forward_hook(lambda *x: None),
        lambda part: part.register_forward_pre_hook(lambda *x: None),
        lambda part: setattr(part, "__class__", Own),
    ],
    ids=["wrapped", "transposed", "float32", "hook", "pre-hook", "subclass"],
)
def test_a_linear_layer_that_is_more_or_less_than_torchs_is_left_alone(kernels, change):
    part = bare()
    change(part)
    assert not fused_ops.standins(torch.nn.Sequential(part))


def test_a_linear_layer_whose_kernel_is_wrong_is_left_alone(kernels, monkeypatch):
    wrong = SimpleNamespace(matvec=lambda x, weight, bias: 1.1 * _matvec(x, weight, bias), gated=_silu_times)
    monkeypatch.setattr(fused_ops, "kernels_on", lambda device, name: wrong)
    assert not fused_ops.standins(torch.nn.Sequential(bare()))


def test_each_shape_is_tried_once(kernels):
    found = fused_ops.standins(torch.nn.Sequential(*[bare() for _ in range(5)], bare(bias=False), bare(rows=48)))
    assert len(found) == 7
    assert len(kernels) == 3


@torch.no_grad()
def test_a_gated_mlp_reads_gate_and_up_at_once(kernels):
    model = tiny.llama().bfloat16()
    mlp, x = model.model.layers[0].mlp, torch.randn(1, 1, 64, dtype=torch.bfloat16)
    plain, several = mlp(x), torch.randn(1, 3, 64, dtype=torch.bfloat16)
    found = fused_ops.standins(model)
    kernels.clear()
    with fused_ops.in_place(found):
        got = mlp(x)
        assert kernels == ["gated", "matvec"]  # down is a linear layer like others
        torch.testing.assert_close(got, plain, rtol=0.02, atol=0.02 * float(plain.abs().max()))
        mlp(several)
        assert kernels == ["gated", "matvec"]


@torch.no_grad()
def test_queries_keys_and_values_are_projected_at_once_whichever_is_asked_for_first(kernels):
    attention = qwen2().model.layers[0].self_attn  # with biases
    found = fused_ops.standins(torch.nn.Sequential(attention))
    x, other = (torch.randn(1, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    expected = {id(part): [part(y) for y in (x, other)] for part in parts}
    kernels.clear()
    with fused_ops.in_place(found):
        for part in reversed(parts):
            torch.testing.assert_close(part(x), expected[id(part)][0])
        assert kernels == ["three"]
        torch.testing.assert_close(parts[0](x), expected[id(parts[0])][0])  # asked for again: x may have changed
        torch.testing.assert_close(
            parts[1](other), expected[id(parts[1])][1]
        )  # another input before k and v were taken
        torch.testing.assert_close(parts[2](other), expected[id(parts[2])][1])
        assert kernels == ["three"] * 3


def qwen2():
    return tiny.qwen2().bfloat16()


@pytest.mark.parametrize(
    "change",
    [lambda a: wrapped(a.k_proj), lambda a: setattr(a, "v_proj", bare(64, 16, bias=False)), lambda a: a.q_proj.float()],
    ids=["wrapped part", "one without bias", "dtype"],
)
def test_projections_that_differ_in_more_than_rows_are_left_to_themselves(kernels, change):
    attention = qwen2().model.layers[0].self_attn
    change(attention)
    found = fused_ops.standins(torch.nn.Sequential(attention))
    assert "three" not in kernels
    homes = [x.home for x in found]
    assert any(home is vars(attention.o_proj) for home in homes)  # each that fits still stands for itself


class Halved(modeling_llama.LlamaMLP):
    """The same parts in another formula."""

    def forward(self, x):
        return super().forward(x) / 2


@pytest.mark.parametrize(
    "change",
    [
        lambda mlp: setattr(mlp, "__class__", Halved),
        lambda mlp: setattr(mlp, "act_fn", torch.nn.GELU()),
        lambda mlp: setattr(mlp, "up_proj", bare(64, 96)),
        lambda mlp: wrapped(mlp.gate_proj),
        lambda mlp: mlp.act_fn.register_forward_hook(lambda *x: None),
        lambda mlp: mlp.register_forward_hook(lambda *x: None),
        wrapped,
    ],
    ids=["formula", "activation", "bias", "wrapped part", "hook on a part", "hook", "wrapped"],
)
def test_an_mlp_that_is_more_or_less_than_that_is_left_alone(kernels, change):
    mlp = tiny.llama().bfloat16().model.layers[0].mlp
    every = [x.home for x in fused_ops.standins(torch.nn.Sequential(mlp))]
    assert any(home is vars(mlp) for home in every)
    change(mlp)
    assert not any(x.home is vars(mlp) for x in fused_ops.standins(torch.nn.Sequential(mlp)))


@torch.no_grad()
def test_a_whole_step_is_the_models_own(kernels):
    model = tiny.llama().bfloat16()
    ids = torch.tensor([[5]])
    plain = model(ids).logits
    state = torch.get_rng_state()
    found = fused_ops.standins(model)
    assert torch.equal(torch.get_rng_state(), state)  # what a user samples stays the same
    kernels.clear()
    with fused_ops.in_place(found):
        got = model(ids).logits
    layers = len(model.model.layers)
    counts = [kernels.count(name) for name in ("three", "gated", "matvec")]
    assert counts == [layers, layers, 2 * layers + 1]  # o, down; the head
    apart = (got - plain).float().norm() / plain.float().norm()
    assert float(apart) <= 8 * torch.finfo(torch.bfloat16).eps
    assert torch.equal(model(ids).logits, plain)


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_step_on_a_gpu_reads_its_weights_by_the_kernels(dtype, monkeypatch):
    matvec = pytest.importorskip("decantkv.kernels.matvec")
    model = tiny.llama(hidden_size=256, intermediate_size=688, mlp_bias=False).to("cuda", dtype)
    ids = torch.tensor([[5]], device="cuda")
    plain, ran = model(ids).logits, []
    for name in ("matvec", "gated", "three"):
        original = getattr(matvec, name)
        monkeypatch.setattr(matvec, name, lambda *args, n=name, call=original: ran.append(n) or call(*args))
    found = fused_ops.standins(model)
    ran.clear()
    with fused_ops.in_place(found):
        got = model(ids).logits
    layers = len(model.model.layers)
    assert [ran.count(name) for name in ("three", "gated", "matvec")] == [layers, layers, 2 * layers + 1]
    apart = (got - plain).float().norm() / plain.float().norm()
    assert float(apart) <= 8 * torch.finfo(dtype).eps
