"""Checks of what a cache file says: everything that a cache is restored from fits together, or a ValueError."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decantkv.cache.stores.store import check


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
    """Raise ValueError unless a file's layers are as many as the model's and of one length, and its tensors theirs.

    What a layer's own numbers and tensors must be is checked where the layer is made from them.
    """
    check(isinstance(numbers, list) and len(numbers) == expected, "layers", f"as many as the model's {expected}")
    lengths = [layer["logical"] for layer in numbers]
    whole = all(type(n) is int and 0 <= n < 2**48 for n in lengths)
    check(whole, "logical", "a whole number that is not negative")
    check(len({*lengths} - {0}) <= 1, "lengths", "the same in every layer")
    own = all((i := name.partition(".")[0]).isdecimal() and int(i) < expected for name in tensors)
    check(own, "tensors", "of the model's layers alone")


def check_keys(keys: Tensor, values: Tensor, logical: int) -> None:
    """Raise ValueError unless these can be what a layer that does not evict holds of `logical` tokens."""
    same = keys.dim() == values.dim() == 4 and keys.shape[:3] == values.shape[:3] and keys.dtype == values.dtype
    fits = same and keys.is_floating_point() and keys.shape[2] <= logical
    check(fits, "keys and values", "[B, H, stored, D], of one dtype, of no more tokens than were read")
