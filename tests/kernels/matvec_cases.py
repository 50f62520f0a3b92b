"""Linear layers of one token against torch in float64; run in the interpreter or on a GPU by its callers."""

from __future__ import annotations

import torch

from decantkv.kernels import matvec

SMALL = ((33, 100), (7, 2176), (20, 65))  # rows and elements that fill no tile; a whole round, and tiles behind it
LARGE = ((1024, 4096), (4096, 14336), (14336, 4096), (3584, 18944), (512, 3584), (1000, 100))
TILES = (None, (4, 1, 4), (1, 4, 4), (8, 1, 4), (16, 1, 8))  # rows, warps a row, warps


def given(rows, inner, dtype, device, seed):
    """x [1, 1, K], two weights [N, K] and a bias [N]; products sum to about one."""
    g = torch.Generator(device).manual_seed(seed)
    x, one, two, bias = (
        torch.randn(shape, generator=g, device=device) for shape in ((1, 1, inner), *[(rows, inner)] * 2, (rows,))
    )
    return [y.to(dtype) for y in (x, one / inner**0.5, two / inner**0.5, bias)]


def cut(tile, dtype):
    return None if tile is None else matvec.Tile(tile[0], tile[1] * 512 // dtype.itemsize, tile[2])


def matvec_case(device, dtype, *, rows, inner, with_bias, tile, seed):
    x, weight, _, bias = given(rows, inner, dtype, device, seed)
    bias = bias if with_bias else None
    got = matvec.matvec(x, weight, bias, tile=cut(tile, dtype))
    exact = weight.double() @ x.double().flatten() + (bias.double() if with_bias else 0)
    assert (got.shape, got.dtype) == ((1, 1, rows), dtype)
    # one rounding to the dtype, and float32's of a sum whose terms' magnitudes add up to less than √K
    allowed = 0.5001 * torch.finfo(dtype).eps * exact.abs() + 2**-22 * inner**0.5
    assert bool(((got.flatten().double() - exact).abs() <= allowed).all()), (rows, inner, dtype, with_bias, tile)


def three_case(device, dtype, *, inner, rows, with_bias, seed):
    """One launch gives what three give, to the bit."""
    g = torch.Generator(device).manual_seed(seed)
    x, *drawn = (
        torch.randn(shape, generator=g, device=device).to(dtype)
        for shape in ((1, 1, inner), *[(n, inner) for n in rows], *[(n,) for n in rows])
    )
    weights, biases = drawn[:3], drawn[3:] if with_bias else [None] * 3
    got = matvec.three(x, weights, biases)
    for y, weight, bias in zip(got, weights, biases, strict=True):
        assert torch.equal(y, matvec.matvec(x, weight, bias)), (rows, inner, dtype, with_bias)


def gated_case(device, dtype, *, rows, inner, tile, seed):
    x, gate, up, _ = given(rows, inner, dtype, device, seed)
    gate = 3 * gate
    got = matvec.gated(x, gate, up, tile=cut(tile, dtype))
    assert (got.shape, got.dtype) == ((1, 1, rows), dtype)
    one, two = ((w.double() @ x.double().flatten()).to(dtype) for w in (gate, up))
    silu = torch.nn.functional.silu(one)
    apart = (got.flatten().double() - (silu * two).double()).abs()
    # either sum may round to the other side, and what follows may again (silu's slope is below 1.1); few do
    eps, of_sum = torch.finfo(dtype).eps, 3 * 2**-22 * inner**0.5
    one, two, silu = one.double().abs(), two.double().abs(), silu.double().abs()
    allowed = 1.1 * two * (eps * one + of_sum) + silu * (eps * two + of_sum) + 2 * eps * silu * two + 2**-23
    assert bool((apart <= allowed).all()), (rows, inner, dtype, tile)
    if dtype != torch.float32:
        assert int((apart > 0).sum()) <= 2 + 0.02 * rows, (rows, inner, dtype, tile)


def refusals(device):
    """What does not fit is refused at the door."""
    x, weight, _, bias = given(8, 16, torch.float32, device, 0)
    for wrong in (
        lambda: matvec.matvec(torch.cat([x, x]), weight), lambda: matvec.matvec(x[..., :15], weight),
        lambda: matvec.matvec(x.half(), weight), lambda: matvec.matvec(x, weight, bias[:7]),
        lambda: matvec.matvec(x[..., :8], weight.t()), lambda: matvec.gated(x, weight, weight[:7]),
        lambda: matvec.three(x, [weight] * 2, [None] * 2), lambda: matvec.three(x, [weight] * 3, [bias, bias, None]),
        lambda: matvec.three(x, [weight] * 3, [bias, bias, bias[:7]]),
    ):  # fmt: skip
        try:
            wrong()
        except ValueError:
            continue
        raise AssertionError("what does not fit was taken")


def run(device, dtypes):
    refusals(device)
    for seed, dtype in enumerate(dtypes):
        for rows, inner in SMALL if device == "cpu" or dtype == torch.float32 else SMALL + LARGE:
            for tile in TILES if device == "cpu" or inner == SMALL[1][1] else TILES[:1]:  # each is a compilation
                for with_bias in (False, True):
                    matvec_case(device, dtype, rows=rows, inner=inner, with_bias=with_bias, tile=tile, seed=seed)
                gated_case(device, dtype, rows=rows, inner=inner, tile=tile, seed=seed)
        for inner, rows in ((100, (33, 7, 7)), (65, (4, 20, 9)), (4096, (64, 16, 16))):
            for with_bias in (False, True):
                three_case(device, dtype, inner=inner, rows=rows, with_bias=with_bias, seed=seed)
    print("matvec kernels: all cases agree")


if __name__ == "__main__":
    run("cpu", (torch.float32, torch.float16))
