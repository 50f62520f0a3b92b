"""Block sizes: a pure function that fits every device and covers every key."""

from __future__ import annotations

import pytest
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
