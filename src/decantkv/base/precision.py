"""Make tensors fit for arithmetic outside the model: one dtype, writable memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def alike(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in one dtype: autocast's inside `torch.autocast`, otherwise the widest of theirs.

    Under autocast rotary embeddings leave queries and keys in float32 beside values in bfloat16.
    """
    dtypes = {x.dtype for x in tensors}
    if len(dtypes) == 1:
        return tensors
    kind, dtype = tensors[0].device.type, dtypes.pop()
    for other in dtypes:
        dtype = torch.promote_types(dtype, other)
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) for x in tensors)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which operations keep the precision of their operands, also inside `torch.autocast`."""
    on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def writable(x: Tensor, new: Tensor) -> Tensor:
    """Return `x`, or a copy of it if `new` cannot be written into it in place without loss.

    A copy is needed for a dtype of fewer digits, and for a tensor made in inference mode: outside of that mode torch
    allows no change to it.
    """
    dtype = x.dtype if x.dtype == new.dtype else torch.promote_types(x.dtype, new.dtype)
    if dtype == x.dtype and not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.to(dtype, copy=True)
