"""The report of what eviction did, as text and as JSON; `run.report()` returns one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from torch import Tensor


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


@dataclass(frozen=True)
class Report:
    """A report of what eviction did, as text (`str`) and as JSON (`to_json`).

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
        """Number of times a layer dropped something: of a prompt, between its chunks, or of an answer."""
        return self.prompts_evicted + self.rounds

    @property
    def prompts_evicted(self) -> int:
        """Number of times a layer dropped tokens of a prompt that it had read."""
        return self.forgotten_evicted + sum(dropped(layer) for layer in self.layers)

    @property
    def prompts_of_layers(self) -> int:
        """Number of prompts that the layers read, counted per layer."""
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
        """Sentences that a reader should know before trusting a number."""
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


def dropped(layer: dict[str, Any]) -> bool:
    """Return whether some head kept fewer tokens than its row has."""
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
