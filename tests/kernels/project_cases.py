"""Projected norms against float64; run in the interpreter or on a GPU by its callers."""

from __future__ import annotations

import torch

from decantkv.kernels import project


def project_case(device, dtype, *, batch, heads, group, n_keys, dim, width, transposed, seed):
    g = torch.Generator().manual_seed(seed)
    v = torch.randn(batch, n_keys, heads, dim, generator=g).to(dtype).transpose(1, 2)
    v = v if transposed else v.contiguous()
    weight = (torch.randn(width, heads * group * dim, generator=g) / dim**0.5).to(dtype)  # o_proj's
    w_o = weight.t().unflatten(0, (heads * group, dim))  # [HQ, Dv, E], a view
    got = project.projected_norm(v.to(device), w_o.to(device))
    exact = (v.double().repeat_interleave(group, 1) @ w_o.double()).abs().sum(-1).unflatten(1, (heads, group)).mean(2)
    assert (got.shape, got.dtype) == ((batch, heads, n_keys), torch.float32)
    torch.testing.assert_close(got.cpu().double(), exact, rtol=2e-5, atol=1e-6)


def run(device, dtypes):
    for seed, dtype in enumerate(dtypes):
        for transposed in (False, True):
            project_case(device, dtype, batch=2, heads=2, group=3, n_keys=70, dim=24, width=50, transposed=transposed,
                         seed=seed)  # fmt: skip
            project_case(device, dtype, batch=1, heads=1, group=2, n_keys=33, dim=64, width=130, transposed=transposed,
                         seed=seed)  # fmt: skip
        if device != "cpu":
            for dim, width in ((128, 4096), (80, 1000), (256, 2048))[: 2 if dtype == torch.float32 else 3]:
                project_case(device, dtype, batch=1, heads=2, group=4, n_keys=1000, dim=dim, width=width,
                             transposed=True, seed=seed)  # fmt: skip
    print("projected norms: all cases agree")


if __name__ == "__main__":
    run("cpu", (torch.float32, torch.float16))
