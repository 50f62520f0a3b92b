"""The scoring kernels in Triton's interpreter against the reference in float64, on shapes that break things."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from tests.kernels.windows import assert_contract, widened, window

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]


def run(
    win, quantity="perturbation", reduce="sum", *, keys=64, per_split=128, weigh="value", rows=None, rows_first=False,
    apart=False, **options,
):  # fmt: skip
    """The kernels on small blocks, over memory that was NaN before."""
    from decantkv.kernels.blocks import Blocks, padded_rows, row_tile
    from decantkv.kernels.launch import launch_scores
    from decantkv.kernels.plan import Plan, device_of

    device = device_of(win.k.device)
    tile = row_tile(win.k.shape[3], win.v.shape[3], win.k.element_size(), device)
    rows = rows or min(tile, padded_rows(win.group_size * win.window, tile))
    block = Blocks(rows, keys, 4, 1, rows_first=rows_first, apart=apart)
    plan = Plan(block, block, per_split, -(-win.kv_len // per_split))
    start = None if win.lengths is None else win.kv_len - win.lengths
    with poisoned():
        return launch_scores(
            win.q, win.k, win.v, win.scale, start=start, softcap=win.softcap, sink_logits=win.sink_logits,
            out=win.out, lse=win.lse, quantity=quantity, reduce=reduce, plan_=plan,
            output_projection=win.output_projection if weigh == "output" else None, **options,
        )  # fmt: skip


class poisoned:
    """torch.empty returns NaN (floats) or a huge number (integers) while open."""

    def __enter__(self):
        self.empty = torch.empty

        def empty(*args, **kw):
            x = self.empty(*args, **kw)
            return x.fill_(float("nan") if x.is_floating_point() else 2**30)

        torch.empty = empty

    def __exit__(self, *_):
        torch.empty = self.empty


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sink", [0, 8, 14, 17])
@pytest.mark.parametrize("hints", [False, True], ids=["two passes", "one pass"])
def test_sinks_meet_the_contract(dtype, sink, hints):
    win = window(sink, dtype=dtype, sink=sink, N=170, hints=hints)
    assert_contract(run(win), win)


@pytest.mark.parametrize("hints", [False, True], ids=["two passes", "one pass"])
@pytest.mark.parametrize(
    "shape",
    [
        {"N": 1, "w": 1, "g": 1},
        {"N": 8},
        {"N": 9},
        {"N": 131, "D": 80},
        {"N": 65, "D": 96, "Dv": 64, "heads_last": True},
        {"N": 257, "g": 7, "w": 1},
        {"N": 129, "g": 7, "w": 8},
        {"N": 100, "D": 16, "softcap": 3.0, "sink": 5},
        {"N": 100, "D": 16, "sink_logits": torch.linspace(-2, 4, 8), "sink": 9},
        {"B": 2, "N": 300, "D": 16, "lengths": torch.tensor([300, 137]), "sink": 9},
        {"B": 2, "N": 140, "D": 16, "lengths": torch.tensor([3, 1])},
    ],
    ids=lambda s: " ".join(f"{k}={v if not isinstance(v, torch.Tensor) else '…'}" for k, v in s.items()),
)
def test_awkward_shapes(shape, hints):
    win = window(5, hints=hints, **shape)
    assert_contract(run(win), win)


@pytest.mark.parametrize("hints", [False, True], ids=["two passes", "one pass"])
def test_rows_beyond_one_tile(hints):
    win = window(3, H=1, g=5, w=26, N=140, D=16, sink=9, hints=hints)
    assert_contract(run(win), win)


@pytest.mark.parametrize("hints", [False, True], ids=["two passes", "one pass"])
@pytest.mark.parametrize(
    ("quantity", "reduce"), [("perturbation", "max"), ("attention_mass", "sum"), ("attention_mass", "max")]
)
def test_other_quantities(quantity, reduce, hints):
    win = window(7, N=150, D=32, sink=9, hints=hints)
    assert_contract(run(win, quantity, reduce), win, quantity, reduce)


FORMS = [
    {"rows": 64, "rows_first": True}, {"rows": 64, "apart": True}, {"rows": 128, "rows_first": True, "apart": True},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [{"g": 2, "w": 35, "sink": 9, "N": 72}, {"B": 2, "g": 5, "w": 13, "sink": 14, "lengths": torch.tensor([60, 31])}],
    ids=["70 rows", "65 rows, pads"],
)
def test_forms_for_many_rows(form, dtype, shape):
    win = window(3, **{"H": 1, "N": 60, "D": 16, "dtype": dtype, **shape})
    assert_contract(run(win, keys=32, per_split=32, **form), win)


def test_forms_of_other_quantities():
    win = window(3, H=2, g=5, w=13, N=70, D=16, sink=9)
    for quantity, reduce in (("perturbation", "max"), ("attention_mass", "sum"), ("alignment", "max")):
        assert_contract(run(win, quantity, reduce, **FORMS[1]), win, quantity, reduce)


def test_attention_mass_of_many_rows():
    win = window(8, g=3, w=30, N=100, D=16)
    assert_contract(run(win, "attention_mass"), win, "attention_mass")


@pytest.mark.parametrize("rows_first", [False, True], ids=["keys first", "rows first"])
@pytest.mark.parametrize("sink", [0, 6])
def test_dominant_keys_change_along_the_way(sink, rows_first):
    """Keys of rising weight: each displaces the last as the row's dominant key, across tiles and splits."""
    win = window(11, N=290, D=32, sink=sink)
    k = win.k.clone()
    u = win.q.float().mean(2).unflatten(1, (2, 4)).mean(2)
    u = u / u.norm(dim=-1, keepdim=True)
    for step, n in enumerate((3, 40, 70, 71, 140, 200, 280)):
        k[:, :, n] = ((8 + 12 * step) * u).to(k.dtype)
    win = dataclasses.replace(win, k=k)
    assert_contract(run(win, keys=32, per_split=96, rows_first=rows_first), win)


def test_a_value_equal_to_the_average_costs_nothing_much():
    win = window(13, N=200, D=32, average=True)
    assert_contract(run(win), win)


def test_equal_keys_get_equal_scores():
    win = window(17, N=260, D=32, sink=7)
    k, v = win.k.clone(), win.v.clone()
    for n in (64, 130, 200):
        k[:, :, n], v[:, :, n] = k[:, :, 10], v[:, :, 10]
    scores = run(dataclasses.replace(win, k=k, v=v))
    assert (scores[:, :, [64, 130, 200]] == scores[:, :, [10]]).all()


def test_shared_offset_of_all_values_changes_little_and_scale_squares():
    win = window(19, N=120, D=32, dtype=torch.float32)
    base = run(win)
    moved = run(dataclasses.replace(win, v=win.v + 1.0))
    assert torch.allclose(moved, base, rtol=1e-3, atol=1e-5 * float(base.max()))
    doubled = run(dataclasses.replace(win, v=2 * win.v))
    assert torch.allclose(doubled, 4 * base, rtol=1e-5)


def test_expanded_keys_need_no_copy():
    win = window(23, H=1, N=90, D=16)
    k, v = win.k.expand(2, 3, 90, 16), win.v.expand(2, 3, 90, 16)
    q = win.q[:, :3].expand(2, 3, 8, 16)
    win = dataclasses.replace(win, q=q, k=k, v=v)
    assert_contract(run(win), win)


def test_tiny_scores_are_zero_and_logits_far_apart_stay_finite():
    win = window(29, N=100, D=16, dtype=torch.float32)
    win = dataclasses.replace(win, q=60 * win.q)
    scores = run(win)
    assert_contract(scores, win)
    assert ((scores == 0) | (scores >= torch.finfo(torch.float32).tiny)).all()


def test_the_adapter_gives_the_same_and_says_what_it_cannot_take():
    from decantkv.scoring import triton as adapter

    win = window(31, B=2, N=80, D=16, lengths=torch.tensor([80, 50]))
    assert torch.equal(adapter.perturbation(win), adapter.perturbation(win))
    assert_contract(adapter.attention_mass(win), win, "attention_mass")
    assert adapter.unsupported(win, quantity="perturbation") is None
    mask = torch.ones(1, 1, 8, 80, dtype=torch.bool)
    assert "mask" in adapter.unsupported(dataclasses.replace(win, mask=mask), quantity="perturbation")
    assert "float64" in adapter.unsupported(widened(win), quantity="perturbation")
    assert "no kernel" in adapter.unsupported(win, quantity="beauty")
    assert "not contiguous" in adapter.unsupported(
        dataclasses.replace(win, k=win.k.mT.contiguous().mT), quantity="perturbation"
    )
