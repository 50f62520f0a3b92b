"""One run by several processes over all GPUs: a free process takes the next prompt, and all write to one folder.

One process keeps a GPU waiting for Python much of the time; several keep it busy.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from decantkv.cli.console import Console
from decantkv.lab.eval.runner import Plan, Prompt, cache_memory
from decantkv.lab.eval.session import Session, progress_bar
from decantkv.lab.processes import end_with_parent, environment

Running = dict[Connection, BaseProcess]  # each process by where its messages arrive
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
        tell: connection for messages to the parent process.
    """

    beside: int
    taken: Any
    loaded: Any
    tell: Connection

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
    # spawned, because a forked process must not use torch after its parent has used a GPU
    context = multiprocessing.get_context("spawn")
    places = _places(workers)
    taken, loaded = context.Value("q", 0), context.Barrier(workers)
    running: Running = {}
    try:
        for place in places:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(work, Shared(places.count(place), taken, loaded, sender)))
            with environment(_environment(place, workers)):
                process.start()
            sender.close()
            running[receiver] = process
        return _listen(running, session.suite)
    finally:
        for started in running.values():
            started.terminate()
        for started in running.values():
            started.join()


def _places(workers: int) -> list[str]:
    """The GPU of each worker, as CUDA_VISIBLE_DEVICES names it; empty without any."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = named.split(",")[:count] if named else [str(i) for i in range(count)]
    return [names[i % count] if count else "" for i in range(workers)]


def _environment(place: str, workers: int) -> dict[str, str]:
    threads = max(1, (os.cpu_count() or 1) // workers)
    return {"CUDA_VISIBLE_DEVICES": place, "OMP_NUM_THREADS": str(threads)}


def _listen(running: Running, name: str) -> bool:
    """Show what is done until all workers are through; True when all of it is."""
    whole = True
    with progress_bar(Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        left = dict(running)
        while left:
            ready = wait(list(left))
            for receiver in [each for each in left if each in ready]:
                try:
                    kind, said = receiver.recv()
                except EOFError:
                    process = left.pop(receiver)
                    process.join()
                    if process.exitcode:
                        raise RuntimeError(f"workers: one ended with exit code {process.exitcode}") from None
                    continue
                if kind == "input":
                    raise ValueError(said)
                if kind == "error":
                    raise RuntimeError(f"workers: one failed\n{said}")
                if kind == "cells":
                    bar.update(task, total=said)
                elif kind == "done":
                    bar.advance(task, said)
                else:
                    whole = whole and bool(said)
    return whole


def _work(work: Work, shared: Shared) -> None:
    """A worker's life."""
    end_with_parent()
    try:
        shared.tell.send(("whole", _measure(work, shared)))
    except ValueError as error:
        shared.tell.send(("input", str(error)))
    except BaseException:
        shared.tell.send(("error", traceback.format_exc()))


def _measure(work: Work, shared: Shared) -> bool:
    session = work.session
    disable_progress_bar()  # one for every worker's weights would hide the run's own
    texts, loaded = session.texts(), session.load()
    opened = session.open(
        loaded, texts, work.plan, work.out, command=work.command, begun=work.begun, graphs=work.graphs, ahead=AHEAD,
        memory=shared.memory(loaded[0].device, work.memory),
    )  # fmt: skip
    shared.tell.send(("cells", opened.cells))
    deadline = None if work.end is None else time.monotonic() + work.end - time.time()
    try:
        return opened.runner.run(
            shared.draw(opened.prompts),
            opened.store,
            deadline=deadline,
            progress=lambda cells: shared.tell.send(("done", cells)),
        )
    finally:
        opened.store.close()
