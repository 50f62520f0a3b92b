"""Records of what eviction does, as it happens; `Recorder.report` returns them as plain numbers."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from decantkv.base.stopwatch import Stage, Stopwatch
from decantkv.cache.report import Memory, Report, dropped

RECORDS = 8192  # of a layer's prompts that a run keeps; older ones are counted and forgotten
SETTLED_AFTER = 1024  # records, after which counts are moved off the device
_lock = threading.RLock()  # around every change of a recorder, which threads share


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

    def plain(self) -> dict[str, Any]:
        """Return the record as JSON can hold it."""
        return {
            "layer": self.layer_idx,
            "seen": list(self.seen),
            "kept": self.counts.tolist(),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
        }


class LayerRecords:
    """The newest records of layers, and what older ones said in sum.

    Counts of the last prompts stay on their device, so that the host does not wait; older ones move to the host.

    Attributes:
        newest: at most `RECORDS` of them, in the order in which they came.
        forgotten: number of older ones.
        forgotten_evicted: how many of these dropped something.
        raised, unscored: whether this held for any record.
        widest: rows of the largest batch.
    """

    def __init__(self) -> None:
        self.newest: list[LayerRecord] = []
        self.forgotten = self.forgotten_evicted = self.widest = 0
        self.raised = self.unscored = False
        self._settled = 0  # records, from the first, whose counts are on the host
        self._marks: list[tuple[int, torch.device, torch.cuda.Event]] = []  # how many records were written by when

    def __len__(self) -> int:
        """Return how many were written down, forgotten ones included."""
        return self.forgotten + len(self.newest)

    def add(self, record: LayerRecord) -> None:
        """Write down one layer's eviction."""
        with _lock:
            self.newest.append(record)
            self.raised, self.unscored = self.raised or record.raised, self.unscored or record.unscored
            self.widest = max(self.widest, len(record.seen))
            marked, device = self._marks[-1][0] if self._marks else self._settled, record.counts.device
            if device.type == "cuda" and len(self) - marked >= SETTLED_AFTER:
                self._marks.append((len(self), device, torch.cuda.current_stream(device).record_event()))
            if self._marks and self._marks[0][2].query():
                self._settle(*self._marks.pop(0)[:2])
            while len(self.newest) > RECORDS:
                self.forgotten_evicted += dropped(self.newest.pop(0).plain())
                self.forgotten += 1

    def _settle(self, stop: int, device: torch.device) -> None:
        """Move finished counts to the host, on a stream of their device that has nothing to wait for."""
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for i in range(max(0, self._settled - self.forgotten), stop - self.forgotten):
                self.newest[i] = replace(self.newest[i], counts=self.newest[i].counts.cpu())
        self._settled = stop

    def full_bytes(self, since: int) -> int:
        """Return the bytes of the full keys and values of what was recorded from number `since` on."""
        return sum(record.bytes_before for record in self.newest[max(0, since - self.forgotten) :])


@dataclass
class Recorder:
    """Collects what the layers of one cache, or of all caches of one run, did.

    Attributes:
        method, budget: as a reader sees them; settings: all other options, as JSON can hold them.
        records: what was kept of prompts.
        counts: of evictions between chunks or of an answer ("rounds"), of prompts for which a cap left fewer tokens
            than the budget asked for ("capped"), of prompts scored by the attention's own output ("reused_lse").
        reasons: why prompts were scored in two passes despite `reuse_lse` ("without_lse"), and into which kinds of
            cache prompts were read without eviction ("passed_over"); each with its number of prompts.
        left_alone: layers that are not full attention.
        memory: bytes of the last prompt.
        weights: bytes of the model's parameters; 0 where they are not known.
        loaded: whether the cache comes from a file.
        latest: the cache of the last prompt.
    """

    method: str
    budget: str
    settings: dict[str, Any] = field(default_factory=dict)
    records: LayerRecords = field(default_factory=LayerRecords)
    counts: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    left_alone: int = 0
    memory: Memory | None = None
    weights: int = 0
    loaded: bool = False
    latest: weakref.ref[Any] | None = None

    def count(self, counter: Literal["rounds", "capped", "reused_lse"]) -> None:
        """Add one to a counter."""
        with _lock:
            self.counts[counter] += 1

    def count_reason(self, counter: Literal["without_lse", "passed_over"], reason: str) -> None:
        """Add one prompt to those of a reason."""
        with _lock:
            self.reasons.setdefault(counter, Counter())[reason] += 1

    def full_bytes(self, since: int) -> int:
        """Return the bytes of the full keys and values of what was recorded from number `since` on."""
        with _lock:
            return self.records.full_bytes(since)

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorder:
        return self  # a copied cache goes on reporting to the same place

    def report(self) -> Report:
        """Return everything so far, as plain numbers."""
        with _lock:
            records, counts, reasons = self.records, self.counts, self.reasons
            return Report(
                method=self.method,
                budget=self.budget,
                layers=[record.plain() for record in records.newest],
                forgotten=records.forgotten,
                forgotten_evicted=records.forgotten_evicted,
                widest=records.widest,
                seconds={stage: self.stopwatch.seconds(stage) for stage in get_args(Stage)},
                raised=records.raised,
                unscored=records.unscored,
                settings=dict(self.settings),
                loaded=self.loaded,
                left_alone=self.left_alone,
                rounds=counts["rounds"],
                capped=counts["capped"] > 0,
                reused_lse=counts["reused_lse"],
                without_lse=dict(reasons.get("without_lse", {})),
                passed_over=dict(reasons.get("passed_over", {})),
                memory=self.memory,
                weights=self.weights,
            )
