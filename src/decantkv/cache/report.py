"""What eviction did, written down as it happens and told by `run.report()`."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

Stage = Literal["scoring", "selection", "rehearsal", "compaction", "prefill"]
SPANS = 1024  # open-ended runs add finished spans up, and move counts off the device, beyond so many
RECORDS = 8192  # of a layer's prompts that a run keeps; older ones are counted and forgotten
_lock = threading.RLock()  # around every change of a recorder, which threads share


@dataclass(frozen=True)
class Memory:
    """Keys and values of the last prompt's evicting layers.

    Attributes:
        before: bytes of the full ones, each layer's as it was held.
        after: bytes of the prompt's kept tokens.
        by: how `after` was measured: "allocator", what torch's CUDA allocator gave while the prompt was read, less
            `room`; or "storages", the sizes of the live tensors' storages.
        room: bytes held beyond that for the answer, written or still free.
    """

    before: int
    after: int
    by: Literal["allocator", "storages"]
    room: int = 0


class Stopwatch:
    """Seconds spent on a device, without making the host wait: CUDA events there, a clock elsewhere."""

    def __init__(self) -> None:
        self._spans: dict[str, list[float | tuple[torch.cuda.Event, torch.cuda.Event]]] = {}

    @contextmanager
    def measure(self, stage: Stage, device: torch.device) -> Iterator[None]:
        """Add the time until the block ends to `stage`."""
        stop = self.start(stage, device)
        try:
            yield
        finally:
            stop()

    def start(self, stage: Stage, device: torch.device) -> _Stop:
        """Start a span of `stage`; calling the result ends it."""
        return _Stop(self._spans.setdefault(stage, []), device)

    def seconds(self, stage: Stage) -> float:
        """The sum over the stage's spans. On CUDA this waits for the last of them."""
        total = 0.0
        for span in self._spans.get(stage, ()):
            if isinstance(span, tuple):
                span[1].synchronize()
                total += span[0].elapsed_time(span[1]) / 1e3
            else:
                total += span
        return total


class _Stop:
    def __init__(self, spans: list[float | tuple[torch.cuda.Event, torch.cuda.Event]], device: torch.device) -> None:
        self._spans, self._device = spans, device
        if device.type == "cuda":
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record(torch.cuda.current_stream(device))
        else:
            self._clock = time.perf_counter()

    def __call__(self) -> None:
        if self._device.type == "cuda":
            end = torch.cuda.Event(enable_timing=True)
            end.record(torch.cuda.current_stream(self._device))
            self._spans.append((self._begin, end))
        else:
            self._spans.append(time.perf_counter() - self._clock)
        if len(self._spans) > SPANS:
            _add_up(self._spans)


def _add_up(spans: list[float | tuple[torch.cuda.Event, torch.cuda.Event]]) -> None:
    """Finished spans as one number, without waiting for the others."""
    open_, done = [], 0.0
    for span in spans:
        if not isinstance(span, tuple):
            done += span
        elif span[1].query():
            done += span[0].elapsed_time(span[1]) / 1e3
        else:
            open_.append(span)
    spans[:] = [done, *open_]


@dataclass(frozen=True)
class LayerRecord:
    """One layer's eviction of one prompt.

    Attributes:
        layer_idx: the layer.
        seen: real tokens of each batch row.
        counts: [B, H] tokens each row and KV head keeps.
        bytes_before, bytes_after: the layer's keys and values; of the slots that hold what was kept, not of free ones.
        raised: protection kept more than the budget's share asked for.
        unscored: in some row that dropped tokens, protection alone fills the budget.
    """

    layer_idx: int
    seen: tuple[int, ...]
    counts: Tensor
    bytes_before: int
    bytes_after: int
    raised: bool
    unscored: bool = False


@dataclass
class Recorder:
    """Collects what the layers of one cache, or of all caches of one run, did.

    Counts of the last prompts stay on their device, so that nobody waits for them; older ones move to the host.
    """

    method: str
    budget: str
    settings: dict[str, Any] = field(default_factory=dict)  # all others in force, as JSON can hold them
    layers: list[LayerRecord] = field(default_factory=list)
    forgotten: int = 0  # older ones, no longer in `layers`
    forgotten_evicted: int = 0  # those of them that dropped something
    raised: bool = False  # in some prompt, as in its record
    unscored: bool = False
    widest: int = 0  # rows of the largest batch
    settled: int = 0  # prompts of a layer, from the first, whose counts are on the host
    marks: list[tuple[int, torch.device, torch.cuda.Event]] = field(default_factory=list)  # layers written by when
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    left_alone: int = 0
    rounds: int = 0  # evictions of a layer while its prompt came in chunks or its answer was written
    capped: bool = False  # a cap left fewer tokens than the budget asked for
    reused_lse: int = 0  # prompts of a layer whose scoring was handed the attention's output and denominators
    without_lse: dict[str, int] = field(default_factory=dict)  # reason → those that were to be and were not
    passed_over: dict[str, int] = field(default_factory=dict)  # kind of cache → prompts read into it unevicted
    memory: Memory | None = None  # of the last prompt
    weights: int = 0  # bytes of the model's parameters, where they are known
    loaded: bool = False  # what it reports on began in a file
    latest: weakref.ref[Any] | None = None  # the cache of the last prompt

    def add(self, record: LayerRecord) -> None:
        """Write down one layer's eviction."""
        with _lock:
            self.layers.append(record)
            self.raised, self.unscored = self.raised or record.raised, self.unscored or record.unscored
            self.widest = max(self.widest, len(record.seen))
            marked, device = self.marks[-1][0] if self.marks else self.settled, record.counts.device
            if device.type == "cuda" and self.recorded - marked >= SPANS:
                self.marks.append((self.recorded, device, torch.cuda.current_stream(device).record_event()))
            if self.marks and self.marks[0][2].query():
                self._settle(*self.marks.pop(0)[:2])
            while len(self.layers) > RECORDS:
                self.forgotten_evicted += _dropped(_plain(self.layers.pop(0)))
                self.forgotten += 1

    @property
    def recorded(self) -> int:
        """How many prompts of a layer were written down, forgotten ones included."""
        return self.forgotten + len(self.layers)

    def count(self, counter: Literal["rounds", "reused_lse"]) -> None:
        """One more."""
        with _lock:
            setattr(self, counter, getattr(self, counter) + 1)

    def count_reason(self, counter: Literal["without_lse", "passed_over"], reason: str) -> None:
        """One more for that reason."""
        with _lock:
            counts: dict[str, int] = getattr(self, counter)
            counts[reason] = counts.get(reason, 0) + 1

    def _settle(self, stop: int, device: torch.device) -> None:
        """Move finished counts to the host; those of the device that said so on a stream with nothing to wait for."""
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for i in range(max(0, self.settled - self.forgotten), stop - self.forgotten):
                self.layers[i] = replace(self.layers[i], counts=self.layers[i].counts.cpu())
        self.settled = stop

    def full_bytes(self, since: int) -> int:
        """Bytes of the full keys and values of what was recorded from number `since` on."""
        with _lock:
            return sum(record.bytes_before for record in self.layers[max(0, since - self.forgotten) :])

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return self  # a copied cache goes on reporting to the same place

    def report(self) -> Report:
        """Everything so far, as plain numbers."""
        with _lock:
            return self._report()

    def _report(self) -> Report:
        stages: tuple[Stage, ...] = ("scoring", "selection", "rehearsal", "compaction", "prefill")
        return Report(
            method=self.method,
            budget=self.budget,
            layers=[_plain(record) for record in self.layers],
            forgotten=self.forgotten,
            forgotten_evicted=self.forgotten_evicted,
            widest=self.widest,
            seconds={stage: self.stopwatch.seconds(stage) for stage in stages},
            raised=self.raised,
            unscored=self.unscored,
            settings=dict(self.settings),
            loaded=self.loaded,
            left_alone=self.left_alone,
            rounds=self.rounds,
            capped=self.capped,
            reused_lse=self.reused_lse,
            without_lse=dict(self.without_lse),
            passed_over=dict(self.passed_over),
            memory=self.memory,
            weights=self.weights,
        )


@dataclass(frozen=True)
class Report:
    """What eviction did, as text (`str`) and as JSON (`to_json`).

    Attributes:
        method: name and options of the method.
        budget: what was to be kept.
        layers: a dict per layer and prompt: `layer`; `seen`, the real tokens of each batch row; `kept`, the tokens that
            each head of each row keeps; `bytes_before`; `bytes_after`. Of a long run only the newest are held.
        seconds: time in scoring, selection, compaction and prefill; the first three are inside the last.
        raised: whether protection kept more than the budget's share.
        left_alone: number of layers that are not full attention and keep their own cache.
        rounds: evictions of a layer between chunks of a prompt or while an answer was written.
        capped: whether `max_kv_tokens` left fewer tokens than the budget.
        graphed: steps of `generate` that were replayed from a CUDA graph.
        without_graph: why steps are no longer replayed, or None.
        eager_steps: number of steps that a graph could not hold, by reason.
        reused_lse: prompts of a layer that were scored from the attention's own output and denominators.
        without_lse: number of those that were scored in two passes despite `reuse_lse`, by reason.
        passed_over: number of prompts that were read into a cache that does not evict, by kind of cache.
        memory: bytes of the last prompt, by the allocator where there is one; None if no prompt was seen whole.
        weights: bytes of the model's parameters; 0 if unknown.
        settings: all options in force besides method and budget.
        unscored: whether protection alone filled the budget in some prompt that dropped tokens.
        loaded: whether the cache comes from a file; then what its prompt dropped is not on record.
        forgotten: number of older entries of `layers` that are no longer held.
        forgotten_evicted: how many of those dropped something.
        widest: rows of the largest batch.
    """

    method: str
    budget: str
    layers: Sequence[dict[str, Any]]
    seconds: dict[str, float]
    raised: bool
    left_alone: int
    rounds: int = 0
    capped: bool = False
    graphed: int = 0
    without_graph: str | None = None
    eager_steps: dict[str, int] = field(default_factory=dict)
    reused_lse: int = 0
    without_lse: dict[str, int] = field(default_factory=dict)
    passed_over: dict[str, int] = field(default_factory=dict)
    memory: Memory | None = None
    weights: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    unscored: bool = False
    loaded: bool = False
    forgotten: int = 0
    forgotten_evicted: int = 0
    widest: int = 0

    @property
    def evictions(self) -> int:
        """How often a layer dropped something: of a prompt, between its chunks, or while an answer was written."""
        return self.prompts_evicted + self.rounds

    @property
    def prompts_evicted(self) -> int:
        """How often a layer dropped tokens of a prompt that it had read."""
        return self.forgotten_evicted + sum(_dropped(layer) for layer in self.layers)

    @property
    def prompts_of_layers(self) -> int:
        """How many prompts the layers read, each layer's counted."""
        return self.forgotten + len(self.layers)

    @property
    def bytes_before(self) -> int:
        """Keys and values of the last prompt's layers before eviction."""
        return sum(layer["bytes_before"] for layer in self._last())

    @property
    def bytes_after(self) -> int:
        """Keys and values of the last prompt's layers after eviction."""
        return sum(layer["bytes_after"] for layer in self._last())

    @property
    def warnings(self) -> list[str]:
        """What the reader should know before trusting a number."""
        told = []
        if not self.layers and not self.loaded:
            told.append("eviction never acted: no prompt went through an evicting cache")
        elif self.layers and not self.evictions:
            told.append("nothing was dropped: every prompt fitted its budget")
        if self.raised:
            told.append("protected tokens alone exceed the budget's share, so more was kept than asked for")
        elif self.unscored:
            told.append("protected tokens alone fill the budget: no score had a say in what was kept")
        share = self._share()
        if share is not None and share < 0.01:
            told.append(f"budget {self.budget} keeps less than 1 % of a prompt; 0.05 is 5 %")
        if self.capped:
            told.append("max_kv_tokens left fewer tokens than the budget asked for")
        told += [f"reuse_lse: scored in two passes {number} times: {why}" for why, number in self.without_lse.items()]
        told += [
            f"{number} prompts were not evicted: they went into {kind}" for kind, number in self.passed_over.items()
        ]
        if self.without_graph is not None:
            told.append(f"decoding goes without a CUDA graph: {self.without_graph}")
        told += [f"{number} steps without a CUDA graph: {why}" for why, number in self.eager_steps.items()]
        if self.evictions and self.bytes_before < self.weights / 20:
            told.append(
                f"the full cache would take {format_bytes(self.bytes_before)} beside {format_bytes(self.weights)} of "
                "weights; expect hardly any gain from eviction"
            )
        if self.evictions and self.widest == 1:
            told.append("batch 1: eviction frees memory; expect hardly any decode speed-up from it alone")
        return told

    def to_json(self) -> str:
        """The report as one JSON object."""
        return json.dumps(
            {
                "method": self.method,
                "budget": self.budget,
                "settings": self.settings,
                "evictions": self.evictions,
                "prompts_of_layers": self.prompts_of_layers,
                "prompts_evicted": self.prompts_evicted,
                "memory": None if self.memory is None else asdict(self.memory),
                "bytes_before": self.bytes_before,
                "bytes_after": self.bytes_after,
                "seconds": self.seconds,
                "loaded": self.loaded,
                "left_alone": self.left_alone,
                "rounds": self.rounds,
                "capped": self.capped,
                "graphed": self.graphed,
                "without_graph": self.without_graph,
                "eager_steps": self.eager_steps,
                "reused_lse": self.reused_lse,
                "without_lse": self.without_lse,
                "passed_over": self.passed_over,
                "warnings": self.warnings,
                "layers": list(self.layers),
            }
        )

    def __str__(self) -> str:
        lines = [", ".join([self.method, f"budget {self.budget}", *_worth_saying(self.settings)])]
        if self.loaded:
            lines.append("loaded from a file: what was dropped before is not on record")
        last = self._last()
        if last:
            seen = max(max(layer["seen"]) for layer in last)
            kept = [n for layer in last for row in layer["kept"] for n in row]
            span = f"{min(kept):,}" if min(kept) == max(kept) else f"{min(kept):,} to {max(kept):,}"
            memory = self.memory or Memory(self.bytes_before, self.bytes_after, "storages")
            lines.append(
                f"kept {span} of {seen:,} tokens per head in {len(last)} layers; "
                f"KV {format_bytes(memory.before)} -> {format_bytes(memory.after)}"
                + (" by the allocator" if memory.by == "allocator" else "")
                + (f" + {format_bytes(memory.room)} room for the answer" if memory.room else "")
            )
            if 0 < self.prompts_evicted < self.prompts_of_layers:
                lines.append(
                    f"dropped something in {self.prompts_evicted:,} of {self.prompts_of_layers:,} prompts of a layer"
                )
            inside = self.seconds["scoring"] + self.seconds["selection"] + self.seconds["compaction"]
            prefill = f" of {format_seconds(self.seconds['prefill'])} prefill" if self.seconds["prefill"] else ""
            lines.append(f"scoring, selection and compaction {format_seconds(inside)}{prefill}")
        if self.rounds:
            lines.append(f"{self.rounds:,} evictions of a layer between chunks or while the answer was written")
        if self.reused_lse:
            lines.append(f"scored {self.reused_lse} times by the attention's own output and softmax denominators")
        if self.graphed:
            lines.append(f"{self.graphed} steps replayed as a CUDA graph")
        if self.left_alone:
            lines.append(f"{self.left_alone} layers are not full attention and were left alone")
        return "\n".join([*lines, *(f"note: {warning}" for warning in self.warnings)])

    def _share(self) -> float | None:
        """The budget where it is a share of the prompt."""
        return None if self.budget.endswith(("token", "tokens")) else float(self.budget)

    def _last(self) -> list[dict[str, Any]]:
        """The newest record of every layer: the last prompt's."""
        return list({layer["layer"]: layer for layer in self.layers}.values())


def _plain(record: LayerRecord) -> dict[str, Any]:
    """A record as JSON can hold it."""
    return {
        "layer": record.layer_idx,
        "seen": list(record.seen),
        "kept": record.counts.tolist(),
        "bytes_before": record.bytes_before,
        "bytes_after": record.bytes_after,
    }


def _dropped(layer: dict[str, Any]) -> bool:
    """Whether some head kept fewer tokens than its row has."""
    return any(n < seen for row, seen in zip(layer["kept"], layer["seen"], strict=True) for n in row)


def _worth_saying(settings: dict[str, Any]) -> list[str]:
    """The settings beside method and budget, without those that are off or left to decantkv."""
    said = []
    for name, value in settings.items():
        if name == "protect":
            value = " ".join(part if isinstance(part, str) else f"{part[0]}:{part[1]}" for part in value)
        if name == "sinks" or value in (None, False, "", "auto", "plain"):  # the method says its sinks
            continue
        said.append(name if value is True else f"{name} {value}")
    return said


def format_seconds(seconds: float) -> str:
    """Seconds for a reader: 32.4 ms, 1.5 s, 14 s, 1,400 s."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else "1 s"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def format_bytes(number: int) -> str:
    """Bytes for a reader: 17.2 GB, 56.0 MB, 480 B (decimal units)."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 100 * size else f"{number / size:.0f} {unit}"
    return f"{number} B"


def storage_bytes(tensors: Sequence[Tensor]) -> int:
    """Bytes of the tensors' distinct storages, which is what freeing them gives back."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
