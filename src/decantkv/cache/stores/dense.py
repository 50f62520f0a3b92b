"""Kept tokens, equally many slots for every head: buffers with slack at their end, so that a new token is written.

After a prompt a store holds exactly what was kept; slack is taken when the first new token comes, and again, in steps,
whenever it is used up. What `keys` and `values` show is always the filled part alone. Rows and heads that hold fewer
tokens have filler on the left, which the model's own attention is kept from by its mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from decantkv.base.precision import writable
from decantkv.base.transfer import to_device
from decantkv.base.versions import kernels_run_on
from decantkv.cache.stores.store import check, numbers_of
from decantkv.hf.attention_hook import AttentionCall
from decantkv.hf.masks import hide_filler, real_tokens, refit
from decantkv.scoring.window import Rotate
from decantkv.selection.selector import FILLER, Kept

ROOM = 128  # slots a store or a lane gains, at least, when it must grow


class DenseStore:
    """One layer's keys and values, the same number of slots for every head.

    Attributes:
        length: filled slots.
        valid: [B, 1 or H, S] bool, True where one of the first S slots holds a token and no pad; None: all of them do.
        settled: slots that the prompt, or the last eviction, left.
        whole: nothing was evicted, so that `crop` may take back everything.
    """

    attends, staged = False, 0

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Take keys [B, H, K, D] and values [B, H, K, Dv] over as they are, without a copy."""
        self._keys, self._values = keys, values
        self._begin(keys)

    def _begin(self, keys: Tensor) -> None:
        self.length = self.settled = keys.shape[2]
        self.home, self.whole = keys.device, True
        self.valid: Tensor | None = None

    @classmethod
    def make(cls, keys: Tensor, values: Tensor, *, announced: int) -> Self:
        """Return a store of these tokens; `announced`: number of tokens still to come, 0 if unknown."""
        return cls(keys, values)

    @classmethod
    def of_all(cls, keys: Tensor, values: Tensor, held: Sequence[int] | None, *, announced: int) -> Self:
        """Return a store of a whole prompt; `held`: tokens of each row, None if no slot is a pad."""
        store = cls.make(_owned(keys), _owned(values), announced=announced)
        if held is not None:
            place = torch.arange(keys.shape[2], device=keys.device)
            store.valid = (place >= keys.shape[2] - to_device(held, keys.device)[:, None])[:, None]
        return store

    @classmethod
    def from_kept(cls, keys: Tensor, values: Tensor, kept: Kept, *, announced: int) -> Self:
        """Return a store of the kept tokens of a prompt's keys [B, H, N, D] and values [B, H, N, Dv]."""
        store = cls.make(*gather_kv(keys, values, kept.indices), announced=announced)
        store.valid, store.whole = valid_slots(kept), False
        return store

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

    @property
    def batch(self) -> int:
        """B."""
        return self.buffers()[0].shape[0]

    @property
    def stored(self) -> int:
        """Filled slots."""
        return self.length

    @property
    def appended(self) -> int:
        """See `Store.appended`; everything where nothing was evicted."""
        return self.length if self.whole else self.length - self.settled

    @property
    def hides(self) -> bool:
        """Return whether some slots are filler."""
        return self.valid is not None

    def update(self, keys: Tensor, values: Tensor, *, reserve: int = 0) -> tuple[Tensor, Tensor]:
        """Append keys [B, H, T, D] and values [B, H, T, Dv] in place; return views of all.

        Args:
            reserve: tokens after these that a growth makes room for at once; 0 if their number is unknown.
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

    def forget_staged(self) -> None:
        """Nothing to do: new tokens are stored at once."""

    def expect_pads(self, real: Tensor) -> None:
        """As `Store.expect_pads`; no token attends to the pads, whatever later masks say."""
        held = self.held()
        new = real.to(held.device)[:, None].expand(-1, held.shape[1], -1)
        self.valid = torch.cat([held, new], 2)

    def mask(self, call: AttentionCall, *, uneven: bool) -> Any:
        """Return the call's mask with filler hidden from new tokens.

        Args:
            uneven: transformers made the mask for a layer that may store another number of tokens.

        Raises:
            ValueError: a 4-D mask over other keys than those stored.
        """
        mask, kv_len = call.mask, call.key.shape[2]
        if uneven:
            mask = refit(mask, q_len=call.query.shape[2], kv_len=kv_len, later=kv_len - self.settled)
        if not self.whole and isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] != kv_len:
            raise ValueError(
                f"attention_mask: expected a 2-D mask of all tokens after eviction, got a 4-D one over "
                f"{mask.shape[-1]} keys where {kv_len} are stored"
            )
        if self.valid is None:
            return mask
        return hide_filler(
            mask, self.valid, query=call.query, kv_len=kv_len, backend=call.backend, causal=call.causal
        )  # fmt: skip

    def held(self) -> Tensor:
        """Return [B, 1 or H, length] bool, True where a slot holds a token."""
        x = self.buffers()[0]
        shown = torch.ones(x.shape[0], 1, self.length, dtype=torch.bool, device=x.device)
        if self.valid is None:
            return shown
        rest = shown[:, :, self.valid.shape[2] :].expand(-1, self.valid.shape[1], -1)
        return torch.cat([self.valid, rest], 2)

    def right_aligned(self, mask: Any) -> tuple[Tensor, Tensor, list[int]]:
        """As `Store.right_aligned`; `mask` is the last token's, which hides pads."""
        keys, values = self.keys, self.values
        held = list(real_tokens(mask, batch=keys.shape[0], kv_len=keys.shape[2], device=keys.device))
        if self.valid is not None:
            hidden = (~self.valid).sum(-1).amax(-1).tolist()
            held = [min(n, keys.shape[2] - int(h)) for n, h in zip(held, hidden, strict=True)]
        return keys, values, held

    def later(self, logical: int) -> Tensor:
        """[B, H, appended] positions of the columns since the last eviction, FILLER at pads."""
        shown = self.held()[:, :, self.length - self.appended :]
        place = torch.arange(logical - self.appended, logical, device=shown.device)
        return torch.where(shown, place, FILLER).expand(-1, self.buffers()[0].shape[1], -1)

    def refill(self, keys: Tensor, values: Tensor, kept: Kept, *, announced: int) -> Self:
        """Return a store of the same kind that holds the kept tokens alone."""
        store = self.make(keys, values, announced=announced)
        store.valid, store.whole, store.home = valid_slots(kept), False, self.home
        return store

    def renumber(self, kept: Kept, logical: int, rotate: Rotate) -> None:
        """As `Store.renumber`, right after the eviction."""
        slots = kept.indices.shape[2]
        place = torch.arange(logical - slots, logical, device=kept.indices.device)
        ahead = torch.where(kept.valid(), place - kept.indices, 0)  # [B, H, K]
        keys = self.keys
        self._overwrite(rotate(keys.flatten(0, 1)[:, None], ahead.flatten(0, 1)).view_as(keys))

    def _overwrite(self, keys: Tensor) -> None:
        """Put other keys in place of those stored."""
        self._keys = keys

    def crop(self, number: int) -> None:
        """Forget the newest `number` tokens; their slots become slack."""
        self.cut(self.length - number)
        self.settled = min(self.settled, self.length)

    def cut(self, length: int) -> bool:
        """As `Store.cut`; the slots behind become slack."""
        self.length = length
        if self.valid is not None:
            left = self.valid[:, :, :length]
            self.valid = None if bool(left.all()) else left
        return True

    def select_rows(self, rows: Tensor) -> None:
        """As `Store.select_rows`."""
        self.each(lambda x: x.index_select(0, rows.to(x.device)))
        if self.valid is not None:
            self.valid = self.valid.index_select(0, rows.to(self.valid.device))

    def to(self, device: torch.device | str) -> None:
        """Move keys and values; slack is left behind."""
        self.each(lambda x: x.to(device))

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace keys and values by `change` of their filled part."""
        self._keys, self._values = change(self.keys), change(self.values)

    def nbytes(self) -> int:
        """Return the bytes of the filled slots."""
        held = sum({x.data_ptr(): x.nbytes for x in self.buffers()}.values())  # keys and values may be one tensor
        return held * self.length // self.capacity if self.capacity else held

    def buffers(self) -> list[Tensor]:
        """Return keys and values, slack included."""
        return [self._keys, self._values]

    def tensors(self) -> list[Tensor]:
        """Return keys and values, slack included."""
        return self.buffers()

    def state(self) -> dict[str, Tensor]:
        """Return the store as plain tensors."""
        numbers = torch.tensor([self.settled, int(self.whole)], device="cpu")
        state = {"keys": self.keys, "values": self.values, "numbers": numbers}
        return state if self.valid is None else {**state, "valid": self.valid}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor], *, announced: int = 0) -> Self:
        """Return the store that `state` described.

        Raises:
            KeyError, ValueError: a tensor is missing, or shapes contradict each other.
        """
        keys, values, valid = state["keys"], state["values"], state.get("valid")
        same = keys.dim() == values.dim() == 4 and keys.shape[:3] == values.shape[:3] and keys.dtype == values.dtype
        check(same and keys.is_floating_point(), "keys and values", "[B, H, stored, D], floating-point, of one dtype")
        batch, heads, stored = keys.shape[:3]
        settled, whole = numbers_of(state, 2)
        check(0 <= settled <= stored and whole in (0, 1), "slots", "no more than are stored")
        fits = valid is None or (
            valid.dim() == 3 and valid.dtype == torch.bool and valid.shape[0] == batch
            and valid.shape[1] in (1, heads) and valid.shape[2] <= stored
        )  # fmt: skip
        check(fits, "valid slots", "[B, 1 or H, slots]")
        store = cls.make(keys, values, announced=announced)
        store.valid, store.settled, store.whole = valid, settled, bool(whole)
        return store

    @classmethod
    def cat(cls, stores: Sequence[DenseStore], *, announced: int) -> Self:
        """Return the rows of several stores as one; shorter ones get filler on the left. The stores do not change."""
        most = max(store.length for store in stores)

        def left(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0, most - x.shape[2], 0))

        keys = torch.cat([left(store.keys) for store in stores])
        joined = cls.make(keys, torch.cat([left(store.values) for store in stores]), announced=announced)
        held = [store.held() for store in stores]
        heads = max(x.shape[1] for x in held)
        valid = torch.cat([F.pad(x, (most - x.shape[2], 0)).expand(-1, heads, -1) for x in held])
        joined.valid = None if bool(valid.all()) else valid
        joined.whole = all(store.whole for store in stores)
        joined.settled = most if joined.whole else most - min(store.appended for store in stores)
        return joined


def gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return [B, H, N, D] at [B, H, K] indices, as new memory; filler slots get zeros."""
    slots = indices.clamp_min(0)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, slots).masked_fill_((indices == FILLER)[..., None], 0.0)


def gather_kv(keys: Tensor, values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values at the indices [B, H, K] as new memory: one launch on CUDA, `gather` twice elsewhere."""
    if not (keys.stride(-1) == values.stride(-1) == 1 and kernels_run_on(keys.device)):
        return gather(keys, indices), gather(values, indices)
    from decantkv import kernels

    return kernels.gather_kv(keys, values, indices)


def valid_slots(kept: Kept) -> Tensor | None:
    """Return [B, 1 or H, K] bool, True where a slot holds a token, or None if all do; no wait where the host knows."""
    if kept.rows is not None and set(kept.rows) == {kept.indices.shape[2]}:
        return None
    valid = kept.valid()
    if kept.rows is not None:
        return valid[:, :1]
    same = kept.counts.shape[1] == 1 or bool((kept.counts == kept.counts[:, :1]).all())
    return None if bool(valid.all()) else valid[:, :1] if same else valid


def _owned(x: Tensor) -> Tensor:
    """Return the tensor alone in its storage: a view of a larger one would keep all of it alive."""
    whole = x.untyped_storage().nbytes() == x.numel() * x.element_size()
    return x if whole else x.clone(memory_format=torch.contiguous_format)
