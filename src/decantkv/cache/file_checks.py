"""Checks of what a cache file says: everything that a cache is restored from fits together, or a ValueError."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decantkv.selection.topk import FILLER

_NAMES = {"keys", "values", "valid", "indices", "counts", "frame", "recent", "starts", "lens", "numbers", "real"}


@contextmanager
def understood(path: object) -> Iterator[None]:
    """Turn what a forged description raises where it is used into a ValueError that names the file."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(
            f"path: expected a cache as `save` describes it, got {path} with another description "
            f"({type(error).__name__})"
        ) from error


def check_layers(numbers: Sequence[Mapping[str, Any]], tensors: Mapping[str, Tensor], expected: int) -> None:
    """Raise ValueError unless a file's layers are as many as the model's, of one length, and each whole in itself."""
    if not isinstance(numbers, list) or len(numbers) != expected:
        raise _wrong("layers", f"as many as the model's {expected}")
    lengths = {_count(layer, "logical") for layer in numbers}
    if len(lengths - {0}) > 1:
        raise _wrong("lengths", "the same in every layer")
    batches = set()
    for i, layer in enumerate(numbers):
        state = {n.partition(".")[2]: x for n, x in tensors.items() if n.partition(".")[0] == str(i)}
        if {*state} - _NAMES:
            raise _wrong(f"tensors of layer {i}", f"among {', '.join(sorted(_NAMES))}")
        batches.add(_check_layer(state, layer, i))
    if len(batches - {0}) > 1:
        raise _wrong("rows", "the same number in every layer")
    if any(not n.partition(".")[0].isdecimal() or int(n.partition(".")[0]) >= expected for n in tensors):
        raise _wrong("tensors", "of the model's layers alone")


def _check_layer(state: Mapping[str, Tensor], numbers: Mapping[str, Any], i: int) -> int:
    """The number of rows that a layer holds."""
    logical = _count(numbers, "logical")
    if "keys" not in state or "values" not in state:
        if logical or state:
            raise _wrong(f"layer {i}", "with keys and values")
        return 0
    keys, values = state["keys"], state["values"]
    if not keys.is_floating_point() or values.dtype != keys.dtype:
        raise _wrong(f"keys and values of layer {i}", "floating-point, of one dtype")
    if "lens" in state:
        batch, heads, stored = _check_lanes(state, logical, i)
    else:
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3] or keys.shape[2] > logical:
            raise _wrong(f"keys and values of layer {i}", "[B, H, stored, D], of no more tokens than were read")
        batch, heads, stored = keys.shape[:3]
    _check_kept(state, numbers, (batch, heads, stored), logical, i)
    return batch


def _check_lanes(state: Mapping[str, Tensor], logical: int, i: int) -> tuple[int, int, int]:
    keys, values, starts, lens = (state[name] for name in ("keys", "values", "starts", "lens"))
    batch, room, appended = state["numbers"].tolist()
    fits = (
        keys.dim() == values.dim() == 2 and starts.dim() == lens.dim() == 1 and starts.shape == lens.shape
        and not starts.is_floating_point() and not lens.is_floating_point() and keys.shape[0] == values.shape[0]
        and batch >= 1 and lens.shape[0] >= 1 and lens.shape[0] % batch == 0 and room >= 0 and 0 <= appended <= logical
    )  # fmt: skip
    if not fits or bool((starts < 0).any() | (lens < 0).any() | (lens > logical).any()) or room > keys.shape[0]:
        raise _wrong(f"lanes of layer {i}", "inside their storage")
    first, order = starts.sort()
    ends = first + lens[order] + room
    if int(ends[-1]) > keys.shape[0] or bool((ends[:-1] > first[1:]).any()):
        raise _wrong(f"lanes of layer {i}", "beside one another")
    return batch, lens.shape[0] // batch, int(lens.max())


def _check_kept(
    state: Mapping[str, Tensor], numbers: Mapping[str, Any], shape: tuple[int, int, int], logical: int, i: int
) -> None:
    batch, heads, stored = shape
    if "valid" in state:
        valid = state["valid"]
        if valid.dim() != 3 or valid.shape[0] != batch or valid.shape[1] not in (1, heads) or valid.shape[2] > stored:
            raise _wrong(f"valid slots of layer {i}", "[B, 1 or H, slots]")
    if ("indices" in state) != ("counts" in state):
        raise _wrong(f"layer {i}", "with kept positions and their counts")
    if "indices" in state:
        indices, counts, rows = state["indices"], state["counts"], numbers["rows"]
        if indices.dim() != 3 or indices.shape[0] != batch or indices.shape[1] not in (1, heads):
            raise _wrong(f"kept positions of layer {i}", "[B, 1 or H, K]")
        if indices.is_floating_point() or bool(((indices < FILLER) | (indices >= logical)).any()):
            raise _wrong(f"kept positions of layer {i}", f"below {logical}, which were read")
        held = (indices != FILLER).sum(-1)
        if counts.dim() != 2 or bool((counts != held).any()) or (rows is not None and len(rows) != batch):
            raise _wrong(f"counts of layer {i}", "of the positions kept")
        if "lens" not in state and indices.shape[2] > stored:
            raise _wrong(f"kept positions of layer {i}", f"no more than the {stored} stored")
    if ("frame" in state) != ("recent" in state):
        raise _wrong(f"layer {i}", "with what later evictions need, or none of it")
    if "frame" in state:
        frame, recent = state["frame"], state["recent"]
        if tuple(frame.shape) != (batch, 3) or recent.dim() != 4 or recent.shape[0] != batch:
            raise _wrong(f"frame of layer {i}", "[B, 3] beside recent queries [B, HQ, w, D]")
        if _count(numbers, "renewed") > logical or bool((frame < 0).any()) or bool((frame[:, :2] > logical).any()):
            raise _wrong(f"frame of layer {i}", "inside what was read")


def _count(numbers: Mapping[str, Any], name: str) -> int:
    value = numbers[name]
    if type(value) is not int or not 0 <= value < 2**48:
        raise _wrong(name, "a whole number that is not negative")
    return value


def _wrong(what: str, expected: str) -> ValueError:
    return ValueError(f"path: expected {what} {expected}, got a file that says otherwise")
