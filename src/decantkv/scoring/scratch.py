"""Limits of scratch memory in plain torch, by device."""

from __future__ import annotations

import torch

SCRATCH_BYTES = 16 * 2**20  # a CPU's cache is about as large; more is not faster there
GPU_SCRATCH_BYTES = 256 * 2**20  # there a tile costs its launches, whatever its length
GPU_SHARE = 64  # but never more than this fraction of the card's memory


def scratch_bytes(device: torch.device) -> int:
    """Return the bytes that one tile may hold; a pass keeps up to twice as much alive besides its result."""
    if device.type != "cuda":
        return SCRATCH_BYTES
    total = torch.cuda.get_device_properties(device).total_memory
    return max(SCRATCH_BYTES, min(GPU_SCRATCH_BYTES, total // GPU_SHARE))
