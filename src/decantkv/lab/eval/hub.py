"""Data sets of the Hugging Face hub."""

from __future__ import annotations

from typing import Any


def load_rows(argument: str, name: str, part: str | None, *, split: str, way_out: str) -> Any:
    """The rows of a data set.

    Args:
        argument, way_out: what an error begins and ends with.

    Raises:
        ValueError: the package datasets is missing, or the hub is out of reach.
    """
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{argument}: expected the package datasets, which fetches {name}, to be installed (pip install datasets, "
            f"or decantkv's extra [eval]), got none; {way_out}"
        ) from error
    try:
        return load_dataset(name, part, split=split)
    except Exception as error:
        raise ValueError(
            f"{argument}: the hub's {name} cannot be read ({type(error).__name__}: {error}); {way_out}"
        ) from error
