"""Launching a compiled kernel without asking Triton every time what it already knows.

A plain `kernel[grid](…)` re-derives how each of some forty arguments specialises the code, which on a short prompt
costs several times what the kernels take. A `Launch` is one specialisation, compiled at its first call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from decantkv.kernels.primitives import INTERPRETED

_SAME_DEVICE = nullcontext()


class Launch:
    """A Triton kernel bound to constants and options; runtime arguments come first in its signature.

    Whoever holds one promises that everything else Triton specialises on stays the same from call to call: dtypes,
    None, 16-byte alignment of pointers and the values of specialised integers. Once it is `ready`, pointers may be
    plain addresses, which spares a query of the driver for each.
    """

    __slots__ = ("_compiled", "_constants", "_kernel", "_options", "_values")

    def __init__(self, kernel: Any, constants: dict[str, Any], *, warps: int, stages: int = 1) -> None:
        self._kernel = kernel
        self._constants = constants
        self._values = tuple(constants.values())
        self._options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        self._compiled: tuple[Any, Any, Any] | None = None

    @property
    def ready(self) -> bool:
        """Whether it is compiled."""
        return self._compiled is not None

    def __call__(self, grid: tuple[int, int, int], stream: int, *args: Any) -> None:
        """Launch on the current device and its current `stream`; constants follow `args` in the signature's order."""
        if self._compiled is not None:
            run, function, metadata = self._compiled
            run(*grid, stream, function, metadata, None, None, None, *args, *self._values)
        elif INTERPRETED:
            self._kernel[grid](*args, **self._constants)
        else:
            compiled = self._kernel[grid](*args, **self._constants, **self._options)
            self._compiled = compiled.run, compiled.function, compiled.packed_metadata


def address(tensor: torch.Tensor | None) -> int | None:
    """Return where a tensor starts."""
    return None if tensor is None else tensor.data_ptr()


def current_stream(device: torch.device) -> int:
    """The raw stream launches go to; 0 under the interpreter."""
    if INTERPRETED:
        return 0
    return int(torch._C._cuda_getCurrentRawStream(device.index))


def aligned(*tensors: torch.Tensor | None) -> tuple[bool | None, ...]:
    """Which tensors start at a multiple of 16 bytes: Triton compiles wider loads for those."""
    return tuple([None if t is None else t.data_ptr() % 16 == 0 for t in tensors])


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it the tensors'."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _SAME_DEVICE
    return torch.cuda.device(device)
