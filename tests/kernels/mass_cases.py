"""The prompt's whole attention, summed by columns, against float64; run in the interpreter or on a GPU."""

from __future__ import annotations

import torch

from decantkv.kernels import mass


def exact(q, k, scale, start, softcap, sinks):
    """Straight-line float64: weights [B, HQ, N, N]."""
    length, group = k.shape[2], q.shape[1] // k.shape[1]
    logits = q.double() @ k.double().repeat_interleave(group, 1).mT * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    at = torch.arange(length)
    real = torch.ones(1, length, dtype=torch.bool) if start is None else at >= start[:, None]
    seen = (at <= at[:, None]) & real[:, None] & real[:, :, None]
    weights = logits.masked_fill(~seen[:, None], -torch.inf).exp()
    extra = 0.0 if sinks is None else sinks.double().exp()[None, :, None]
    total = weights.sum(-1) + extra
    return weights / total.where(total > 0, 1.0)[..., None]


def mass_case(device, dtype, *, batch, heads, group, length, dim, seed, pads=None, softcap=None, sinks=False, odd=0):
    g = torch.Generator().manual_seed(seed)
    room = length + odd  # a stack that is longer than what was read of it
    q = torch.randn(batch, heads * group, room, dim, generator=g).to(dtype)[:, :, :length]
    k = torch.randn(batch, heads, room, dim, generator=g).to(dtype)[:, :, :length]
    start = None if pads is None else torch.tensor(pads)
    learned = torch.randn(heads * group, generator=g) if sinks else None
    weights = exact(q, k, dim**-0.5, start, softcap, learned)
    here = [x if x is None else x.to(device) for x in (q, k, start, learned)]
    got = mass.column_mass(*here[:2], scale=dim**-0.5, start=here[2], softcap=softcap, sink_logits=here[3])
    wanted = weights.sum(2).unflatten(1, (heads, group)).mean(2)
    assert (got.shape, got.dtype) == ((batch, heads, length), torch.float32)
    torch.testing.assert_close(got.cpu().double(), wanted, rtol=2e-5, atol=1e-6)
    if start is not None:
        assert not got.cpu()[(torch.arange(length) < start[:, None, None]).expand_as(wanted)].any()


def run(device, dtypes):
    for seed, dtype in enumerate(dtypes):
        for length in (1, 63, 150):
            mass_case(device, dtype, batch=1, heads=2, group=3, length=length, dim=24, seed=seed, odd=3)
        mass_case(device, dtype, batch=2, heads=1, group=2, length=140, dim=16, seed=seed, pads=[0, 71])
        mass_case(device, dtype, batch=2, heads=1, group=1, length=90, dim=32, seed=seed, pads=[89, 7], sinks=True)
        mass_case(device, dtype, batch=1, heads=1, group=2, length=133, dim=64, seed=seed, softcap=3.0)
        mass_case(device, dtype, batch=2, heads=1, group=2, length=150, dim=16, seed=seed, odd=5)
        if device != "cpu":
            mass_case(device, dtype, batch=1, heads=2, group=6, length=3000, dim=128, seed=seed)
            for dim in (128, 80) if dtype == torch.float32 else (128, 80, 256):
                mass_case(device, dtype, batch=2, heads=2, group=4, length=1000, dim=dim, seed=seed, pads=[0, 300],
                          odd=3)  # fmt: skip
    print("columns of a prompt's attention: all cases agree")


if __name__ == "__main__":
    run("cpu", (torch.float32, torch.float16))
