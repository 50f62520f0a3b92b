"""The interface of stores of kept tokens. A cache layer has one store, and does not depend on its layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from decantkv.scoring.window import Rotate
from decantkv.selection.selector import Kept

if TYPE_CHECKING:
    from decantkv.hf.attention_hook import AttentionCall


class Store(Protocol):
    """One layer's keys and values after its prompt.

    Attributes:
        attends: the store computes attention itself, since the model's cannot read it.
        home: the device that the tokens came from.
    """

    attends: bool
    home: torch.device

    @property
    def keys(self) -> Tensor:
        """The keys of all tokens, in the store's own layout."""

    @property
    def values(self) -> Tensor:
        """The values of all tokens, in the store's own layout."""

    @property
    def length(self) -> int:
        """The number that `cut` takes: slots, or columns since the last eviction."""

    @property
    def batch(self) -> int:
        """B."""

    @property
    def stored(self) -> int:
        """Slots of the head that holds most, filler included."""

    @property
    def appended(self) -> int:
        """Columns given since the last eviction, pads included: how far `crop` may go back."""

    @property
    def staged(self) -> int:
        """Tokens that `update` was given and that wait for their attention call."""

    @property
    def hides(self) -> bool:
        """Return whether slots are stored that no token may attend to."""

    def update(self, keys: Tensor, values: Tensor, *, reserve: int = 0) -> tuple[Tensor, Tensor]:
        """Take keys [B, H, T, D] and values [B, H, T, Dv]; return what the attention function gets to read."""

    def forget_staged(self) -> None:
        """The staged tokens' forward failed."""

    def expect_pads(self, real: Tensor) -> None:
        """Of the tokens that the next `update` brings, those are pads where `real` [B, T] bool is False."""

    def mask(self, call: AttentionCall, *, uneven: bool) -> Any:
        """The mask for the model's own attention over this store."""

    def held(self) -> Tensor:
        """[B, 1 or H, stored] bool: which slots hold a token, in the order of `right_aligned`."""

    def right_aligned(self, mask: Any) -> tuple[Tensor, Tensor, list[int]]:
        """Keys [B, H, S, D], values [B, H, S, Dv] and how many tokens each row holds, which are its last."""

    def later(self, logical: int) -> Tensor:
        """[B, H, appended] int64: the positions of the appended columns, FILLER at pads; the last is `logical` − 1."""

    def refill(self, keys: Tensor, values: Tensor, kept: Kept, *, announced: int) -> Store:
        """The store with keys [B, H, K, D] and values [B, H, K, Dv] of the kept tokens in place of all it held."""

    def renumber(self, kept: Kept, logical: int, rotate: Rotate) -> None:
        """Turn kept keys by as many positions as were dropped behind them, so that no distance spans a gap."""

    def crop(self, number: int) -> None:
        """Forget the newest `number` columns."""

    def cut(self, length: int) -> bool:
        """Forget what was written behind so many slots or columns; return whether that was possible."""

    def select_rows(self, rows: Tensor) -> None:
        """Batch rows in a new order, repeated or left out; rows: [B'] int64."""

    def to(self, device: torch.device | str) -> None:
        """Move keys and values."""

    def nbytes(self) -> int:
        """Bytes of the tokens' keys and values, without room behind them."""

    def buffers(self) -> list[Tensor]:
        """The tensors that hold keys and values, room included."""

    def tensors(self) -> list[Tensor]:
        """Everything held in memory."""

    def state(self) -> dict[str, Tensor]:
        """The store as plain tensors; `stores.from_state` reads them."""


def check(holds: bool, what: str, expected: str) -> None:
    """Raise ValueError for a state, read from a file, that contradicts itself."""
    if not holds:
        raise ValueError(f"path: expected {what} {expected}, got a file that says otherwise")


def numbers_of(state: Mapping[str, Tensor], count: int) -> list[int]:
    """The `count` whole numbers that a state holds under "numbers".

    Raises:
        ValueError: there are others.
    """
    numbers = state["numbers"]
    check(numbers.dim() == 1 and len(numbers) == count and not numbers.is_floating_point(), "numbers", f"{count} whole")
    return [int(n) for n in numbers.tolist()]
