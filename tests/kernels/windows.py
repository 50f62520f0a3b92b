"""Windows for the kernels to score, planted sinks among them, and the contract their scores are held to."""

from __future__ import annotations

import dataclasses

import torch

from decantkv.scoring import reference
from decantkv.scoring.window import AttentionWindow, make_window

FLOOR = torch.finfo(torch.float32).tiny


def window(
    seed, *, B=1, H=2, g=4, w=8, N=300, D=64, Dv=None, dtype=torch.bfloat16, sink=0.0, device="cpu", average=False,
    heads_last=False, hints=False, **options,
):  # fmt: skip
    """A random window. `sink` plants a key with that much more logit; `average` a key whose value is the average."""
    rng = torch.Generator(device).manual_seed(seed)
    Dv = Dv or D

    def normal(*shape):
        x = torch.randn(*shape, generator=rng, device=device)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if heads_last else x

    u = normal(B, H, 1, D)
    u = u / u.norm(dim=-1, keepdim=True)
    q, k, v = normal(B, H * g, w, D), normal(B, H, N, D), normal(B, H, N, Dv)
    if sink:
        size = (sink * D**0.5) ** 0.5
        q += size * u.repeat_interleave(g, 1)
        k[:, :, N // 3] = size * u[:, :, 0]
        v[:, :, N // 3] *= 0.1
    if average:
        v[:, :, N // 2] = v.mean(2)
    win = make_window(q.to(dtype), k.to(dtype), v.to(dtype), **options)
    return with_hints(win) if hints else win


def widened(win: AttentionWindow) -> AttentionWindow:
    """The same rounded inputs in float64."""
    wide = {name: getattr(win, name).double() for name in ("q", "k", "v")}
    if win.sink_logits is not None:
        wide["sink_logits"] = win.sink_logits.double()
    return dataclasses.replace(win, **wide, out=None, lse=None)


def with_hints(win: AttentionWindow) -> AttentionWindow:
    """With the output and log-sum-exp a model's attention would hand over, rounded as it would."""
    wide = widened(win)
    rows = reference.softmax(wide)
    lse = reference.logits(wide, torch.float64).logsumexp(-1)
    if win.sink_logits is not None:
        sink = wide.sink_logits.view(1, win.num_kv_heads, win.group_size, 1)
        lse = torch.logaddexp(lse, sink.expand_as(lse))
    return dataclasses.replace(win, out=rows.a.flatten(1, 2).to(win.v.dtype), lse=lse.flatten(1, 2).float())


def allowed(win: AttentionWindow, expected, reduce="sum"):
    """|error| per key: 1 % of the score, and 1e-5 of what its parts weigh before they cancel.

    The second term is taken over the keys that are not a row's largest: those have a cost without cancellation.
    """
    wide = widened(win)
    rows = reference.softmax(wide)
    size = rows.a.square().sum(-1)[..., None] + wide.v.square().sum(-1)[:, :, None, None]
    return 0.01 * expected + 1e-5 * reference.reduce_rows(rows.odds.square() * size, reduce)


def assert_contract(scores, win, quantity="perturbation", reduce="sum"):
    """Scores against float64 on the same inputs, and every planted sink still above the median."""
    expected = getattr(reference, quantity)(widened(win), reduce=reduce)
    assert scores.dtype == torch.float32
    assert not scores.isnan().any()
    error = (scores.double() - expected).abs()
    bound = 0.01 * expected if quantity == "attention_mass" else allowed(win, expected, reduce)
    wrong = (error > bound) & (expected > 2 * FLOOR)
    assert not wrong.any(), (
        f"{int(wrong.sum())} keys, worst {float((error / bound.clamp_min(1e-300))[wrong].max()):.3g}"
    )
    assert (scores[expected < FLOOR / 2] <= FLOOR).all()
