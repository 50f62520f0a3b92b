"""One run by several processes over all GPUs: a free process takes the next prompt, and all write to one folder.

One process keeps a GPU waiting for Python much of the time; several keep it busy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from decantkv.cli.console import Console
from decantkv.lab.eval.runner import Plan, Prompt, cache_memory
from decantkv.lab.eval.session import Session, progress_bar
from decantkv.lab.processes import SPAWN, Workers, tell

AHEAD = 3  # samples a worker takes before their turn; at a run's end the others wait for them


@dataclass(frozen=True)
class Work:
    """The work order of every worker.

    Attributes:
        begun: `time.time()` at the start of the run.
        end: time after which no prompt is begun, or None.
        memory: bytes for all workers' caches on one device, or None for three fifths of what is free there.
    """

    session: Session
    plan: Plan
    out: Path
    command: str
    begun: float
    end: float | None
    memory: int | None
    graphs: bool | None


@dataclass(frozen=True)
class Shared:
    """State that the workers share.

    Attributes:
        beside: number of workers on this worker's device, itself included.
        taken: number of prompts that were taken, in their order.
        loaded: a barrier at which all wait until every model is in memory.
    """

    beside: int
    taken: Any
    loaded: Any

    def draw(self, prompts: list[Prompt]) -> Iterator[Prompt]:
        """Yield prompts that no other worker gets."""
        while True:
            with self.taken.get_lock():
                at = self.taken.value
                self.taken.value += 1
            if at >= len(prompts):
                return
            yield prompts[at]

    def memory(self, device: torch.device, asked: int | None) -> int:
        """Bytes for this worker's caches; measured when all models are loaded, before anyone takes more."""
        self.loaded.wait()
        try:
            return cache_memory(device, asked) // self.beside
        finally:
            self.loaded.wait()


def run(
    session: Session,
    plan: Plan,
    out: Path,
    *,
    workers: int,
    command: str,
    minutes: float = 0.0,
    memory: int | None = None,
    graphs: bool | None = None,
) -> bool:
    """`Session.run` by that many processes; on several GPUs each takes one, in turn.

    Raises:
        ValueError: bad input, as a worker found it.
        RuntimeError: a worker failed; what the others had finished is in the folder.
    """
    session.texts()  # a broken file is told at once
    begun = time.time()
    work = Work(session, plan, out, command, begun, begun + 60 * minutes if minutes else None, memory, graphs)
    places, whole = _places(workers), []
    shared = SPAWN.Value("q", 0), SPAWN.Barrier(workers)
    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task(session.suite, total=None)

        def hear(message: tuple[str, int]) -> None:
            kind, cells = message
            if kind == "cells":
                bar.update(task, total=cells)
            else:
                bar.advance(task, cells)

        environments = [_environment(place, workers) for place in places]
        with Workers(environments, collect=lambda _, done: whole.append(done), hear=hear, shared=shared) as pool:
            for place in places:
                pool.take(place, _work, work, places.count(place))
    return all(whole)


def _places(workers: int) -> list[str]:
    """The GPU of each worker, as CUDA_VISIBLE_DEVICES names it; empty without any."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",")[:count] if named else [str(i) for i in range(count)]
    return [names[i % count] if count else "" for i in range(workers)]


def _environment(place: str, workers: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // workers)
    return {"CUDA_VISIBLE_DEVICES": place, "OMP_NUM_THREADS": str(threads)}


def _work(work: Work, beside: int, taken: Any, all_loaded: Any) -> bool:
    """Measure prompts until none is left; return whether all were measured."""
    shared = Shared(beside, taken, all_loaded)
    session = work.session
    disable_progress_bar()  # one for every worker's weights would hide the run's own
    texts, loaded = session.texts(), session.load()
    opened = session.open(
        loaded, texts, work.plan, work.out, command=work.command, begun=work.begun, graphs=work.graphs, ahead=AHEAD,
        memory=shared.memory(loaded[0].device, work.memory),
    )  # fmt: skip
    tell(("cells", opened.cells))
    deadline = None if work.end is None else time.monotonic() + work.end - time.time()
    try:
        return opened.runner.run(
            shared.draw(opened.prompts),
            opened.store,
            deadline=deadline,
            progress=lambda cells: tell(("done", cells)),
        )
    finally:
        opened.store.close()
