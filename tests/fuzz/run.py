"""Runs the machine in batches, each under its own seed, until there are enough sequences or the time is over.

`python -m tests.fuzz.run --seed 7 --sequences 1 --shrink` repeats the batch of seed 7 and finds its shortest fault.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import multiprocessing
import os
import platform
import shlex
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from decantkv.base import json_lines
from decantkv.lab.processes import end_with_parent, environment
from decantkv.lab.provenance import commit, device_name, versions
from tests.fuzz.machine import Counts, Machine, counts

BATCH = 25
HANGS = 120  # seconds after which a batch that has not ended is a fault; most take ten, and shrinking one a thousand
ROWS = Path(__file__).parents[2] / "results/matrix/fuzz.jsonl"


def batch(number: int, *, repeatable: bool = False, shrink: bool = True) -> None:
    """Run a batch of sequences; the first fault is raised.

    Args:
        repeatable: the same on every machine: nothing is interrupted.
        shrink: look for a shorter sequence with the same fault.
    """
    gc.collect()
    gc.freeze()  # what is loaded by now need not be looked through at every interrupt
    machine = seed(number)(type("Machine", (Machine,), {"interrupts": not repeatable}))
    try:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=BATCH,
                stateful_step_count=12,
                deadline=None,
                database=None,
                derandomize=False,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
                print_blob=False,
            ),
        )
    finally:
        gc.unfreeze()


def batches(first: int, *, seconds: float, sequences: int) -> Iterator[int]:
    """Run batch after batch without interrupts, from seed `first` on; yields each seed before its batch runs."""
    stop = time.monotonic() + seconds
    while time.monotonic() < stop and counts.sequences < sequences:
        yield first
        batch(first, repeatable=True, shrink=False)
        first += 1


@dataclass
class Outcome:
    """What a batch did; a fault in one line, and the calls that led to it."""

    seed: int
    counts: Counts = field(default_factory=Counts)
    fault: str | None = None
    calls: str = ""


def outcome(number: int, shrink: bool) -> Outcome:
    """Run a batch in this process."""
    faulthandler.dump_traceback_later(_patience(shrink))
    found, calls = None, ""
    try:
        batch(number, shrink=shrink)
    except Exception as error:
        found = f"{type(error).__name__}: {error}".split("\n")[0][:300]
        calls = "\n".join(getattr(error, "__notes__", []))
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Outcome(number, counts.take(), found, calls)


def _patience(shrink: bool) -> int:
    return HANGS * 10 if shrink else HANGS


def _begin() -> None:
    end_with_parent()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()


def outcomes(first: int, *, workers: int, seconds: float, sequences: int, shrink: bool = False) -> Iterator[Outcome]:
    """Run batches without a GPU until there are enough sequences or the time is over, each in a process of its own,
    for what is called a first time takes other lines, and an interrupt falls on another one.

    A batch that hangs, or that ends its process, is a fault too; with it the run ends.
    """
    stop, patience = time.monotonic() + seconds, _patience(shrink)
    seeds = itertools.count(first)
    running: dict[Future[Outcome], int] = {}
    done = 0
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(["tests.fuzz.machine"])
    with environment({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}):
        pool = ProcessPoolExecutor(workers, start, _begin, max_tasks_per_child=1)
        try:
            while True:
                while len(running) < workers and time.monotonic() < stop and done + BATCH * len(running) < sequences:
                    number = next(seeds)
                    running[pool.submit(outcome, number, shrink)] = number
                if not running:
                    return
                ended, _ = wait(running, max(stop - time.monotonic(), 0) + patience, FIRST_COMPLETED)
                if not ended:
                    yield from (Outcome(number, fault=f"no end within {patience} s") for number in running.values())
                    return
                for future in ended:
                    number = running.pop(future)
                    result = future.result()
                    done += result.counts.sequences
                    yield result
        except BrokenProcessPool:
            yield Outcome(number, fault=f"a process ended in this batch or in one of {sorted(running.values())}")
        finally:
            if running:  # batches that hang, or that nobody waits for any more
                for process in list((pool._processes or {}).values()):
                    process.kill()
            pool.shutdown(wait=not running, cancel_futures=True)


def main() -> int:
    """Run, append a row to results/matrix/fuzz.jsonl, and return 1 where a fault was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first batch; the others count on")
    parser.add_argument("--seconds", type=float, default=3600, help="after which no batch begins")
    parser.add_argument("--sequences", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes")
    parser.add_argument("--shrink", action="store_true", help="find a batch's shortest fault; writes no row")
    chosen = parser.parse_args()
    began, total, last = time.monotonic(), Counts(), chosen.seed
    faults: dict[int, str] = {}
    try:
        for result in outcomes(chosen.seed, **{k: v for k, v in vars(chosen).items() if k != "seed"}):
            total.add(result.counts)
            last = max(last, result.seed)
            rate = total.sequences / (time.monotonic() - began)
            print(
                f"seed {result.seed}: {total.sequences} sequences, {rate:.2f} a second, {len(faults)} faults",
                flush=True,
            )
            if result.fault is not None:
                faults[result.seed] = result.fault
                again = f"python -m tests.fuzz.run --seed {result.seed} --sequences 1 --shrink"
                print(
                    result.calls,
                    f"FAULT of seed {result.seed}: {result.fault}",
                    f"again: {again}",
                    "",
                    sep="\n",
                    flush=True,
                )
    except KeyboardInterrupt:
        print("stopped", flush=True)
    seconds = time.monotonic() - began
    row = {
        "command": shlex.join(["python", "-m", "tests.fuzz.run", *sys.argv[1:]]),
        "seeds": [chosen.seed, last],
        "sequences": total.sequences,
        "steps": total.steps,
        "judged": total.judged,
        "interrupts": total.interrupts,
        "seconds": round(seconds),
        "workers": chosen.workers,
        "faults": [{"seed": number, "fault": fault} for number, fault in sorted(faults.items())],
        "refusals": dict(total.refusals.most_common()),
        "python": platform.python_version(),
        **versions(["torch", "transformers", "hypothesis"]),
        "device": device_name(torch.device("cpu")),
        "commit": commit(mark=True),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if not chosen.shrink:
        json_lines.append(ROWS, [row])
    each = total.sequences / max(seconds, 1) / chosen.workers
    print(
        f"{total.sequences} sequences, {total.steps} steps, {total.interrupts} interrupts in {seconds:.0f} s: "
        f"{each:.2f} sequences per second and process; {len(faults)} faults",
        *(f"  seed {number}: {fault}" for number, fault in sorted(faults.items())),
        sep="\n",
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
