"""Move small numbers from the host to a device without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return the numbers as an int64 tensor on `device`; on CUDA through pinned memory, without waiting."""
    if device.type != "cuda":
        return torch.tensor(numbers, device=device)
    return torch.tensor(numbers, device="cpu", pin_memory=True).to(device, non_blocking=True)


def move(x: Tensor, device: torch.device) -> Tensor:
    """Return a host tensor on `device`; on CUDA through pinned memory, without waiting."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
