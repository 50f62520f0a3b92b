"""Stores of kept tokens, one per layer: dense, ragged, or inside layers of transformers' own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import transformers
from torch import Tensor
from transformers import cache_utils

from decantkv.cache.stores.dense import DenseStore
from decantkv.cache.stores.fp8 import Fp8Store
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.cache.stores.static import StaticStore
from decantkv.cache.stores.store import Store

Inner = Literal["plain", "fp8", "static"]
DENSE: dict[Inner, type[DenseStore]] = {"plain": DenseStore, "fp8": Fp8Store, "static": StaticStore}


def check_inner(kind: Inner) -> None:
    """Raise ValueError where this transformers has no such layer."""
    if kind == "fp8" and not hasattr(cache_utils, "Fp8QuantizedLayer"):
        raise ValueError(
            f"store: expected 'plain' or 'static' with transformers {transformers.__version__}, which has no "
            "Fp8QuantizedLayer, got 'fp8'"
        )


def from_state(state: Mapping[str, Tensor], kind: Inner, *, announced: int = 0) -> Store:
    """The store that `state()` described, in the wanted kind of memory where heads hold equally many tokens.

    Raises:
        KeyError, ValueError: the state contradicts itself.
    """
    return RaggedStore.from_state(state) if "lens" in state else DENSE[kind].from_state(state, announced=announced)


def concat(stores: Sequence[Store], kind: Inner, *, whole: bool, announced: int = 0) -> Store:
    """The rows of several layers' stores as one store; they stay as they are.

    Args:
        whole: none of the layers evicted anything.
    """
    if any(isinstance(store, RaggedStore) for store in stores):
        ragged = [RaggedStore.of_dense(store) if isinstance(store, DenseStore) else store for store in stores]
        lanes = [store for store in ragged if isinstance(store, RaggedStore)]
        return RaggedStore.cat(lanes, appended=max(store.appended for store in lanes) if whole else None)
    return DENSE[kind].cat([store for store in stores if isinstance(store, DenseStore)], announced=announced)
