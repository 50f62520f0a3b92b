"""Writing new tokens and turning them, against plain torch; run in the interpreter or on a GPU by its callers."""

from __future__ import annotations

import torch

from decantkv.kernels import step


def append_case(device, dtype, *, batch, heads, new, dim, v_dim, transposed, seed):
    g = torch.Generator().manual_seed(seed)
    lens = torch.randint(0, 9, (batch * heads,), generator=g)
    starts = (lens + new + 2).cumsum(0) - (lens + new + 2)
    stored = [torch.full((int((lens + new + 2).sum()), d), 7.0, dtype=dtype) for d in (dim, v_dim)]
    shapes = [(batch, new, heads, d) if transposed else (batch, heads, new, d) for d in (dim, v_dim)]
    given = [torch.randn(shape, generator=g).to(dtype) for shape in shapes]
    given = [x.transpose(1, 2) if transposed else x for x in given]
    wanted = [x.clone() for x in stored]
    for lane in range(batch * heads):
        first = int(starts[lane] + lens[lane])
        for x, y in zip(wanted, given, strict=True):
            x[first : first + new] = y[lane // heads, lane % heads]
    moved, on = [x.to(device) for x in stored], lens.clone().to(device)
    step.append(*(x.to(device) for x in given), tuple(moved), starts.to(device), on)
    assert all(torch.equal(x.cpu(), y) for x, y in zip(moved, wanted, strict=True))
    assert torch.equal(on.cpu(), lens + new)


def rotate_case(device, dtype, *, batch, num_heads, heads, new, dim, shared, seed):
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(batch, new, h, dim, generator=g).to(dtype).transpose(1, 2) for h in (num_heads, heads))
    cos, sin = (torch.rand(1 if shared else batch, new, dim, generator=g).to(dtype) for _ in range(2))
    turned = step.rotate(*(x.to(device) for x in (q, k, cos, sin)))
    for x, y in zip((q, k), turned, strict=True):
        halves = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1).double()
        exact = x.double() * cos[:, None].double() + halves * sin[:, None].double()
        assert y.is_contiguous()
        assert y.dtype == dtype
        torch.testing.assert_close(y.cpu().double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)


def run(device, dtypes):
    for seed, dtype in enumerate(dtypes):
        for transposed in (False, True):
            append_case(device, dtype, batch=2, heads=3, new=1, dim=64, v_dim=64, transposed=transposed, seed=seed)
            append_case(device, dtype, batch=1, heads=2, new=5, dim=24, v_dim=16, transposed=transposed, seed=seed)
        for shared in (False, True):
            rotate_case(device, dtype, batch=3, num_heads=4, heads=2, new=1, dim=64, shared=shared, seed=seed)
            rotate_case(device, dtype, batch=2, num_heads=6, heads=1, new=3, dim=20, shared=shared, seed=seed)
    print("step kernels: all cases agree")


if __name__ == "__main__":
    run("cpu", (torch.float32, torch.float16))
