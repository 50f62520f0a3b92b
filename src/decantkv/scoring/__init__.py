"""Scores from tensors, by the named implementation and no other."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from decantkv.base.options import Impl, Quantity, Reduce, expect_choice

if TYPE_CHECKING:
    from decantkv.scoring.window import AttentionWindow

# a submodule named like a package would shadow that package here, hence "tiled"
_MODULES: dict[str, str] = {"reference": "reference", "torch": "tiled", "triton": "triton"}


def compute(
    quantity: Quantity, win: AttentionWindow, *, impl: Impl = "auto", reduce: Reduce = "sum", **options: Any
) -> Tensor:
    """One window quantity per key, from the named implementation.

    Args:
        quantity: "perturbation" (DropKV's cost), "attention_mass" (SnapKV's), "alignment" or "chunk_alignment"
            (AnDPro's two forms).
        impl: "reference", "torch" or "triton"; "auto" takes triton on CUDA where its kernels cover the input, else
            torch.
        reduce: over a KV head's rows: "sum" (sum over the window, mean over the group) or "max" (over both).
        options: the quantity's own, as `reference` documents them.

    Returns:
        [B, H, N] float32; magnitudes below float32's smallest normal number are 0.

    Raises:
        ValueError: an unknown quantity, implementation or reduction, or an implementation that cannot take this
            input, with the reason.
    """
    expect_choice("quantity", quantity, get_args(Quantity))
    expect_choice("impl", impl, get_args(Impl))
    expect_choice("reduce", reduce, get_args(Reduce))
    chosen = impl
    if impl == "auto":
        fits = win.k.is_cuda and _installed("triton") and not _triton_unsupported(quantity, win, reduce, options)
        chosen = "triton" if fits else "torch"
    elif impl == "triton" and (reason := _triton_unsupported(quantity, win, reduce, options)):
        raise ValueError(f"impl: expected one that can take this input, got 'triton': {reason}")
    module = _module(chosen)
    scores: Tensor = getattr(module, quantity)(win, reduce=reduce, **options).to(torch.float32)
    return scores.masked_fill(scores.abs() < torch.finfo(torch.float32).tiny, 0.0) if chosen == "reference" else scores


def _triton_unsupported(
    quantity: Quantity, win: AttentionWindow, reduce: Reduce, options: dict[str, Any]
) -> str | None:
    if not _installed("triton"):
        return "the package triton is not installed (pip install decantkv[triton])"
    pooled = options.get("row_pool", "none") != "none" and options.get("kernel_size", 1) > 1
    reason: str | None = _module("triton").unsupported(
        win, quantity=quantity, reduce=reduce, weigh=options.get("weigh", "value"), pooled=pooled,
        power=options.get("power", 2),
    )  # fmt: skip
    return reason


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@functools.cache
def _module(impl: Impl) -> Any:
    return importlib.import_module(f"decantkv.scoring.{_MODULES[impl]}")
