"""Replacement ops: a model's operations on one token in fewer launches, for the step recorded as a CUDA graph.

At batch 1 the norms and rotations of a step cost as much as reading a third of the weights: some twenty launches per
layer for a few kilobytes. Linear layers cost more than reading their weights. A replacement op is tried on random
numbers first. It is in place only while a step is rehearsed or recorded. The recorded step is compared with the model's
own forward like any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from decantkv.base.versions import kernels_on, kernels_run_on
from decantkv.hf.attention_hook import modeling_files


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


def standins(model: nn.Module, *, one_token: bool = True) -> list[Standin]:
    """Return replacement ops for a model's norms, rotary embeddings, linear layers and gated MLPs.

    Args:
        one_token: whether a step computes a single token, which replacements of linear layers need.

    It computes on the device and waits: call it before any recording. Modules whose forward another library replaced,
    and linear layers and MLPs with hooks, are left alone.
    """
    tried: dict[Any, bool] = {}
    found: list[Standin] = []
    together: set[nn.Module] = set()  # projections that their attention layer has taken, which comes before them
    for part in model.modules():
        call = _norm(part)
        if one_token and part not in together:
            three = _three(part, tried)
            together |= {projection for projection, _ in three}
            found += [Standin(vars(projection), "forward", made) for projection, made in three]
            call = call or _linear(part, tried) or _gated(part)
        if call is not None:
            found.append(Standin(vars(part), "forward", call))
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
    x = _random((4, 1, weight.shape[0]), weight.device, weight.dtype)
    with torch.no_grad():
        return call if _same(part(x), call(x)) else None


def _rms_norm(x: Tensor, *, weight: Tensor, eps: float) -> Tensor:
    step = kernels_on(x.device, "step") if x.dtype == weight.dtype else None
    if step is not None:
        normed: Tensor = step.norm(x, weight, eps)
        return normed
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def _linear(part: nn.Module, tried: dict[Any, bool]) -> Callable[[Tensor], Tensor] | None:
    """One pass over a linear layer's weight; each shape is tried once."""
    if not _plain_linear(part):
        return None
    weight, matvec = part.weight, kernels_on(part.weight.device, "matvec").matvec
    call = _one_token(part, weight, lambda x: matvec(x, part.weight, part.bias))
    key = weight.shape, weight.dtype, weight.device, part.bias is None
    if key not in tried:
        x = _random((1, 1, weight.shape[1]), weight.device, weight.dtype)
        with torch.no_grad():
            tried[key] = _same(part(x), call(x))
    return call if tried[key] else None


def _three(part: nn.Module, tried: dict[Any, bool]) -> list[tuple[nn.Linear, Callable[..., Any]]]:
    """Return replacements for a layer's q, k and v projections that share one launch; [] if they do not fit."""
    found = [part._modules.get(name) for name in ("q_proj", "k_proj", "v_proj")]
    parts = [x for x in found if _plain_linear(x)]
    if len(parts) != 3 or len({(x.weight.shape[1], x.weight.dtype, x.bias is None) for x in parts}) != 1:
        return []
    shared = _Shared(parts, kernels_on(parts[0].weight.device, "matvec").three)
    calls = [_one_token(x, x.weight, functools.partial(shared, i)) for i, x in enumerate(parts)]
    key = tuple((x.weight.shape, x.weight.dtype, x.weight.device, x.bias is None) for x in parts)
    if key not in tried:
        x = _random((1, 1, parts[0].weight.shape[1]), parts[0].weight.device, parts[0].weight.dtype)
        with torch.no_grad():
            tried[key] = all([_same(y(x), call(x)) for y, call in zip(parts, calls, strict=True)])
    return list(zip(parts, calls, strict=True)) if tried[key] else []


class _Shared:
    """Compute the q, k and v projections in one launch on the first call; return stored results on the next two."""

    def __init__(self, parts: Sequence[nn.Linear], kernel: Callable[..., Sequence[Tensor]]) -> None:
        self._parts, self._kernel = parts, kernel
        self._x: Tensor | None = None
        self._waiting: dict[int, Tensor] = {}

    def __call__(self, which: int, x: Tensor) -> Tensor:
        if self._x is not x or which not in self._waiting:
            made = self._kernel(x, [part.weight for part in self._parts], [part.bias for part in self._parts])
            self._x, self._waiting = x, dict(enumerate(made))
        out = self._waiting.pop(which)
        if not self._waiting:
            self._x = None
        return out


def _gated(part: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """An MLP down(silu(gate · x) · (up · x)), gate and up in one launch."""
    gate, up, down, act = (part._modules.get(name) for name in ("gate_proj", "up_proj", "down_proj", "act_fn"))
    if act is None or "forward" in vars(part) or _hooked(part):
        return None
    if not (_plain_linear(gate) and _plain_linear(up) and _plain_linear(down)):
        return None
    if any(x.bias is not None for x in (gate, up, down)) or gate.weight.shape != up.weight.shape:
        return None
    if type(act).__name__ not in ("SiLU", "SiLUActivation") or _hooked(act):
        return None
    kernel = kernels_on(gate.weight.device, "matvec").gated
    call = _one_token(part, gate.weight, lambda x: down(kernel(x, gate.weight, up.weight)))
    x = _random((1, 1, gate.weight.shape[1]), gate.weight.device, gate.weight.dtype)
    with torch.no_grad():
        try:
            expected = part(x)
        except (TypeError, RuntimeError, IndexError):  # it takes other arguments
            return None
        return call if _same(expected, call(x)) else None


def _plain_linear(part: Any) -> TypeGuard[nn.Linear]:
    """Return whether it is torch's own linear layer, of 16 bits, on a device that has kernels."""
    if type(part) is not nn.Linear or "forward" in vars(part) or _hooked(part):
        return False
    weight, bias = part.weight, part.bias
    if any(type(x) is not nn.Parameter or not x.is_contiguous() for x in (weight, bias) if x is not None):
        return False  # a DTensor, or what a quantiser left
    if weight.dtype not in (torch.bfloat16, torch.float16) or (bias is not None and bias.dtype != weight.dtype):
        return False
    return kernels_run_on(weight.device)


def _hooked(part: nn.Module) -> bool:
    return bool(part._forward_hooks or part._forward_pre_hooks)


def _one_token(part: nn.Module, weight: Tensor, call: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """`call` for a single token, what the module does for any other input."""
    original = part.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if len(args) == 1 and not kwargs else None
        if type(x) is not Tensor or x.numel() != weight.shape[1] or x.shape[-1] != weight.shape[1]:
            return original(*args, **kwargs)
        if not x.is_contiguous() or (x.dtype, x.device) != (weight.dtype, weight.device):
            return original(*args, **kwargs)
        return original(x) if torch.is_autocast_enabled(x.device.type) else call(x)

    return forward


def _rotary(original: Callable[..., Any], device: torch.device, dtype: torch.dtype) -> Callable[..., Any] | None:
    """One launch that turns queries and keys, where a model turns them by halves."""
    step = kernels_on(device, "step")
    return None if step is None else standing_in(original, step.rotate, device, dtype)


def standing_in(
    original: Callable[..., Any], rotate: Callable[..., Any], device: torch.device, dtype: torch.dtype
) -> Callable[..., Any] | None:
    """Return `rotate` as a replacement of a model's rotary function, or None if that computes something else."""

    @functools.wraps(original)
    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = cos.dim() == sin.dim() == 3 and cos.shape == sin.shape and cos.shape[1:] == (q.shape[2], q.shape[3])
        alike = q.dtype == k.dtype == cos.dtype == sin.dtype and q.shape[3] == k.shape[3] and q.shape[3] % 2 == 0
        if args or kwargs or not (plain and alike):
            return original(q, k, cos, sin, *args, **kwargs)
        return rotate(q, k, cos, sin)

    q, k = (_random((2, heads, 3, 16), device, dtype) for heads in (4, 2))
    angle = _random((2, 3, 8), device, torch.float32).repeat(1, 1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    try:
        expected = original(q, k, cos, sin)
    except (TypeError, RuntimeError, IndexError):  # it takes other arguments
        return None
    got = rotate(q, k, cos, sin)
    return turned if all(_same(x, y) for x, y in zip(expected, got, strict=True)) else None


def _same(expected: Any, got: Tensor) -> bool:
    """Return whether two results differ by rounding alone."""
    if not isinstance(expected, Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    allowed = 4 * torch.finfo(got.dtype).eps * float(expected.abs().max())
    return float((expected - got).abs().max()) <= allowed


def _random(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal numbers that leave torch's own generators, and so what a user samples, alone."""
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn(shape, generator=generator, device=device, dtype=dtype)
