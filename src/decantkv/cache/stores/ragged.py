"""Keys and values of heads that keep different numbers of tokens: flat storage, and attention over it.

A *lane* is one (batch row, KV head) pair, batch first: lane = b·H + h. Lane r owns slots starts[r] … starts[r] +
capacity[r] of the flat K and V and has filled the first lens[r] of them. After a prompt capacity equals length; room
for new tokens is taken when the first one comes, the same for every lane, and again whenever it is used up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from decantkv.base.precision import without_autocast, writable
from decantkv.base.versions import kernels_on
from decantkv.cache.report import storage_bytes
from decantkv.cache.stores.dense import ROOM, DenseStore
from decantkv.cache.stores.store import check, numbers_of
from decantkv.hf.attention_hook import AttentionCall
from decantkv.scoring.window import Rotate
from decantkv.selection.selector import FILLER, Kept

if TYPE_CHECKING:
    from decantkv.kernels.decode import Splits

TILE_BYTES = 8 * 2**20  # of logits and upcast keys alive at once in the torch path


class Mark(NamedTuple):
    """The fill of a store between two steps."""

    lens: Tensor
    room: int
    appended: int


class Known(NamedTuple):
    """What is known of the lanes' tokens beside their number on the device.

    Attributes:
        evicted: tokens that each head of a row held at the last eviction; None: only the device knows.
        real: [B, C] bool, False where one of the first C appended columns is a pad; None while all are tokens.
    """

    evicted: tuple[int, ...] | None = None
    real: Tensor | None = None


class RaggedStore:
    """One layer's kept tokens, which attends to them itself.

    Attributes:
        batch, heads: B and H; B·H lanes.
        keys: [S, D] and values: [S, Dv], S the sum of the lanes' capacities.
        starts, lens: [B·H] int64 on the device.
        room: slots every lane still has free at its end.
        appended: columns given since the prompt, pads included, which is how far `crop` may go back.
        known: what the host knows of the last eviction, and which columns are pads.
        fresh: new tokens that wait for their attention call: keys and values, or nothing.
        changing: an interrupt in the midst of a change leaves this True, and the lanes of no use.
    """

    attends, hides = True, False

    def __init__(
        self,
        keys: Tensor,
        values: Tensor,
        starts: Tensor,
        lens: Tensor,
        *,
        batch: int,
        room: int = 0,
        appended: int = 0,
    ) -> None:
        self.keys, self.values, self.starts, self.lens = keys, values, starts, lens
        self.heads = lens.shape[0] // batch
        self.room, self.appended = room, appended
        self.known = Known()
        self.fresh: tuple[Tensor, ...] = ()
        self.home = keys.device
        self.changing = False
        self._splits: Splits | None = None

    @property
    def batch(self) -> int:
        """B."""
        return self.lens.shape[0] // self.heads

    @property
    def real(self) -> Tensor | None:
        """[B, C] bool, as in `Known`."""
        return self.known.real

    @property
    def stored(self) -> int:
        """The most tokens any head holds."""
        return int(self.lens.max())

    @property
    def length(self) -> int:
        """Columns since the last eviction."""
        return self.appended

    @property
    def staged(self) -> int:
        """Tokens given to `update` that no `append` has stored yet."""
        return self.fresh[0].shape[2] if self.fresh else 0

    @classmethod
    def of_dense(cls, store: DenseStore) -> RaggedStore:
        """The tokens of a dense store, in place where its memory is laid out for it."""
        keys, values = store.keys.contiguous(), store.values.contiguous()
        batch, heads, stored = keys.shape[:3]
        flat_keys, flat_values = keys.view(-1, keys.shape[3]), values.view(-1, values.shape[3])
        lens = store.held().expand(-1, heads, -1).sum(-1).flatten()
        if store.valid is None or store.valid.shape[2] <= store.settled:  # filler is on the left
            starts = torch.arange(1, batch * heads + 1, device=keys.device) * stored - lens
        else:  # pads of later turns lie between tokens
            held = store.held().expand(-1, heads, -1).flatten()
            flat_keys, flat_values, starts = flat_keys[held], flat_values[held], lens.cumsum(0) - lens
        ragged = cls(flat_keys, flat_values, starts, lens, batch=batch, appended=store.appended)
        if store.hides and store.appended:
            ragged.known = Known(real=store.held()[:, 0, stored - store.appended :])
        return ragged

    @classmethod
    def from_kept(cls, keys: Tensor, values: Tensor, kept: Kept) -> RaggedStore:
        """Gather the kept tokens of a prompt.

        Args:
            keys: [B, H, N, D]; values: [B, H, N, Dv].
        """
        batch, heads = keys.shape[:2]
        chosen = kept.indices.flatten(0, 1)  # [B·H, K]
        held = chosen != FILLER
        lane = torch.arange(batch * heads, device=keys.device)[:, None].expand_as(chosen)[held]
        token = chosen[held]
        lens = held.sum(-1)
        b, h = lane // heads, lane % heads
        store = cls(keys[b, h, token], values[b, h, token], lens.cumsum(0) - lens, lens, batch=batch)
        store.known = Known(kept.rows)
        return store

    def update(self, keys: Tensor, values: Tensor, *, reserve: int = 0) -> tuple[Tensor, Tensor]:
        """Hold new tokens until their attention call, which alone says which of them are pads; `append` stores them."""
        self.fresh = keys, values
        return keys, values

    def forget_staged(self) -> None:
        """No attention call comes for the new tokens."""
        self.fresh = ()

    def expect_pads(self, real: Tensor) -> None:
        """Nothing to do: `append` gets to know them, from any kind of mask."""

    def append(self, keys: Tensor, values: Tensor, real: Tensor | None = None, *, reserve: int = 0) -> None:
        """Write new tokens behind each lane's own.

        Args:
            keys: [B, H, T, D]; values: [B, H, T, Dv].
            real: [B, T] bool, False at a pad, which is not stored; pads are leftmost. None when there is none.
            reserve: tokens after these that a growth makes room for at once; 0 if their number is unknown.
        """
        new = keys.shape[2]
        if new > self.room:
            self._grow(max(new + reserve, ROOM))
        self.keys, self.values = writable(self.keys, keys), writable(self.values, values)
        self.lens = writable(self.lens, self.lens)
        self.changing = True
        if real is not None or not self._append_at_once(keys, values):
            self._append_each(keys, values, real)
        if real is not None:
            self.known = self.known._replace(real=torch.cat([self.columns(), real], 1))
        self.room -= new
        self.appended += new
        self.changing = False

    def _append_each(self, keys: Tensor, values: Tensor, real: Tensor | None) -> None:
        """Write and count by torch's operations."""
        new = keys.shape[2]
        place = torch.arange(new, device=keys.device)
        shown = None if real is None else real.repeat_interleave(self.heads, 0)  # [B·H, T]
        pads = 0 if shown is None else new - shown.sum(-1, keepdim=True)
        slots = (self.starts + self.lens)[:, None] + place - pads  # [B·H, T]
        flat_keys, flat_values = keys.reshape(-1, keys.shape[3]), values.reshape(-1, values.shape[3])
        if shown is not None:
            slots, flat_keys, flat_values = slots[shown], flat_keys[shown.flatten()], flat_values[shown.flatten()]
        self.keys.index_copy_(0, slots.flatten(), flat_keys.to(self.keys.dtype))
        self.values.index_copy_(0, slots.flatten(), flat_values.to(self.values.dtype))
        self.lens += new if shown is None else shown.sum(-1)

    def _append_at_once(self, keys: Tensor, values: Tensor) -> bool:
        """Return whether one launch wrote the new tokens and counted them."""
        step = kernels_on(keys.device, "step")
        if step is None or keys.shape[2] > step.MOST_TOKENS or not keys.dtype == values.dtype == self.keys.dtype:
            return False
        step.append(keys, values, (self.keys, self.values), self.starts, self.lens)
        return True

    def attend(
        self,
        q: Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Attention of the newest tokens over everything stored; causal among themselves.

        Args:
            q: [B, HQ, T, D], the queries of the last T tokens appended; a lane sees the stored tokens up to each.
            softcap: c of c·tanh(s/c) on the scaled logits; sink_logits: [HQ], as in `AttentionWindow`.

        Returns:
            [B, HQ, T, Dv] in q's dtype. Rows of queries that were pads hold nothing of use.
        """
        kernel = kernels_on(q.device, "decode")
        if kernel is None or kernel.unsupported(q, self.keys, self.values) is not None:
            with without_autocast(q.device):
                return self._attend_in_tiles(q, scale, softcap, sink_logits)
        if self._splits is None:
            self._splits = kernel.plan(self.starts, self._capacity())
        attended: Tensor = kernel.attend(
            q, self.keys, self.values, self.lens, self._splits,
            scale=scale, softcap=softcap, sink_logits=sink_logits,
        )  # fmt: skip
        return attended

    def _attend_in_tiles(self, q: Tensor, scale: float, softcap: float | None, sink_logits: Tensor | None) -> Tensor:
        """Lanes of like length together, a tile of keys at a time, in at least float32."""
        wide = torch.promote_types(q.dtype, torch.float32)
        new, width = q.shape[2], self.values.shape[1]
        group = q.shape[1] // self.heads
        rows = q.reshape(-1, group * new, q.shape[3]).to(wide) * scale  # [B·H, g·T, D]
        out = torch.zeros(rows.shape[0], group * new, width, dtype=wide, device=q.device)
        sinks = None if sink_logits is None else sink_logits.to(wide).view(-1, group).repeat_interleave(new, 1)
        behind = torch.arange(new - 1, -1, -1, device=q.device).repeat(group)  # tokens appended after each row's own
        item = torch.finfo(wide).bits // 8
        tile = max(16, TILE_BYTES // (item * (2 * group * new + q.shape[3] + width)))
        for lanes, shortest, longest in self._alike(tile):
            seen = self.lens[lanes][:, None] - behind  # [n, g·T]
            m = rows.new_full(seen.shape, -torch.inf) if sinks is None else sinks[lanes % self.heads]
            total = torch.zeros_like(m) if sinks is None else torch.ones_like(m)
            acc = out.new_zeros(*seen.shape, width)
            ends = (self.starts + self.lens)[lanes][:, None] - 1
            for low in range(0, longest, tile):
                place = torch.arange(low, min(low + tile, longest), device=q.device)
                slots = torch.minimum(self.starts[lanes][:, None] + place, ends).flatten()
                keys, values = (
                    x.index_select(0, slots).view(len(lanes), len(place), -1).to(wide) for x in self.buffers()
                )
                s = rows[lanes] @ keys.mT  # [n, g·T, keys]
                if softcap is not None:
                    s = torch.tanh(s / softcap) * softcap
                if low + tile > shortest - new:
                    s.masked_fill_(place >= seen[..., None], -torch.inf)
                m_new = torch.maximum(m, s.amax(-1))
                safe = m_new.masked_fill(m_new == -torch.inf, 0.0)
                e, decay = torch.exp(s - safe[..., None]), torch.exp(m - safe)
                acc = acc * decay[..., None] + e @ values
                total, m = total * decay + e.sum(-1), m_new
            out[lanes] = acc / total.where(total > 0, 1.0)[..., None]
        return out.view(q.shape[0], -1, new, width).to(q.dtype)

    def _alike(self, most: int) -> Iterator[tuple[Tensor, int, int]]:
        """Lanes by length, as many at once as hold `most` tokens with filler: their numbers, and two of the lengths.

        The shortest and the longest; lanes that hold nothing are left out.
        """
        lens, order = self.lens.sort(descending=True)
        lengths = [length for length in lens.tolist() if length]
        at = 0
        while at < len(lengths):
            stop = min(at + max(1, most // lengths[at]), len(lengths))
            yield order[at:stop], lengths[stop - 1], lengths[at]
            at = stop

    def mask(self, call: AttentionCall, *, uneven: bool) -> Any:
        """Not for a store that attends itself."""
        raise RuntimeError("the model's own attention cannot read a ragged store")

    def held(self) -> Tensor:
        """[B, H, L] bool: which slots of `right_aligned` hold a token."""
        longest = int(self.lens.max())
        place = torch.arange(longest, device=self.lens.device)
        return (place >= longest - self.lens[:, None]).view(self.batch, self.heads, longest)

    def later(self, logical: int) -> Tensor:
        """[B, H, appended] positions of the appended columns, FILLER at pads."""
        place = torch.arange(logical - self.appended, logical, device=self.lens.device)
        return torch.where(self.columns(), place, FILLER)[:, None].expand(-1, self.heads, -1)

    def renumber(self, kept: Kept, logical: int, rotate: Rotate) -> None:
        """As `Store.renumber`, right after the eviction."""
        ends = (self.starts + self.lens)[self.lanes()]
        behind = ends - torch.arange(ends.shape[0], device=ends.device)  # 1 at a lane's last slot
        ahead = logical - behind - kept.indices[kept.valid()]
        self.keys = rotate(self.keys[None, None], ahead[None])[0, 0]

    def counts(self) -> list[int] | None:
        """Return how many tokens each head of a row holds, or None if only the device knows."""
        if self.known.evicted is None or self.real is not None:
            return None
        return [n + self.appended for n in self.known.evicted]

    def right_aligned(self, mask: Any = None) -> tuple[Tensor, Tensor, list[int]]:
        """As `Store.right_aligned`, where heads hold equally many; left of a lane's tokens lies anything."""
        held = self.counts() or self.lens.view(self.batch, -1)[:, 0].tolist()
        longest = max(held)
        place = torch.arange(longest, device=self.lens.device)
        slots = (self.starts + self.lens)[:, None] - longest + place
        slots = slots.clamp_min(0)
        shape = (self.batch, self.heads, longest)
        return self.keys[slots].view(*shape, -1), self.values[slots].view(*shape, -1), held

    def refill(self, keys: Tensor, values: Tensor, kept: Kept, *, announced: int = 0) -> RaggedStore:
        """Replace what the lanes hold by fewer tokens; storage stays, and what is freed becomes room.

        The host does not wait where it knows what all heads hold, before and after.

        Args:
            keys: [B, H, K, D]; values: [B, H, K, Dv]; the last `kept.counts` of each lane are its tokens.
        """
        before, lens, width = self.counts(), kept.counts.flatten(), keys.shape[2]
        slots = self.starts[:, None] + torch.arange(width, device=keys.device)
        keys, values = keys.flatten(0, 1), values.flatten(0, 1)
        if kept.rows is None or set(kept.rows) != {width}:
            missing = (width - lens)[:, None]
            held = torch.arange(width, device=keys.device) >= missing
            slots, keys, values = (slots - missing)[held][None], keys[held][None], values[held][None]
        self.keys, self.values = writable(self.keys, keys), writable(self.values, values)
        self.lens = writable(self.lens, lens)
        self.keys.index_copy_(0, slots.flatten(), keys.flatten(0, 1))
        self.values.index_copy_(0, slots.flatten(), values.flatten(0, 1))
        if before is None or kept.rows is None:
            self.room = int((self._capacity() - lens).min())
        else:
            self.room += min(n - left for n, left in zip(before, kept.rows, strict=True))
        self.lens.copy_(lens)
        self.known, self.appended = Known(kept.rows), 0
        return self

    def crop(self, number: int) -> None:
        """Take back the newest `number` columns: from each lane the tokens among them, which pads are not.

        Raises:
            ValueError: that reaches into what the prompt's eviction left.
        """
        if number > self.appended:
            raise ValueError(
                f"crop: expected to remove at most the {self.appended} tokens after the evicted prompt, got {number}"
            )
        if number == 0:
            return
        left = self.appended - number
        self.changing = True
        self.lens = writable(self.lens, self.lens)
        if self.real is None or left >= self.real.shape[1]:
            self.lens -= number
            self.room += number
        else:  # a pad took no slot, and gives none back
            self.lens -= self.columns()[:, left:].sum(1).repeat_interleave(self.heads)
            self.known = self.known._replace(real=self.real[:, :left] if left else None)
            self.room = int((self._capacity() - self.lens).min())
        self.appended = left
        self.changing = False

    def cut(self, length: int) -> bool:
        """As `Store.cut`."""
        if self.changing or length > self.appended:
            return False
        self.crop(self.appended - length)
        return True

    def columns(self) -> Tensor:
        """[B, appended] bool: which columns given since the prompt are tokens of each row, not pads."""
        shown = torch.ones(self.batch, self.appended, dtype=torch.bool, device=self.lens.device)
        if self.real is not None:
            shown[:, : self.real.shape[1]] = self.real
        return shown

    def select_rows(self, rows: Tensor) -> None:
        """Batch rows in a new order, repeated or left out: what beams, repeats and selections of a batch need.

        Args:
            rows: [B'] int64 batch rows.
        """
        lanes = rows.to(self.lens.device)[:, None] * self.heads + torch.arange(self.heads, device=self.lens.device)
        self.known = Known(real=None if self.real is None else self.real[rows.to(self.real.device)])
        self._move(lanes.flatten(), self.room)

    def shrink(self, keep: Tensor) -> None:
        """Keep only some tokens of every lane; before any is appended.

        Args:
            keep: [S] bool over the flat slots.
        """
        if self.appended or self.room:
            raise RuntimeError("a store shrinks before new tokens come")
        # every slot is filled here, so that counting by lane is counting by span
        before = torch.nn.functional.pad(keep.long().cumsum(0), (1, 0))
        lens = before[self.starts + self.lens] - before[self.starts]
        self.known = Known()
        self._layout(self.keys[keep], self.values[keep], lens, 0)

    def lanes(self) -> Tensor:
        """[S] int64: which lane each slot belongs to."""
        lanes = torch.arange(self.lens.shape[0], device=self.lens.device)
        return lanes.repeat_interleave(self.lens + self.room)

    def padded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys [B, H, L, D] and values [B, H, L, Dv], left-aligned, and which slots hold a token [B, H, L] bool.

        A copy of the longest lane's size; for looking at, not for decoding.
        """
        longest = int(self.lens.max())
        place = torch.arange(longest, device=self.lens.device)
        held = place < self.lens[:, None]
        slots = torch.where(held, self.starts[:, None] + place, 0)
        shape = (self.batch, self.heads, longest)
        return (
            self.keys[slots].masked_fill(~held[..., None], 0.0).view(*shape, -1),
            self.values[slots].masked_fill(~held[..., None], 0.0).view(*shape, -1),
            held.view(shape),
        )

    def tensors(self) -> list[Tensor]:
        """Everything that is held in memory."""
        return [self.keys, self.values, self.starts, self.lens]

    def buffers(self) -> list[Tensor]:
        """Keys and values, room included."""
        return [self.keys, self.values]

    def nbytes(self) -> int:
        """Bytes of keys and values; a store has no room before the first new token."""
        return storage_bytes(self.buffers())

    def mark(self) -> Mark:
        """Return the store's fill, to which a step that went wrong is taken back."""
        return Mark(self.lens.clone(), self.room, self.appended)

    def back_to(self, mark: Mark) -> None:
        """Forget what was appended since, without moving anything."""
        self.lens.copy_(mark.lens)
        self.room, self.appended = mark.room, mark.appended
        self.forget_staged()

    def count(self, new: int) -> None:
        """Count columns that a recorded step wrote, whose lengths move on the device."""
        self.room -= new
        self.appended += new

    def newest(self) -> list[Tensor]:
        """Each lane's length, newest key and newest value."""
        last = self.starts + self.lens - 1
        return [self.lens.clone(), self.keys[last], self.values[last]]

    def state(self) -> dict[str, Tensor]:
        """The store as plain tensors, for safetensors or torch.save."""
        numbers = torch.tensor([self.batch, self.room, self.appended], device="cpu")
        state = {"keys": self.keys, "values": self.values, "starts": self.starts, "lens": self.lens, "numbers": numbers}
        return state if self.real is None else {**state, "real": self.real}

    @classmethod
    def from_state(cls, state: Mapping[str, Tensor]) -> RaggedStore:
        """The store that `state` described.

        Raises:
            ValueError: a tensor is missing, or spans lie outside the flat storage.
        """
        names = ("keys", "values", "starts", "lens", "numbers")
        if missing := [name for name in names if name not in state]:
            raise ValueError(f"state: expected the tensors {', '.join(names)}, got none named {', '.join(missing)}")
        keys, values, starts, lens = (state[name] for name in names[:4])
        real = state.get("real")
        batch, room, appended = numbers_of(state, 3)
        fits = (
            keys.dim() == values.dim() == 2 and starts.dim() == lens.dim() == 1 and starts.shape == lens.shape
            and not starts.is_floating_point() and not lens.is_floating_point() and keys.shape[0] == values.shape[0]
            and batch >= 1 and lens.shape[0] >= 1 and lens.shape[0] % batch == 0 and room >= 0 and appended >= 0
            and keys.is_floating_point() and keys.dtype == values.dtype
        )  # fmt: skip
        check(fits and not bool((starts < 0).any() | (lens < 0).any()), "lanes", "inside their storage")
        check(
            real is None or (real.dim() == 2 and real.dtype == torch.bool and real.shape[0] == batch),
            "real columns", "[B, columns]",
        )  # fmt: skip
        first, order = starts.sort()
        ends = first + lens[order] + room
        apart = int(ends[-1]) <= keys.shape[0] and not bool((ends[:-1] > first[1:]).any())
        check(apart, "lanes", "inside their storage, beside one another")
        store = cls(keys, values, starts, lens, batch=batch, room=room, appended=appended)
        store.known = Known(real=real)
        return store

    @classmethod
    def cat(cls, stores: Sequence[RaggedStore], *, appended: int | None = None) -> RaggedStore:
        """The rows of several stores as one, without room; the stores stay as they are.

        Args:
            appended: columns that `crop` may take back, pads on the left of rows that have fewer; None: as many as
                every store has.
        """
        appended = min(store.appended for store in stores) if appended is None else appended
        packed = [store._filled() for store in stores]
        lens = torch.cat([store.lens for store in stores])
        joined = cls(
            torch.cat([s.keys[slots] for s, slots in zip(stores, packed, strict=True)]),
            torch.cat([s.values[slots] for s, slots in zip(stores, packed, strict=True)]),
            lens.cumsum(0) - lens,
            lens,
            batch=sum(store.batch for store in stores),
            appended=appended,
        )
        if any(store.real is not None or store.appended < appended for store in stores):
            columns = [store.columns()[:, max(0, store.appended - appended) :] for store in stores]
            real = torch.cat([torch.nn.functional.pad(x, (appended - x.shape[1], 0)) for x in columns])
            joined.known = Known(real=real)
        return joined

    def _filled(self) -> Tensor:
        """[Σ lens] int64: the slots that hold a token, lane after lane."""
        ends = self.lens.cumsum(0)
        lane = torch.repeat_interleave(self.lens)
        return torch.arange(lane.shape[0], device=lane.device) - (ends - self.lens - self.starts)[lane]

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device."""
        self.keys, self.values = self.keys.to(device), self.values.to(device)
        self.starts, self.lens, self._splits = self.starts.to(device), self.lens.to(device), None
        self.known = self.known._replace(real=None if self.real is None else self.real.to(device))

    def _capacity(self) -> Tensor:
        """[B·H] int64: slots from each lane's start to the next lane's."""
        return torch.diff(self.starts, append=self.starts.new_full((1,), self.keys.shape[0]))

    def _grow(self, room: int) -> None:
        self._move(torch.arange(self.lens.shape[0], device=self.lens.device), room)

    def _move(self, lanes: Tensor, room: int) -> None:
        """New flat storage with these lanes and that much room behind each."""
        lens, old = self.lens[lanes], self.starts[lanes]
        capacity = lens + room
        ends = capacity.cumsum(0)
        slots = int(ends[-1])
        lane = torch.repeat_interleave(capacity, output_size=slots)
        source = torch.arange(slots, device=lens.device) - (ends - capacity)[lane] + old[lane]
        if self.keys.shape[0] == 0:  # no lane holds a token, as an allocation over layers may have it
            keys, values = (x.new_empty(slots, x.shape[1]) for x in (self.keys, self.values))
        else:
            # a lane's room is filled with whatever follows it: it is never read before it is written
            source = source.clamp_max_(self.keys.shape[0] - 1)
            with torch.inference_mode(False):  # they are written later, perhaps outside
                keys, values = self.keys[source], self.values[source]
        self._layout(keys, values, lens, room)

    def _layout(self, keys: Tensor, values: Tensor, lens: Tensor, room: int) -> None:
        capacity = lens + room
        starts = capacity.cumsum(0) - capacity
        # in one statement, which no signal divides
        self.keys, self.values, self.lens, self.starts, self.room, self._splits = keys, values, lens, starts, room, None
