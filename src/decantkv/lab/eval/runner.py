"""Runs a suite: read a prompt once, evict copies for every policy, budget and regime, decode the copies together."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decantkv.decode.graphs import Trust
from decantkv.lab.eval import metrics
from decantkv.lab.eval.chat import ChatFormat, Encoded, Regime
from decantkv.lab.eval.engine.batches import Limits, batches
from decantkv.lab.eval.engine.policy import Policy
from decantkv.lab.eval.engine.quantise import bytes_share
from decantkv.lab.eval.engine.reading import Cut, Reader, Reading
from decantkv.lab.eval.engine.rows import Row, RowBatch
from decantkv.lab.eval.fidelity import ROWS, compare, costs, kept_mask, output_shift, overlaps
from decantkv.lab.eval.results import Cell, Store
from decantkv.lab.eval.sample import Sample
from decantkv.settings import Settings

Some = TypeVar("Some")
Prompt = tuple[str, Callable[[], Sample]]
"""A sample's key and how to make it, in another thread; done prompts are never made."""

AHEAD = 16
PAUSES = (0, 5, 15, 30, 60)  # seconds between attempts at what does not fit beside what others hold
LOOK_AGAIN = 1.0  # seconds until prompts that another process measures are looked at again
WAITING = 4  # full batches' rows that wait for rows of their size, where a batch costs as much as many of its steps


@dataclass(frozen=True)
class Plan:
    """What to measure on every prompt.

    Attributes:
        policies: "full" is added where it is missing: every score is judged against it.
        budgets: as typed.
        regimes: where prompts are cut.
        likelihood: also the mean negative log-likelihood, per token, of the references under each copy.
        generate: whether answers are generated and scored.
        fidelity: compare next-token distributions over the reference, kept sets and layer outputs with the full cache.
    """

    policies: tuple[Policy, ...]
    budgets: tuple[str, ...]
    regimes: tuple[Regime, ...]
    likelihood: bool = False
    generate: bool = True
    fidelity: bool = False

    def cells(self, prompt: str) -> list[Cell]:
        """Every answer wanted for a prompt."""
        cells = [Cell(prompt, "any", "full", "1")]
        for regime in self.regimes:
            for policy in self.policies:
                if policy.kind == "evict":
                    cells += [Cell(prompt, regime, policy.label, budget) for budget in self.budgets]
                elif policy.kind == "quantise":
                    cells.append(Cell(prompt, regime, policy.label, "-"))
        return cells


@dataclass
class _Job:
    """A prompt being worked on."""

    sample: Sample
    encoded: Encoded
    reading: Reading
    rows: list[tuple[Cell, Row]] = field(default_factory=list)
    extras: dict[Cell, dict[str, Any]] = field(default_factory=dict)
    full_logits: Tensor | None = None  # [C, V] over the reference, where fidelity asks

    @property
    def nbytes(self) -> int:
        """Bytes of the waiting prompt and of its scores. The copies are made batch by batch."""
        return self.reading.nbytes + sum(cut.nbytes for cut in self.reading.cuts.values())


@dataclass(frozen=True, eq=False)
class _Entry:
    """A row of a job and what it answers."""

    job: _Job
    cell: Cell
    row: Row


class Runner:
    """Measures prompts with one model; see `run`.

    Args:
        stops: token ids that end any answer.
        memory: bytes for caches; None takes three fifths of what is free. A quarter holds prompts that wait, a half a
            batch of copies, a quarter is for reading.
        graphs: capture decode steps as CUDA graphs; None means on CUDA.
        max_rows: copies decoded together; None decides by device.
        ahead: samples that are made before their turn: some take a hundred times as long as others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        form: ChatFormat,
        plan: Plan,
        *,
        stops: Sequence[int],
        memory: int | None = None,
        graphs: bool | None = None,
        max_rows: int | None = None,
        ahead: int = AHEAD,
    ) -> None:
        self.model, self.form, self.plan, self.stops, self.ahead = model, form, plan, tuple(stops), ahead
        self.policies = {policy.label: policy for policy in plan.policies}
        asked = [policy.settings("1.0") for policy in plan.policies if policy.kind == "evict"]
        needs = frozenset(need for settings in asked for need in settings.method.needs)
        self.memory = cache_memory(model.device, None) if memory is None else memory
        rows = max((settings.rows for settings in asked), default=1)
        self.reader = Reader(model, rows=rows, needs=needs, memory=self.memory // 4)
        self.graphs = model.device.type == "cuda" if graphs is None else graphs
        self.trust = Trust()  # of the graphs of all batches
        on_cuda = model.device.type == "cuda"
        most = max_rows or (512 if on_cuda else 48)  # a CPU gains little beyond
        self.limits = Limits(self.memory // 2, most, apart=not on_cuda)
        self.max_waiting = most * (WAITING if on_cuda else 1)
        self._newline = _newline_tokens(form.tokenizer)

    def run(
        self,
        prompts: Iterable[Prompt],
        store: Store,
        *,
        deadline: float | None = None,
        progress: Callable[[int], None] = lambda cells: None,
    ) -> bool:
        """Measure what the store does not hold yet; True when all is done, False when the deadline came first.

        Prompts that another process measures are left to it, and looked at again when all others are done.

        Args:
            deadline: `time.monotonic()` after which no new prompt is begun.
            progress: called with the number of cells that were finished or found done.
        """
        while True:
            elsewhere: list[Prompt] = []
            if not self._pass(prompts, store, elsewhere, deadline=deadline, progress=progress):
                return False
            if not elsewhere:
                return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            prompts = elsewhere
            time.sleep(LOOK_AGAIN)

    def _pass(
        self,
        prompts: Iterable[Prompt],
        store: Store,
        elsewhere: list[Prompt],
        *,
        deadline: float | None,
        progress: Callable[[int], None],
    ) -> bool:
        """Measure the prompts that no other process measures, and note the rest; False when the deadline came."""
        jobs: list[_Job] = []
        for sample, missing in _made_ahead(self._undone(prompts, store, elsewhere, progress), self.ahead):
            if deadline is not None and time.monotonic() > deadline:
                self._finish(jobs, store, progress)
                return False
            job = self._try_to_read(sample, missing)
            if job is None:
                self._finish(jobs, store, progress)
                jobs = []
                job = self._when_it_fits(partial(self._read, sample, missing))
            jobs.append(job)
            rows = sum(len(job.rows) for job in jobs)
            if rows >= self.max_waiting or sum(job.nbytes for job in jobs) > self.memory // 4:
                self._finish(jobs, store, progress)
                jobs = []
        self._finish(jobs, store, progress)
        return True

    def _undone(
        self, prompts: Iterable[Prompt], store: Store, elsewhere: list[Prompt], progress: Callable[[int], None]
    ) -> Iterator[tuple[Callable[[], Sample], list[Cell]]]:
        for key, make in prompts:
            if not store.claim(key):
                elsewhere.append((key, make))
                continue
            wanted = self.plan.cells(key)
            missing = [cell for cell in wanted if cell not in store.done]
            progress(len(wanted) - len(missing))
            if missing:
                yield make, missing
            else:
                store.release(key)

    def _try_to_read(self, sample: Sample, missing: list[Cell]) -> _Job | None:
        """Read the prompt; return None if memory is short."""
        with contextlib.suppress(torch.OutOfMemoryError):
            return self._read(sample, missing)
        self._give_back()  # now, since while the error lives so does all that it happened to
        return None

    def _when_it_fits(self, attempt: Callable[[], Some]) -> Some:
        """Return what `attempt` returns, as soon as other processes on the device leave memory for it."""
        for pause in PAUSES:
            self._give_back()
            time.sleep(pause)
            with contextlib.suppress(torch.OutOfMemoryError):
                return attempt()
        self._give_back()
        return attempt()

    def _give_back(self) -> None:
        """Free what no job needs: a half-read prompt, and the allocator's unused memory."""
        self.reader.forget()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def _read(self, sample: Sample, missing: list[Cell]) -> _Job:
        """Read the prompt and make the rows of its missing cells."""
        encoded = self.form.encode(sample)
        cut_of = {cell: encoded.cuts[cell.regime] if cell.regime != "any" else len(encoded.ids) for cell in missing}  # type: ignore[index]
        chosen = {cell: self._settings(cell, cut_of[cell], encoded) for cell in missing}
        extras: dict[Cell, dict[str, Any]] = {}
        for cut in self.reader.read(encoded.ids, cut_of.values()):
            here = {cell: settings for cell, settings in chosen.items() if settings and cut_of[cell] == cut.length}
            for settings in here.values():
                cut.score(settings)
            if self.plan.fidelity:
                extras.update(_shifts_and_overlaps(cut, here))
        job = _Job(sample, encoded, self.reader.reading(), extras=extras)
        job.rows = [(cell, self._row(job, cell, cut_of[cell], settings)) for cell, settings in chosen.items()]
        return job

    def _settings(self, cell: Cell, length: int, encoded: Encoded) -> Settings | None:
        """What a cell's copy is evicted by; None where all of its tokens stay."""
        policy = self.policies.get(cell.policy)
        if policy is None or policy.kind != "evict":
            return None
        settings = policy.settings(
            cell.budget,
            protect=encoded.protect if policy.protect else (),
            question=encoded.ids[encoded.cuts["agnostic"] :],
        )
        return None if settings.n_keep([length]) == [length] else settings

    def _row(self, job: _Job, cell: Cell, cut: int, settings: Settings | None) -> Row:
        newline = self._newline if job.sample.stop_at_newline else ()
        policy = self.policies.get(cell.policy)
        return Row(
            reading=job.reading,
            cut=job.reading.cuts[cut],
            rest=job.encoded.ids[cut:],
            settings=settings,
            bits=policy.bits if policy else 0,
            max_new_tokens=job.sample.max_new_tokens,
            stops=(*self.stops, *newline),
            answer_first=job.sample.stop_at_newline,
        )

    def _finish(self, jobs: list[_Job], store: Store, progress: Callable[[int], None]) -> None:
        if not jobs:
            return
        store.append(_prompt_row(job) for job in jobs if job.sample.key not in store.prompts)
        entries = [_Entry(job, *entry) for job in jobs for entry in job.rows]
        for batch in batches(entries, self.limits):
            answers = self._halving(batch)
            store.append(
                {"row": "answer", **asdict(e.cell), **answer} for e, answer in zip(batch, answers, strict=True)
            )
            progress(len(batch))
        for job in jobs:
            store.release(job.sample.key)

    def _halving(self, batch: list[_Entry]) -> list[dict[str, Any]]:
        """A batch's answers; in halves, from then on, where others on the device left no memory for the whole."""
        with contextlib.suppress(torch.OutOfMemoryError):
            return self._measure(batch)
        if len(batch) == 1:
            return self._when_it_fits(partial(self._measure, batch))
        self.limits.halve(entry.row for entry in batch)
        half = (len(batch) + 1) // 2
        self._give_back()
        return [*self._halving(batch[:half]), *self._halving(batch[half:])]

    def _measure(self, batch: list[_Entry]) -> list[dict[str, Any]]:
        rows = [entry.row for entry in batch]
        samples = [entry.job.sample for entry in batch]
        forcing = self.plan.likelihood or self.plan.fidelity
        forced = [self._reference_ids(sample) for sample in samples] if forcing else [()] * len(rows)
        room = max(
            len(row.rest) + max(row.max_new_tokens if self.plan.generate else 0, len(ids)) + 1
            for row, ids in zip(rows, forced, strict=True)
        )
        copies = RowBatch(self.model, rows, room=room, graphs=self.graphs, trust=self.trust)
        measured = [_size(row, kept) for row, kept in zip(rows, copies.kept.tolist(), strict=True)]
        if forcing:
            for entry, found, logits, ids in zip(batch, measured, copies.forced_logits(forced), forced, strict=True):
                found["nll"] = round(_nll(logits, ids), 5)
                if self.plan.fidelity:
                    found |= {
                        **compare(self._full_logits(entry.job, ids), logits),
                        **entry.job.extras.get(entry.cell, {}),
                    }
        if self.plan.generate:
            for found, tokens, row, sample in zip(measured, copies.generate(), rows, samples, strict=True):
                ended = bool(tokens) and tokens[-1] in row.stops
                text = self.form.tokenizer.decode(tokens[:-1] if ended else tokens, skip_special_tokens=True)
                found |= {
                    "score": round(metrics.score(sample, text), 5),
                    "new_tokens": len(tokens),
                    "ended": ended,
                    "answer": text,
                }
        return measured

    def _full_logits(self, job: _Job, ids: tuple[int, ...]) -> Tensor:
        """[C, V] of the full cache over the reference, computed once a prompt."""
        if job.full_logits is None:
            whole = RowBatch(self.model, [Row(job.reading, job.reading.whole, ())], room=len(ids) + 1)
            job.full_logits = whole.forced_logits([ids])[0]
        return job.full_logits

    def _reference_ids(self, sample: Sample) -> tuple[int, ...]:
        joined = ", ".join(sample.references) if sample.metric == "string_match_all" else sample.references[0]
        gap = "" if sample.text.endswith((" ", "\n")) or sample.suite == "fidelity" else " "
        return tuple(self.form.tokenizer(gap + joined, add_special_tokens=False)["input_ids"])


def _size(row: Row, kept: float) -> dict[str, Any]:
    """A row's shares of tokens and bytes; `kept`: tokens per head."""
    share, head_dim = kept / row.cut.length, row.cut.layers[0].values.shape[3]
    return {"kept": round(share, 5), "bytes": round(bytes_share(row.bits, head_dim) if row.bits else share, 5)}


def _shifts_and_overlaps(cut: Cut, chosen: dict[Cell, Settings]) -> dict[Cell, dict[str, Any]]:
    found: dict[Cell, dict[str, Any]] = {}
    windows = [cut.window(layer, ROWS) for layer in range(len(cut.layers))]
    each = costs(windows) if chosen else []
    kept = {cell: kept_mask(cut.evict(settings), cut.length) for cell, settings in chosen.items()}
    for regime, budget in {(cell.regime, cell.budget) for cell in chosen}:
        here = {cell: mask for cell, mask in kept.items() if (cell.regime, cell.budget) == (regime, budget)}
        shared = overlaps({cell.policy: mask for cell, mask in here.items()})
        for cell, mask in here.items():
            found[cell] = {"shift": output_shift(windows, mask, each), "overlap": shared[cell.policy]}
    return found


def _made_ahead(
    undone: Iterator[tuple[Callable[[], Sample], list[Cell]]], number: int = AHEAD
) -> Iterator[tuple[Sample, list[Cell]]]:
    """Samples in turn, a few made while earlier ones are worked on: fitting a length costs many tokenisations."""
    ahead: deque[tuple[Future[Sample], list[Cell]]] = deque()
    maker = ThreadPoolExecutor(1)
    try:
        for make, missing in undone:
            ahead.append((maker.submit(make), missing))
            if len(ahead) > number:
                made, cells = ahead.popleft()
                yield made.result(), cells
        while ahead:
            made, cells = ahead.popleft()
            yield made.result(), cells
    finally:
        maker.shutdown(cancel_futures=True)


def cache_memory(device: torch.device, asked: int | None) -> int:
    """Return the bytes for caches on a device: `asked`, or three fifths of what is free.

    Raises:
        ValueError: `asked` is more than what is free.
    """
    free = free_memory(device)
    if asked is not None and asked > free:
        raise ValueError(
            f"memory: expected at most the {free / 2**30:.0f} GiB that are free on {device}, got {asked / 2**30:.0f}"
        )
    return free * 3 // 5 if asked is None else asked


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device, or of main memory for the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _nll(logits: Tensor, ids: Sequence[int]) -> float:
    target = torch.tensor(list(ids), device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits.float(), target))


def _newline_tokens(tokenizer: Any) -> tuple[int, ...]:
    return tuple(tokenizer("\n", add_special_tokens=False)["input_ids"][-1:])


def _prompt_row(job: _Job) -> dict[str, Any]:
    sample = job.sample
    return {
        "row": "prompt",
        "prompt": sample.key,
        "task": sample.task,
        "length": sample.length,
        "tokens": len(job.encoded.ids),
        "kv_bytes": job.reading.nbytes,
        "context_tokens": job.encoded.cuts["agnostic"],
        "references": list(sample.references),
        "metric": sample.metric,
        "limit": sample.max_new_tokens,
        **{name: value for name, value in sample.details.items() if name != "all_classes"},
    }
