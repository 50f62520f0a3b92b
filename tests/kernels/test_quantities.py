"""Kernel B's other quantities in Triton's interpreter against the reference in float64, on shapes that break things."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from tests.kernels.test_scores import run
from tests.kernels.windows import QUANTITIES, assert_contract, window

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]

SHAPES = {
    "one key": {"N": 1, "w": 1, "g": 1, "D": 16},
    "the window alone": {"N": 4, "D": 16},
    "pads": {"B": 2, "H": 1, "N": 90, "D": 16, "lengths": torch.tensor([90, 37]), "sink": 9},
    "hardly a key": {"B": 2, "H": 1, "N": 40, "D": 16, "lengths": torch.tensor([3, 1])},
    "odd dims, seven heads a group": {"N": 75, "D": 20, "Dv": 12, "g": 7, "w": 1},
    "rows beyond one tile": {"H": 1, "g": 3, "w": 13, "N": 70, "D": 16, "sink": 6},
    "softcap and sinks": {
        "N": 70, "D": 16, "softcap": 3.0, "sink_logits": torch.linspace(-2, 4, 4), "sink": 9, "heads_last": True,
    },
}  # fmt: skip
# every quantity that ends differently on all shapes, its variants on one
PAIRS = [
    *((name, shape) for name in ("alignment", "chunks", "W_O") for shape in SHAPES),
    ("alignment max", "rows beyond one tile"),
    ("chunks of 3, avg", "pads"),
    ("chunks max", "pads"),
    ("W_O max", "softcap and sinks"),
    ("pooled mass", "pads"),
    ("pooled mass", "rows beyond one tile"),
]


def small(seed, **shape):
    return window(seed, **{"g": 2, "w": 4, "projection": 24, **shape})


@pytest.mark.parametrize(("name", "shape"), PAIRS, ids=[" on ".join(pair) for pair in PAIRS])
def test_awkward_shapes(name, shape):
    quantity, options = QUANTITIES[name]
    win = small(5, **SHAPES[shape])
    assert_contract(run(win, quantity, keys=32, per_split=64, **options), win, quantity, **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sink", [8, 17])
@pytest.mark.parametrize("name", ["alignment", "chunks", "W_O"])
def test_sinks_in_every_dtype(name, sink, dtype):
    quantity, options = QUANTITIES[name]
    win = small(sink, dtype=dtype, sink=sink, H=1, N=100, D=32, average=True)
    assert_contract(run(win, quantity, per_split=64, **options), win, quantity, **options)


def test_the_model_s_output_is_no_help_to_them_and_does_no_harm():
    for name in ("alignment", "W_O", "pooled mass"):
        quantity, options = QUANTITIES[name]
        win = small(6, H=1, N=40, D=16, hints=True)
        assert_contract(run(win, quantity, per_split=64, **options), win, quantity, **options)


def test_a_metric_of_any_size_fits_float16():
    for factor in (1e-6, 1e4):
        win = small(7, H=1, N=60, D=16, dtype=torch.float16)
        projection = win.output_projection.float() * factor
        scores = run(win, weigh="output")
        moved = run(replace(win, output_projection=projection), weigh="output")
        torch.testing.assert_close(moved, scores * factor**2, rtol=1e-5, atol=0)


def test_the_dispatcher_hands_every_quantity_over():
    from decantkv.scoring import compute

    win = small(8, H=1, N=60, D=16)
    for name in ("alignment", "chunks", "W_O max"):
        quantity, options = QUANTITIES[name]
        scores = compute(quantity, win, impl="triton", **options)
        assert_contract(scores, win, quantity, **options)
