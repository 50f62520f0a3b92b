"""Launching a compiled kernel without asking Triton every time what it already knows.

A plain `kernel[grid](…)` re-derives how each of some forty arguments specialises the code, which costs several times
what the kernels take on a short prompt. Callers here name the specialisation by a key of their own.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from decantkv.kernels.primitives import INTERPRETED


class Launcher:
    """One Triton kernel with its compiled forms by key.

    The key must tell apart everything Triton specialises on: dtypes, None, 16-byte alignment of pointers, the values
    of specialised integers, constants and options. Runtime arguments come first in the kernel's signature.
    """

    def __init__(self, kernel: Any) -> None:  # noqa: ANN401 - Triton ships no types
        self.kernel = kernel
        self._known: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}

    def __call__(
        self,
        key: Hashable,
        grid: tuple[int, int, int],
        args: tuple[Any, ...],
        constants: dict[str, Any],
        options: dict[str, int],
    ) -> None:
        """Launch; `constants` in the order of the signature."""
        known = self._known.get(key)
        if known is not None:
            compiled, values = known
            compiled[grid](*args, *values)
            return
        if INTERPRETED:
            self.kernel[grid](*args, **constants)
            return
        compiled = self.kernel[grid](*args, **constants, **options, enable_fp_fusion=True)
        self._known[key] = compiled, tuple(constants.values())


def aligned(*tensors: torch.Tensor | None) -> tuple[bool | None, ...]:
    """Which tensors start at a multiple of 16 bytes, as the key of a launch needs it."""
    return tuple(None if t is None else t.data_ptr() % 16 == 0 for t in tensors)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensors'."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)
