"""A model's small operations in fewer launches, for the step that is recorded as a CUDA graph.

At batch 1 a step's norms and rotations cost as much as reading a third of the weights: some twenty launches a layer for
a few kilobytes. What stands in for them is tried on random numbers first, is in place only while a step is rehearsed or
recorded, and the recorded step is compared with the model's own forward like any other.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from decantkv.interface import modeling_files
from decantkv.versions import kernels_run_on


class Standin(NamedTuple):
    """One function and what computes the same in fewer launches.

    Attributes:
        home: the dict it is looked up in: a module's own attributes, or a Python module's names.
        name: its name there.
        call: the other function.
    """

    home: dict[str, Any]
    name: str
    call: Callable[..., Any]


def standins(model: nn.Module) -> list[Standin]:
    """What can stand in for a model's norms and rotary embeddings; computes and waits, so before any recording."""
    found = [Standin(vars(part), "forward", call) for part in model.modules() if (call := _norm(part)) is not None]
    device, dtype = next(model.parameters()).device, next(model.parameters()).dtype
    for file in modeling_files(model):
        rotary = vars(file).get("apply_rotary_pos_emb")
        if rotary is not None and (call := _rotary(rotary, device, dtype)) is not None:
            found.append(Standin(vars(file), "apply_rotary_pos_emb", call))
    return found


@contextmanager
def in_place(found: Sequence[Standin]) -> Iterator[None]:
    """Stand in, and put everything back."""
    missing = object()
    before = [home.get(name, missing) for home, name, _ in found]
    try:
        for home, name, call in found:
            home[name] = call
        yield
    finally:
        for (home, name, _), was in zip(found, before, strict=True):
            if was is missing:
                del home[name]
            else:
                home[name] = was


def _norm(part: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """One launch for a norm, where a module computes just that."""
    eps = getattr(part, "variance_epsilon", getattr(part, "eps", None))
    weight = getattr(part, "weight", None)
    if "forward" in vars(part) or not type(part).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if not isinstance(weight, nn.Parameter) or weight.dim() != 1 or len(list(part.parameters())) != 1:
        return None
    call = functools.partial(_rms_norm, weight=weight, eps=eps)
    x = torch.randn(4, 1, weight.shape[0], device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        return call if _same(part(x), call(x)) else None


def _rms_norm(x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    if kernels_run_on(x.device) and x.dtype == weight.dtype:
        normed: Tensor = importlib.import_module("decantkv.kernels.step").norm(x, weight, eps)
        return normed
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def _rotary(original: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
    """One launch that turns queries and keys, where a model turns them by halves."""
    if not kernels_run_on(device):
        return None
    rotate = importlib.import_module("decantkv.kernels.step").rotate
    return standing_in(original, rotate, device, dtype)


def standing_in(
    original: Callable[..., Any], rotate: Callable[..., Any], device: torch.device, dtype: torch.dtype
) -> Callable[..., Any] | None:
    """`rotate` in place of a model's rotary function; None where it computes something else."""

    @functools.wraps(original)
    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = cos.dim() == sin.dim() == 3 and cos.shape == sin.shape and cos.shape[1:] == (q.shape[2], q.shape[3])
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype and q.shape[3] == k.shape[3] and q.shape[3] % 2 == 0
        if args or kwargs or not (plain and alike):
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos, sin)

    q, k = (torch.randn(2, heads, 3, 16, device=device, dtype=dtype) for heads in (4, 2))
    angle = torch.rand(2, 3, 8, device=device).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    try:
        expected = original(q, k, cos, sin)
    except (TypeError, RuntimeError, IndexError):  # it takes other arguments
        return None
    got = rotate(q, k, cos, sin)
    return turned if all(_same(x, y) for x, y in zip(expected, got, strict=True)) else None


def _same(expected: Any, got: Tensor) -> bool:
    """Whether two results differ by rounding alone."""
    if not isinstance(expected, Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    allowed = 4 * torch.finfo(got.dtype).eps * float(expected.abs().max())
    return float((expected - got).abs().max()) <= allowed
