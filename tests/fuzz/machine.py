"""The machine: caches of one model, through everything that can be done with them, each step judged."""

from __future__ import annotations

import copy
import gc
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from transformers import DynamicCache

from decantkv import EvictingCache, attach
from decantkv.cache.evicting_cache import deferred
from decantkv.cache.forwards import _BEFORE
from decantkv.hf.attention_hook import UnsupportedModelError
from tests.fuzz.models import VOCABULARY, Subject, subject
from tests.fuzz.setup import Setup, settings, setups
from tests.fuzz.truth import Reader, Truth
from tests.support.interrupts import counting

LONGEST, MOST_ROWS, MOST_CACHES = 64, 4, 3
TOLERANCE, TOLERANCE_FP8 = 2e-4, 6e-2
lengths = st.lists(st.integers(1, 20), min_size=1, max_size=3)
turns = st.lists(st.integers(0, 6), min_size=MOST_ROWS, max_size=MOST_ROWS)
pieces = st.one_of(st.just([]), st.lists(st.integers(1, 9), max_size=4))
which = st.integers(0, MOST_CACHES - 1)


@dataclass
class Counts:
    """What was done, for the run's row."""

    sequences: int = 0
    steps: int = 0
    judged: int = 0
    interrupts: int = 0
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, other: Counts) -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def take(self) -> Counts:
        """What was counted since the last time."""
        taken = Counts(**vars(self))
        vars(self).update(vars(Counts()))
        return taken

    def refused(self, error: BaseException) -> None:
        self.refusals[re.sub(r"-?\d+(\.\d+)?", "#", f"{type(error).__name__}: {error}")] += 1


counts = Counts()


@dataclass
class Entry:
    """A cache, what is true of it, and by which settings it evicts; unsettled: a forward was interrupted."""

    cache: Any
    truth: Truth
    reader: Reader
    unsettled: bool = False


class Machine(RuleBasedStateMachine):
    """Every forward that fills a cache is answered a second time by the model's twin, from all tokens ever given."""

    interrupts = True

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.runs: list[tuple[Any, Reader]] = []
        self.quiet = False
        self.hooks: list[Any] = []
        self.tokens = torch.Generator().manual_seed(0)
        counts.sequences += 1

    @initialize(setup=setups(), rows=lengths, parts=pieces)
    def begin(self, setup: Setup, rows: list[int], parts: list[int]) -> None:
        self.subject: Subject = subject(setup.family, setup.backend)
        self.model = self.subject.model
        self.method, self.chosen = setup.method, setup.settings
        self.hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after, with_kwargs=True),
        ]
        self.before: list[tuple[Entry | None, Any]] = []
        try:
            self._new()
        except ValueError as error:
            self._refused(error)
            self.method, self.chosen = "dropkv", {"window": 3, "budget": 0.5, "decode": setup.settings["decode"]}
            self._new()
        self.prompt(0, rows, parts, False)

    def teardown(self) -> None:
        for run, _ in reversed(self.runs):
            run.detach()
        for hook in self.hooks:
            hook.remove()

    # what every forward goes through

    def _entry(self, cache: Any) -> Entry | None:
        return next((entry for entry in self.entries if entry.cache is cache), None)

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if self.quiet:
            return
        cache = kwargs.get(self.subject.cache_name)
        entry = self._entry(cache)
        if entry is None and isinstance(cache, DynamicCache) and self.runs:
            entry = self._add(cache, self.runs[-1][1])
        if entry is not None and entry.truth.length and not entry.unsettled:
            entry.reader.read(cache, entry.truth)
        self.before.append((entry, cache))

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self.quiet:
            return
        entry, _ = self.before.pop()
        cache = getattr(output, self.subject.cache_name, None)
        if entry is None and cache is not None and self.runs:
            entry = self._add(cache, self.runs[-1][1])
        ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
        if entry is None:
            real = torch.ones_like(ids).bool() if mask is None else mask.bool()
            self._compare(output.logits, self.subject.judge(ids, real, None, {}), real, TOLERANCE)
            return
        truth, entry.unsettled = entry.truth, False
        if truth.length == 0:
            entry.truth = truth = Truth.empty(ids.shape[0])
        real = torch.ones_like(ids).bool() if mask is None else mask[:, -ids.shape[1] :].bool()
        truth.grow(ids, real)
        judged = self.subject.judge(ids, truth.real, truth.full, truth.kept)
        fp8 = entry.reader.bounds.store == "fp8"
        self._compare(output.logits, judged, real, TOLERANCE_FP8 if fp8 else TOLERANCE)
        if not any(getattr(layer, "chunks", "none") != "none" for layer in cache.layers):
            entry.reader.read(cache, truth)

    def _compare(self, logits: Tensor, judged: Tensor, real: Tensor, tolerance: float) -> None:
        counts.judged += 1
        last = logits.shape[1]
        off = (logits - judged[:, -last:]).abs().amax(-1)[real[:, -last:]]
        assert bool((off <= tolerance).all()), f"logits are off by {off.max():.4f}, of {judged.abs().max():.2f}"

    def _add(self, cache: Any, reader: Reader) -> Entry:
        entry = Entry(cache, Truth.empty(1), reader)
        self.entries.append(entry)
        if len(self.entries) > MOST_CACHES + 1:
            self.entries.pop(0)
        return entry

    # small pieces

    def _new(self) -> Entry:
        cache = EvictingCache(self.model, self.method, **self.chosen)
        return self._add(cache, Reader(cache.settings, cache.bounds))

    def _pick(self, index: int) -> Entry:
        return self.entries[index % len(self.entries)]

    def _ids(self, batch: int, number: int) -> Tensor:
        return torch.randint(1, VOCABULARY, (batch, number), generator=self.tokens)

    def _padded(self, rows: list[int]) -> tuple[Tensor, Tensor]:
        most = max(rows)
        real = torch.arange(most) >= most - torch.tensor(rows)[:, None]
        return self._ids(len(rows), most) * real, real

    @torch.no_grad()
    def _forward(self, cache: Any, ids: Tensor, real: Tensor, bare: bool = False) -> Any:
        """`real`: of all tokens, the new ones last; bare: without mask and positions where nothing is padded."""
        given = {} if cache is None else {self.subject.cache_name: cache}
        if not (bare and bool(real.all())):
            position = (real.long().cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
            given |= {"attention_mask": real.long(), "position_ids": position}
        return self.model(input_ids=ids, **given)

    def _refused(self, error: BaseException, interrupted: bool = False) -> None:
        """A refusal says in one line what was expected and what came; anything else is a fault."""
        text = str(error)
        known = interrupted or not isinstance(error, UnsupportedModelError)
        known &= isinstance(error, ValueError) and "expected" in text and "got" in text and "\n" not in text
        # transformers' own sliding layers cannot be cropped once they are full
        known |= isinstance(error, RuntimeError) and "`crop` was called" in text
        if not known:
            raise error
        counts.refused(error)

    def _attempt(self, action: Callable[[], Any], *entries: Entry) -> bool:
        """Whether the action was carried out; a refusal must leave the caches as they were."""
        before = [self._shape(entry.cache) for entry in entries]
        try:
            action()
            return True
        except (ValueError, RuntimeError) as error:
            self.before.clear()
            self._refused(error)
        for entry in self.entries:  # those that a run of attach has made as well
            if not any(layer.get_seq_length() for layer in entry.cache.layers):
                entry.truth = Truth.empty(1)  # of a prompt whose chunks were read and forgotten
        for entry, shape in zip(entries, before, strict=True):
            after = self._shape(entry.cache)
            if after != shape:
                assert self._refuses(entry), f"a refused call changed the cache: {shape} became {after}"
            elif 0 < entry.truth.length < LONGEST:
                self._probe(entry)
        return False

    def _refuses(self, entry: Entry) -> bool:
        """Whether a cache that was left between two states refuses all that comes; it is thrown away."""
        self.quiet = True
        try:
            ids = self._ids(max(1, entry.truth.batch), 2)
            self._forward(entry.cache, ids, torch.cat([entry.truth.real, torch.ones_like(ids).bool()], 1))
            return False
        except (ValueError, RuntimeError) as error:
            self._refused(error, interrupted=True)
            return True
        finally:
            self.quiet = False
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self.entries = [other for other in self.entries if other is not entry]
        if not self.entries:
            self._new()

    def _shape(self, cache: Any) -> list[Any]:
        shape = []
        for layer in cache.layers:
            kept, lens = getattr(layer, "kept", None), getattr(getattr(layer, "store", None), "lens", None)
            stored = layer.stored if hasattr(layer, "stored") else layer.get_seq_length()
            shape.append(
                (layer.get_seq_length(), stored, None if kept is None else kept.indices.tolist(),
                 None if lens is None else lens.tolist())
            )  # fmt: skip
        return shape

    def _probe(self, entry: Entry) -> None:
        """The next token, judged; it may be refused again, as by a full static layer."""
        shape = self._shape(entry.cache)
        try:
            self._turn_once(entry)
        except ValueError as error:
            self.before.clear()
            self._refused(error)
            if self._shape(entry.cache) != shape:
                assert self._refuses(entry), f"a refused step changed the cache: {shape}"

    # rules: reading and writing

    @rule(rows=lengths, parts=pieces)
    def another(self, rows: list[int], parts: list[int]) -> None:
        self._new()
        self.prompt(len(self.entries) - 1, rows, parts, False)

    @invariant()
    def counted(self) -> None:
        counts.steps += 1

    @rule(index=which, rows=lengths, parts=pieces, bare=st.booleans())
    def prompt(self, index: int, rows: list[int], parts: list[int], bare: bool) -> None:
        """A prompt, in one piece or in parts on which is decided after the last."""
        entry = self._pick(index)
        if entry.truth.length:
            entry = self._new()
        self._attempt(lambda: self._read(entry, rows, parts, bare), entry)

    def _read(self, entry: Entry, rows: list[int], parts: list[int], bare: bool) -> None:
        ids, real = self._padded(rows)
        self._parts(entry.cache, ids, real, parts, bare)
        entry.reader.read(entry.cache, entry.truth)

    def _parts(self, cache: Any, ids: Tensor, real: Tensor, parts: list[int], bare: bool = False) -> None:
        if not parts:
            self._forward(cache, ids, real, bare)
            return
        with deferred(cache):
            done = 0
            while done < ids.shape[1]:
                stop = min(ids.shape[1], done + parts.pop(0) if parts else ids.shape[1])
                self._forward(cache, ids[:, done:stop], real[:, :stop], bare)
                done = stop

    @rule(index=which, number=st.integers(1, 4), bare=st.booleans())
    def steps(self, index: int, number: int, bare: bool) -> None:
        """Single tokens."""
        entry = self._pick(index)
        for _ in range(number):
            self._turn(entry, [1] * entry.truth.batch, bare)

    @rule(index=which, rows=turns, equal=st.booleans(), bare=st.booleans())
    def turn(self, index: int, rows: list[int], equal: bool, bare: bool) -> None:
        """Several tokens, rows of unequal length padded on the left."""
        entry = self._pick(index)
        rows = rows[: entry.truth.batch]
        if max(rows) == 0:
            return
        self._turn(entry, [max(rows)] * len(rows) if equal else rows, bare)

    def _turn(self, entry: Entry, rows: list[int], bare: bool) -> None:
        if entry.truth.length + max(rows) > LONGEST:
            return
        ids, real = self._padded(rows)
        if entry.truth.length:
            real = torch.cat([entry.truth.real, real], 1)
        self._attempt(lambda: self._forward(entry.cache, ids, real, bare), entry)

    @rule(index=which, rows=lengths, number=st.integers(1, 4), chunk=st.sampled_from([None, None, 3, 7]))
    def generate(self, index: int, rows: list[int], number: int, chunk: int | None) -> None:
        """An answer by `generate`, behind what the cache holds."""
        entry = self._pick(index)
        truth = entry.truth
        ids, real = self._padded(rows)
        if truth.length:
            more = max(1, rows[0] % 4)
            if truth.length + more + number > LONGEST:
                return
            ids = torch.cat([truth.ids, self._ids(truth.batch, more)], 1)
            real = torch.cat([truth.real, torch.ones(truth.batch, more, dtype=torch.bool)], 1)
        elif chunk is not None and not self.runs:
            return  # chunks of `generate` without attach
        given = {self.subject.cache_name: entry.cache, "prefill_chunk_size": chunk}
        self._attempt(lambda: self._generate(ids, real, number, given), entry)
        self._read_prompts()

    def _read_prompts(self) -> None:
        """Look at prompts that were decided on when their last forward was over, and no other followed."""
        for entry in self.entries:
            if entry.truth.length and not entry.truth.prompt:
                entry.reader.read(entry.cache, entry.truth)

    def _generate(self, ids: Tensor, real: Tensor, number: int, given: dict[str, Any]) -> Any:
        given = {name: value for name, value in given.items() if value is not None}
        return self.model.generate(
            ids, attention_mask=real.long(), max_new_tokens=number, do_sample=False, eos_token_id=None, **given
        )

    # rules: moving about

    @rule(index=which, number=st.integers(1, 7))
    def crop(self, index: int, number: int) -> None:
        entry = self._pick(index)
        if number < entry.truth.length and self._attempt(lambda: entry.cache.crop(-number), entry):
            entry.truth.crop(number)
            entry.reader.read(entry.cache, entry.truth, moved=True)

    @rule(index=which, rows=st.lists(st.integers(0, 3), min_size=1, max_size=MOST_ROWS), by=st.sampled_from("rs"))
    def rows(self, index: int, rows: list[int], by: str) -> None:
        """Rows in another order, repeated or left out, as beams and selections do."""
        entry = self._pick(index)
        if entry.truth.length == 0:
            return
        places = torch.tensor([row % entry.truth.batch for row in rows])
        change = entry.cache.reorder_cache if by == "r" else entry.cache.batch_select_indices
        self._move(entry, lambda: change(places), places)

    @rule(index=which)
    def repeat(self, index: int) -> None:
        entry = self._pick(index)
        if entry.truth.length == 0 or 2 * entry.truth.batch > MOST_ROWS:
            return
        places = torch.arange(entry.truth.batch).repeat_interleave(2)
        self._move(entry, lambda: entry.cache.batch_repeat_interleave(2), places)

    def _move(self, entry: Entry, change: Callable[[], Any], places: Tensor) -> None:
        if self._attempt(change, entry):
            entry.truth.rows(places)
            self._follow(entry)

    def _follow(self, entry: Entry) -> None:
        entry.truth.said.clear()
        entry.reader.read(entry.cache, entry.truth, moved=True)

    @rule(index=which)
    def fork(self, index: int) -> None:
        entry = self._pick(index)
        if len(self.entries) > MOST_CACHES:
            return
        self.entries.append(Entry(copy.deepcopy(entry.cache), entry.truth.fork(), entry.reader))

    @rule(first=which, second=which)
    def cat(self, first: int, second: int) -> None:
        parts = [self._pick(first), self._pick(second)]
        if len(self.entries) > MOST_CACHES or sum(part.truth.batch for part in parts) > MOST_ROWS:
            return
        if not all(isinstance(part.cache, EvictingCache) for part in parts):
            return
        made: list[Any] = []
        if self._attempt(lambda: made.append(EvictingCache.cat([part.cache for part in parts])), *parts):
            entry = Entry(made[0], Truth.cat([part.truth for part in parts]), parts[0].reader)
            self.entries.append(entry)
            self._follow(entry)

    @rule(index=which)
    def save_and_load(self, index: int) -> None:
        entry = self._pick(index)
        if not isinstance(entry.cache, EvictingCache):
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cache.safetensors"
            loaded: list[Any] = []

            def there_and_back() -> None:
                entry.cache.save(path, prompt=entry.truth.ids)
                loaded.append(EvictingCache.load(path, self.model, prompt=entry.truth.ids))

            if self._attempt(there_and_back, entry):
                entry.cache = loaded[0]
                self._follow(entry)

    @rule(index=which)
    def reset(self, index: int) -> None:
        entry = self._pick(index)
        entry.cache.reset()
        entry.truth = Truth.empty(1)

    @rule(index=which)
    def offload(self, index: int) -> None:
        for layer in self._pick(index).cache.layers:
            if layer.get_seq_length():
                layer.offload()
                layer.prefetch()

    # rules: the model itself

    # no preconditions: where an interrupt falls may differ when a sequence is repeated, what is drawn must not

    @rule(data=st.data())
    def attach(self, data: Any) -> None:
        method, chosen = data.draw(settings(latent=self.subject.latent), label="attach")
        if len(self.runs) > 1:
            return
        try:
            run = attach(self.model, method, **chosen)
        except ValueError as error:
            self._refused(error)
            return
        self.runs.append((run, Reader(run.settings, run.bounds)))

    @rule(last=st.booleans())
    def detach(self, last: bool) -> None:
        if self.runs:
            run, _ = self.runs.pop(-1 if last else 0)
            run.detach()

    @rule(rows=lengths, number=st.integers(0, 4), chunk=st.sampled_from([None, None, 3, 7]))
    def attached(self, rows: list[int], number: int, chunk: int | None) -> None:
        """A prompt without a cache, whose run makes one."""
        if not self.runs:
            return
        ids, real = self._padded(rows)
        if number:
            self._attempt(lambda: self._generate(ids, real, number, {"prefill_chunk_size": chunk}))
        else:
            self._attempt(lambda: self._forward(None, ids, real))
        self._read_prompts()
        self.entries = [entry for entry in self.entries if entry.truth.length] or self.entries[:1]

    @rule(rows=lengths)
    def plain(self, rows: list[int]) -> None:
        """A forward without a cache is nobody's."""
        ids, real = self._padded(rows)
        with torch.no_grad():
            position = (real.long().cumsum(-1) - 1).clamp_min(0)
            self.model(input_ids=ids, attention_mask=real.long(), position_ids=position, use_cache=False)

    @rule(index=which, rows=turns, parts=pieces, at=st.integers(1, 4000))
    def interrupt(self, index: int, rows: list[int], parts: list[int], at: int) -> None:
        """Ctrl-C somewhere in a prompt or a turn: then the cache is as before, or refuses to go on."""
        if not self.interrupts:
            return
        entry = self._pick(index)
        before = entry.truth
        rows = [max(1, n) for n in rows[: before.batch]] if before.length else [n + 6 for n in rows[:2]]
        if before.length + max(rows) + 1 > LONGEST:
            return
        ids, real = self._padded(rows)
        seen = torch.cat([before.real, real], 1) if before.length else real
        shape = self._shape(entry.cache)
        self.quiet, fired = True, False
        gc.collect()
        gc.disable()  # finalizers would run at other places each time, and Python swallows what is raised in them
        try:
            with counting(at):
                self._parts(entry.cache, ids, seen, [] if before.length else list(parts))
        except KeyboardInterrupt:
            fired = True
        except ValueError as error:
            self.quiet = False
            self._refused(error)
            if self._shape(entry.cache) != shape:
                assert self._refuses(entry), f"a refused call changed the cache: {shape}"
            return
        finally:
            self.quiet = False
            gc.enable()
        self.plain([7])
        counts.interrupts += fired
        entry.unsettled = _BEFORE in vars(entry.cache)  # in the midst of a forward, which must leave no trace
        came = 0 if entry.unsettled else entry.cache.get_seq_length() - before.length
        assert fired or came == ids.shape[1], f"{came} of {ids.shape[1]} tokens came without an interrupt"
        if came:
            entry.truth = self._grown(before, ids[:, :came], real[:, :came])
            entry.reader.read(entry.cache, entry.truth)
        if fired:
            self._after_interrupt(entry, ids, real)

    def _grown(self, before: Truth, ids: Tensor, real: Tensor) -> Truth:
        after = before.fork() if before.length else Truth.empty(ids.shape[0])
        after.grow(ids, real)
        self.subject.judge(ids, after.real, after.full, after.kept)
        return after

    def _after_interrupt(self, entry: Entry, ids: Tensor, real: Tensor) -> None:
        """The rest of a prompt, a new prompt or another token, answered at the second call at the latest."""
        truth, calls = entry.truth, 0
        while True:
            calls += 1
            try:
                if truth.length == 0:
                    self._read(entry, [9, 12], [], False)
                elif truth.prompt == 0 and truth.length < ids.shape[1]:
                    self._forward(entry.cache, ids[:, truth.length :], real)
                else:
                    self._turn_once(entry)
                return
            except ValueError as error:
                self.before.clear()
                if "call again" in str(error) and calls == 1:
                    continue
                self._refused(error, interrupted=True)
                self._drop(entry)
                return

    def _turn_once(self, entry: Entry) -> None:
        ids = self._ids(entry.truth.batch, 1)
        self._forward(entry.cache, ids, torch.cat([entry.truth.real, torch.ones_like(ids).bool()], 1))
