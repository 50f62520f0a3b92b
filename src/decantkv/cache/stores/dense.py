"""Where kept tokens live: buffers with slack at their end, so that a new token is written and not concatenated.

After a prompt a store holds exactly what was kept; slack is taken when the first new token comes, and again, in steps,
whenever it is used up. What `keys` and `values` show is always the filled part alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from decantkv.base.precision import writable

ROOM = 128  # slots a store or a lane gains, at least, when it must grow


class SlackStore:
    """One layer's keys and values, the same number of slots for every head.

    Attributes:
        length: filled slots.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Take keys [B, H, K, D] and values [B, H, K, Dv] over as they are, without a copy."""
        self._keys, self._values = keys, values
        self.length = keys.shape[2]

    @property
    def keys(self) -> Tensor:
        """[B, H, length, D], a view."""
        return self._keys[:, :, : self.length]

    @property
    def values(self) -> Tensor:
        """[B, H, length, Dv], a view."""
        return self._values[:, :, : self.length]

    @property
    def capacity(self) -> int:
        """Slots in memory."""
        return self._keys.shape[2]

    def update(self, keys: Tensor, values: Tensor, *, reserve: int = 0) -> tuple[Tensor, Tensor]:
        """Append keys [B, H, T, D] and values [B, H, T, Dv] in place; return views of all.

        Args:
            reserve: tokens after these that a growth makes room for at once; 0 where nobody said how many will come.
        """
        new = keys.shape[2]
        self.make_room(new, reserve)
        self._keys, self._values = writable(self._keys, keys), writable(self._values, values)
        end = self.length + new
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self.keys, self.values

    def make_room(self, new: int, reserve: int) -> None:
        """Grow, for `reserve` tokens more, unless `new` tokens fit."""
        if self.length + new <= self.capacity:
            return
        slots = self.length + max(new + reserve, ROOM)
        self._keys, self._values = self._moved(self._keys, slots), self._moved(self._values, slots)

    def _moved(self, x: Tensor, slots: int) -> Tensor:
        with torch.inference_mode(False):  # it is written later, perhaps outside
            wider = x.new_empty(*x.shape[:2], slots, x.shape[3])
        wider[:, :, : self.length] = x[:, :, : self.length]
        return wider

    def crop(self, number: int) -> None:
        """Forget the newest `number` tokens; their slots become slack."""
        self.length -= number

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace both tensors by `change` of their filled part: rows reordered, repeated or left out."""
        self._keys, self._values = change(self.keys), change(self.values)

    def offload(self) -> None:
        """To the CPU, slack left behind."""
        self._home = self.buffers()[0].device
        self.each(lambda x: x.to("cpu"))

    def prefetch(self) -> None:
        """Back to where `offload` took it from."""
        self.each(lambda x: x.to(getattr(self, "_home", x.device)))

    def nbytes(self) -> int:
        """Bytes of the filled slots."""
        held = sum({x.data_ptr(): x.nbytes for x in self.buffers()}.values())  # keys and values may be one tensor
        return held * self.length // self.capacity if self.capacity else held

    def buffers(self) -> list[Tensor]:
        """Everything held in memory, slack included."""
        return [self._keys, self._values]
