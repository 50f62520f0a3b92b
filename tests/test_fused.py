"""Stand-ins for a model's small operations: the same numbers, in place only where they are wanted."""

from __future__ import annotations

import pytest
import torch
from transformers.models.cohere import modeling_cohere
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

import decantkv
from decantkv import fused, graphs
from tests import tiny
from tests.test_graphs import INPUTS, tape  # noqa: F401  (a fixture)

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
    found = fused.standins(torch.nn.Sequential(part))
    assert len(found) == fits
    if fits:
        x = torch.randn(2, 3, 24)
        torch.testing.assert_close(found[0].call(x), part(x))


@pytest.mark.parametrize(
    ("file", "fits"), [(modeling_llama, True), (modeling_qwen3, True), (modeling_cohere, False)]
)  # Cohere turns neighbours, not halves
def test_a_rotation_stands_in_where_it_is_the_same(file, fits):
    original = file.apply_rotary_pos_emb
    call = fused.standing_in(original, turn, CPU, WIDE)
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
    found = [*fused.standins(model), fused.Standin(vars(modeling_llama), "apply_rotary_pos_emb", turn)]
    assert len(found) == len(norms) + 1
    rotary = modeling_llama.apply_rotary_pos_emb
    with pytest.raises(KeyError):
        _fail_inside(found, norms)
    assert modeling_llama.apply_rotary_pos_emb is rotary
    assert not any("forward" in vars(norm) for norm in norms)


def _fail_inside(found, norms):
    with fused.in_place(found):
        assert modeling_llama.apply_rotary_pos_emb is turn
        assert all("forward" in vars(norm) for norm in norms)
        raise KeyError


def test_a_norm_that_another_library_wrapped_is_left_alone():
    model = tiny.llama()
    model.model.norm.forward = model.model.norm.forward
    assert len(fused.standins(model)) == 2 * len(model.model.layers)


def test_recorded_steps_use_them_and_plain_ones_do_not(tape, monkeypatch):  # noqa: F811
    used = []
    monkeypatch.setattr(fused, "_rms_norm", lambda x, weight, eps: used.append(1) or _norm(x, weight, eps))
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


def test_a_stand_in_that_is_wrong_is_found_and_left(tape, monkeypatch):  # noqa: F811
    model = tiny.llama()
    wrong = [fused.Standin(vars(model.model.norm), "forward", lambda x: 1.1 * _norm(x, model.model.norm.weight, 1e-6))]
    monkeypatch.setattr(decantkv.integration, "standins", lambda model: wrong)
    options = {"max_new_tokens": 10, **tiny.GREEDY}
    with decantkv.attach(model, budget=0.3, decode="model"):
        plain = model.generate(**INPUTS["one"], **options)
    with decantkv.attach(model, budget=0.3, decode="own") as run, pytest.warns(UserWarning, match="without stand-ins"):
        assert torch.equal(model.generate(**INPUTS["one"], **options), plain)
    assert (run.trust.broken, run.trust.checked, list(run.trust.standins)) == (None, graphs.CHECKED, [])
    assert run.trust.replayed == 10 - 3  # the prompt, the step that takes room, the one that differed


def _norm(x, weight, eps):
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
