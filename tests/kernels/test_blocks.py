"""Block sizes: a pure function that fits every device and covers every key."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decantkv.kernels.blocks import Device, attend_blocks, padded_dim, padded_rows, row_tile, score_blocks, split_keys

DEVICES = [
    Device("cuda", 132, 232448, warpgroups=True),
    Device("cuda", 108, 166912),
    Device("cuda", 170, 101376),
    Device("hip", 304, 65536),
]


@given(
    n=st.integers(1, 2**20),
    groups=st.integers(1, 600),
    block=st.sampled_from([16, 32, 64, 128]),
    device=st.sampled_from(DEVICES),
)
def test_splits_cover_every_key_once(n, groups, block, device):
    keys, splits = split_keys(n, groups, block, device)
    assert keys % block == 0
    assert (splits - 1) * keys < n <= splits * keys
    assert splits * groups <= max(4 * device.processors, groups)


@pytest.mark.parametrize("itemsize", [2, 4])
@given(g=st.integers(1, 16), w=st.integers(1, 64), dim=st.integers(16, 256), device=st.sampled_from(DEVICES))
def test_blocks_fit_shared_memory(itemsize, g, w, dim, device):
    for one_pass in (False, True):
        cut = score_blocks(g * w, dim, dim, itemsize, device, one_pass=one_pass)
        width = 2 * padded_dim(dim) * itemsize
        assert cut.rows * width + cut.stages * cut.keys * width <= device.shared_bytes or cut.keys == 16
    cut = attend_blocks(g * w, dim, dim, itemsize, device)
    held = padded_rows(g * w, row_tile(dim, dim, itemsize, device))
    assert held >= g * w
    assert held % cut.rows == 0
    assert cut.rows & (cut.rows - 1) == 0


@pytest.mark.parametrize("rows", [(4, 8), (4, 32)])
@pytest.mark.parametrize("quantity", ["perturbation", "attention_mass", "alignment", "chunk_alignment"])
def test_scratch_does_not_grow_with_the_prompt(monkeypatch, quantity, rows):
    launch = pytest.importorskip("decantkv.kernels.launch")
    monkeypatch.setattr(launch, "device_of", lambda device: DEVICES[0])
    group, window = rows
    scratch = []
    for n in (2**17, 2**20):
        q = torch.empty(1, 8 * group, window, 128, dtype=torch.bfloat16, device="meta")
        k = torch.empty(1, 8, n, 128, dtype=torch.bfloat16, device="meta")
        task = launch.Task(quantity, kernel_size=7, row_pool="max" if "chunk" in quantity else "none")
        made = launch.prepare(q, k, k, 0.1, None, task, padded=False, sink=False, hints=False)
        scratch.append(4 * (made.part_words + made.row_words))
    assert scratch[0] <= scratch[1] * 1.1
    assert max(scratch) <= 10 * 2**20
