"""Costs of keys for many queries against the reference in float64; run in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from decantkv.scoring import compute, reference
from decantkv.scoring.units import BEHIND_PROJECTION, row_factor
from tests.kernels.windows import widened, window, with_hints

FLOOR = 2 * torch.finfo(torch.float32).tiny


def given(seed, *, dtype, weights=True, copies=0, shared=0.0, **shape):
    """A window with a W_O, a residual stream and weights of rows; `copies` rows attend to one key each;
    `shared` is what all values have in common."""
    win = window(seed, projection=20, dtype=dtype, **shape)
    g = torch.Generator().manual_seed(seed)
    for row in range(copies):
        key = 3 + 5 * row % (win.kv_len - win.window)
        direction = win.q[:, :, row].float().unflatten(1, (win.num_kv_heads, -1)).mean(2)
        strong = (2 + row % 8) * direction  # from half of the weight to all but a millionth
        win.q[:, :, row] = strong.repeat_interleave(win.group_size, 1).to(dtype)
        win.k[:, :, key] = (8 * direction / direction.norm(dim=-1, keepdim=True)).to(dtype)
    win.v.add_(shared)
    drawn = torch.rand(2, win.batch, win.q.shape[1], win.window, generator=g)
    win = replace(win, stream_norm=drawn[0, :, 0] + 1)
    return replace(win, row_weights=drawn[1] * (drawn[0] > 0.2)) if weights else win


def slack(wide, unit):
    """1e-5 of what the costs' parts weigh before they cancel, a row's largest key left out."""
    rows = reference.softmax(wide)
    a, v = rows.a, wide.v[:, :, None].expand(-1, -1, wide.group_size, -1, -1)
    if unit in BEHIND_PROJECTION:
        a, v = reference.project(a, wide), reference.project(v, wide)
    sizes = a.square().sum(-1)[..., None] + v.square().sum(-1)[:, :, :, None]
    return 1e-5 * reference.reduce_rows(rows.odds.square() * sizes, "sum", row_factor(wide, rows.a, unit))


def case(device, seed, unit, reduce="sum", *, hints=False, **shape):
    win = given(seed, **shape)
    wide = widened(with_hints(win) if hints else win)
    if unit == "weight":
        exact, allowed = reference.attention_mass(wide, reduce=reduce), 0.0
    else:
        exact = reference.perturbation(wide, reduce=reduce, weigh=unit)
        allowed = 1e-4 * exact.mean() if shape.get("shared") else slack(wide, unit)
    win = with_hints(win) if hints else win
    here = {n: x.to(device) for n, x in vars(win).items() if isinstance(x, torch.Tensor)}
    options = {} if unit == "weight" else {"weigh": unit}
    quantity = "attention_mass" if unit == "weight" else "perturbation"
    got = compute(quantity, replace(win, **here), impl="triton", reduce=reduce, **options).cpu().double()
    over = (got - exact).abs() / (0.01 * exact + allowed + FLOOR)
    assert over.max() <= 1, (unit, reduce, shape, float(over.max()), over.argmax())
    if win.lengths is not None:
        assert not got[~win.real()[:, None].expand_as(got)].any()
    return got


def run(device, dtypes):
    pads = {"B": 2, "H": 1, "g": 2, "w": 21, "N": 70, "D": 24, "Dv": 16, "lengths": torch.tensor([70, 9])}
    deep = {"softcap": 8.0, "sink_logits": torch.linspace(-1, 2, 3), "H": 1, "g": 3, "w": 5, "N": 40, "D": 16}
    alone = {"H": 1, "g": 1, "w": 33, "N": 33, "D": 16, "weights": False}
    for seed, dtype in enumerate(dtypes):
        for unit, reduce, hints in (("weight", "max", True), ("head", "sum", False), ("block", "max", True)):
            case(device, seed, unit, reduce, hints=hints, dtype=dtype, sink=9, copies=4, **pads)
        case(device, seed, "stream", hints=True, dtype=dtype, copies=3, **deep)
        case(device, seed, "head", dtype=dtype, sink=20, **deep)
        case(device, seed, "head", hints=True, dtype=dtype, **alone)
        for unit, shared in (("value", 30.0), ("output", 4.0)):
            case(device, seed, unit, dtype=dtype, copies=3, shared=shared, **{**alone, "w": 9})
        case(device, seed, "weight", dtype=dtype, **alone)
        if device != "cpu":
            for unit in ("weight", "value", "head", "output", "block", "stream"):
                for dim in (128, 64) if dtype == torch.float32 else (128, 64, 256):
                    big = {"H": 2, "g": 3, "w": 300, "N": 900, "D": dim, "dtype": dtype}
                    case(device, seed, unit, hints=dim == 64, sink=12, copies=100, **big)
                    case(device, seed, unit, "max", copies=10, B=2, lengths=torch.tensor([900, 411]), **big)
    print("costs for many queries: all cases agree")


if __name__ == "__main__":
    run("cpu", (torch.float32, torch.bfloat16, torch.float16))
