"""Windows for the kernels to score, planted sinks among them, and the contract their scores are held to."""

from __future__ import annotations

import dataclasses

import torch

from decantkv.scoring import reference
from decantkv.scoring.window import AttentionWindow, make_window

FLOOR = torch.finfo(torch.float32).tiny
# kernel B's other last steps: a quantity's name and options
QUANTITIES = {
    "alignment": ("alignment", {}),
    "alignment max": ("alignment", {"reduce": "max"}),
    "chunks": ("chunk_alignment", {"row_pool": "max", "kernel_size": 7, "chunk": 4}),
    "chunks of 3, avg": ("chunk_alignment", {"row_pool": "avg", "kernel_size": 3, "chunk": 3}),
    "chunks max": ("chunk_alignment", {"row_pool": "none", "kernel_size": 1, "chunk": 4, "reduce": "max"}),
    "W_O": ("perturbation", {"weigh": "output"}),
    "W_O max": ("perturbation", {"weigh": "output", "reduce": "max"}),
    "pooled mass": ("attention_mass", {"row_pool": "avg", "kernel_size": 5, "reduce": "max"}),
}


def window(
    seed, *, B=1, H=2, g=4, w=8, N=300, D=64, Dv=None, dtype=torch.bfloat16, sink=0.0, device="cpu", average=False,
    heads_last=False, hints=False, projection=0, **options,
):  # fmt: skip
    """A random window. `sink` plants a key with that much more logit; `average` a key whose value is the average;
    `projection` gives it a W_O of that width."""
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
    if projection:
        options["output_projection"] = normal(H * g, Dv, projection).to(dtype)
    win = make_window(q.to(dtype), k.to(dtype), v.to(dtype), **options)
    return with_hints(win) if hints else win


def widened(win: AttentionWindow) -> AttentionWindow:
    """The same rounded inputs in float64."""
    wide = {name: getattr(win, name).double() for name in ("q", "k", "v")}
    for name in ("sink_logits", "output_projection"):
        if getattr(win, name) is not None:
            wide[name] = getattr(win, name).double()
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


def allowed(win: AttentionWindow, expected, quantity="perturbation", reduce="sum", **options):
    """|error| per key: 1 % of the score, and 1e-5 of what its parts weigh before they cancel.

    A row's largest key is left out of perturbation's second term: its cost has a form without cancellation. Sums of
    float16 values take tf32 weights on a GPU, cut to 10 bits, which a signed sum can show: 2^-10 there.
    """
    if quantity == "attention_mass":
        return 0.01 * expected
    wide = widened(win)
    rows, v = reference.softmax(wide), wide.v[:, :, None]
    v_norm = v.norm(dim=-1)[..., None, :]  # [B, H, 1, 1, N]
    part = 2**-10 if quantity != "perturbation" and win.v.dtype == torch.float16 else 1e-5
    if quantity == "perturbation":
        a = rows.a
        if options.get("weigh") == "output":
            a = reference.project(a, wide)
            v_norm = reference.project(v.expand(-1, -1, win.group_size, -1, -1), wide).norm(dim=-1)[..., None, :]
        sizes = reference.reduce_rows(rows.odds.square() * (a.square().sum(-1)[..., None] + v_norm.square()), reduce)
    elif quantity == "alignment":
        summed = (rows.p * v_norm).sum(-1, keepdim=True)
        shares = rows.p * v_norm * summed / rows.a.norm(dim=-1, keepdim=True).clamp_min(FLOOR)
        sizes = reference.reduce_rows(shares, reduce)
    else:
        p = reference.pool_rows(rows.p, wide, options.get("row_pool", "max"), options.get("kernel_size", 7))
        chunk = options.get("chunk", 4)
        pulled = (p * wide.droppable(chunk)[:, None, None, None] * v_norm).sum(-1, keepdim=True)
        sizes = wide.chunk_sums(reference.reduce_rows(p * v_norm * pulled, "sum"), chunk)
    return 0.01 * expected.abs() + part * sizes


def worst_error(scores, win, quantity="perturbation", reduce="sum", **options):
    """The largest |error| over what is allowed, over real keys, against float64 on the same inputs."""
    expected = getattr(reference, quantity)(widened(win), reduce=reduce, **options)
    assert scores.dtype == torch.float32
    assert not scores.isnan().any()
    real = win.real()[:, None].expand_as(scores)
    error = (scores.double() - expected).abs()
    matters = real & (expected.abs() > 2 * FLOOR)
    bound = allowed(win, expected, quantity, reduce, **options).clamp_min(1e-300)
    assert (scores[real & (expected.abs() < FLOOR / 2)].abs() <= FLOOR).all()
    assert (scores[~real] == 0).all()
    return float((error / bound)[matters].max()) if matters.any() else 0.0


def assert_contract(scores, win, quantity="perturbation", reduce="sum", **options):
    """Scores against float64 on the same inputs."""
    ratio = worst_error(scores, win, quantity, reduce, **options)
    assert ratio <= 1, f"{ratio:.3g} of the contract"
