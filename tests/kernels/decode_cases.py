"""The decode kernel against float64, case by case; run under Triton's interpreter or on a GPU by its callers."""

from __future__ import annotations

import sys

import torch

from decantkv.kernels import decode

# B, H, g, T, D, Dv, lengths a lane, chunk
CASES = {
    "one token": (1, 2, 4, 1, 32, 32, [70, 129], 64),
    "odd dims": (1, 2, 7, 1, 20, 12, [1, 65], 64),
    "one head a group": (2, 1, 1, 1, 16, 16, [33, 128], 64),
    "several tokens": (1, 2, 3, 5, 16, 24, [5, 90], 64),
    "more rows than a tile": (1, 1, 8, 9, 16, 16, [130], 64),
    "shrunk below its chunks": (1, 2, 2, 1, 16, 16, [3, 200], 64),
}


def reference(q, lanes, scale, softcap, sinks):
    """[B, HQ, T, Dv] float64 from a list of (keys, values) a lane, one row at a time."""
    batch, num_heads, new, _ = q.shape
    group = batch * num_heads // len(lanes)
    out = torch.zeros(batch, num_heads, new, lanes[0][1].shape[1], dtype=torch.float64)
    for b in range(batch):
        for h in range(num_heads):
            k, v = lanes[(b * num_heads + h) // group]
            for t in range(new):
                n = k.shape[0] - (new - 1 - t)
                s = scale * (k[:n].double() @ q[b, h, t].double())
                s = s if softcap is None else softcap * torch.tanh(s / softcap)
                s = s if sinks is None else torch.cat([s, sinks[h].double()[None]])
                out[b, h, t] = torch.softmax(s, 0)[:n] @ v[:n].double()
    return out


def check(name, dtype, *, softcap=None, sinks=False, device="cpu"):
    """Assert that the kernel agrees within the dtype's rounding, twice in a row, out of poisoned memory."""
    batch, heads, group, new, dim, v_dim, lengths, chunk = CASES[name]
    g = torch.Generator().manual_seed(len(name))
    room = 70
    lens = torch.tensor(lengths)
    capacity = lens + room
    starts = capacity.cumsum(0) - capacity
    keys = torch.full((int(capacity.sum()), dim), torch.nan, dtype=dtype)  # unwritten slots must not matter
    values = torch.full((int(capacity.sum()), v_dim), torch.nan, dtype=dtype)
    lanes = []
    for start, length in zip(starts.tolist(), lengths, strict=True):
        k, v = torch.randn(length, dim, generator=g).to(dtype), torch.randn(length, v_dim, generator=g).to(dtype)
        keys[start : start + length], values[start : start + length] = k, v
        lanes.append((k, v))
    q = torch.randn(batch, new, heads * group, dim, generator=g).to(dtype).transpose(1, 2)
    sink_logits = torch.randn(heads * group, generator=g) if sinks else None
    splits = decode.plan(starts.to(device), capacity.to(device), chunk=chunk)
    want = reference(q, lanes, 0.4, softcap, sink_logits)
    moved = [x.to(device) for x in (q, keys, values, lens)]
    sink_logits = None if sink_logits is None else sink_logits.to(device)
    results = [
        decode.attend(*moved, splits, scale=0.4, softcap=softcap, sink_logits=sink_logits).cpu() for _ in range(2)
    ]
    assert torch.equal(*results), name
    eps = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    error = (results[0].double() - want).abs().max() / want.abs().max()
    assert float(error) < eps, (name, dtype, float(error))


def run(device="cpu", dtypes=(torch.float32, torch.float16)):
    """Every case, once in each dtype, and the options on one of them."""
    for name in CASES:
        for dtype in dtypes:
            check(name, dtype, device=device)
    check("several tokens", dtypes[0], softcap=3.0, device=device)
    check("one token", dtypes[0], sinks=True, device=device)
    check("several tokens", dtypes[-1], softcap=3.0, sinks=True, device=device)


if __name__ == "__main__":
    on = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    run(on, (torch.float32, torch.float16, torch.bfloat16) if on != "cpu" else (torch.float32, torch.float16))
    print("decode kernel: all cases agree with float64")
