"""Writing new tokens and turning them, against plain torch; run in the interpreter or on a GPU by its callers."""

from __future__ import annotations

import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

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
    for x, y in zip(apply_rotary_pos_emb(q, k, cos, sin), turned, strict=True):
        assert y.is_contiguous()
        same_roundings(y.cpu(), x, apart=0.0)


def norm_case(device, dtype, *, shape, transposed, seed):
    g = torch.Generator().manual_seed(seed)
    part = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    torch.nn.init.normal_(part.weight, generator=g)
    x = (3 * torch.randn(shape, generator=g)).to(dtype)
    x = x.transpose(0, 1) if transposed else x
    with torch.no_grad():
        wanted = part(x)
    got = step.norm(x.to(device), part.weight.detach().to(device), 1e-5)
    assert got.is_contiguous()
    same_roundings(got.cpu(), wanted, apart=0.01)  # a sum in another order may end on the other side of a half


def same_roundings(got, wanted, *, apart):
    """Equal in 16 bits but for a share of one unit in the last place; to rounding in float32."""
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
    torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(got.dtype).eps, atol=1e-6)
    if got.dtype != torch.float32:
        assert float((got != wanted).float().mean()) <= apart


def run(device, dtypes):
    for seed, dtype in enumerate(dtypes):
        for transposed in (False, True):
            append_case(device, dtype, batch=2, heads=3, new=1, dim=64, v_dim=64, transposed=transposed, seed=seed)
            append_case(device, dtype, batch=1, heads=2, new=5, dim=24, v_dim=16, transposed=transposed, seed=seed)
        for shared in (False, True):
            rotate_case(device, dtype, batch=3, num_heads=4, heads=2, new=1, dim=64, shared=shared, seed=seed)
            rotate_case(device, dtype, batch=2, num_heads=6, heads=1, new=3, dim=20, shared=shared, seed=seed)
        norm_case(device, dtype, shape=(2, 1, 96), transposed=False, seed=seed)
        norm_case(device, dtype, shape=(3, 4, 2, 64), transposed=True, seed=seed)
        norm_case(device, dtype, shape=(2, 1, 4096), transposed=False, seed=seed)
    print("step kernels: all cases agree")


if __name__ == "__main__":
    run("cpu", (torch.float32, torch.float16))
