"""Runs the machine in batches, each under its own seed, until there are enough sequences or the time is over.

`python -m tests.fuzz.run --seed 7 --sequences 100` repeats the batch of seed 7.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from decantkv.lab.provenance import commit, device_name, versions
from tests.fuzz.machine import Machine, counts

BATCH = 25
ROWS = Path(__file__).parents[2] / "results/matrix/fuzz.jsonl"


def batch(number: int, *, repeatable: bool = False) -> None:
    """A batch of sequences; the first fault is shrunk and raised.

    Args:
        repeatable: the same on every machine: nothing is interrupted, and nothing is shrunk.
    """
    machine = seed(number)(type("Machine", (Machine,), {"interrupts": not repeatable}))
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
            phases=[Phase.generate, *([] if repeatable else [Phase.shrink])],
            print_blob=False,
        ),
    )


def batches(first: int, *, seconds: float, sequences: int, repeatable: bool = False) -> Iterator[int]:
    """Run batch after batch from seed `first` on; yields each seed before its batch runs."""
    stop = time.monotonic() + seconds
    while time.monotonic() < stop and counts.sequences < sequences:
        yield first
        batch(first, repeatable=repeatable)
        first += 1


def main() -> int:
    """Run, print every seed, and append the run's row; the exit status says whether a fault was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--sequences", type=int, default=10**9)
    chosen = parser.parse_args()
    began, fault, last = time.monotonic(), None, chosen.seed
    try:
        for last in batches(chosen.seed, seconds=chosen.seconds, sequences=chosen.sequences):
            print(f"seed {last}: {counts.sequences} sequences, {counts.judged} forwards judged", flush=True)
    except Exception as error:
        fault = f"seed {last}: {type(error).__name__}: {error}".split("\n")[0][:300]
        print("\n".join(getattr(error, "__notes__", [])), fault, sep="\n", file=sys.stderr)
    row = {
        "command": "make fuzz",
        "seeds": [chosen.seed, last],
        "sequences": counts.sequences,
        "steps": counts.steps,
        "judged": counts.judged,
        "interrupts": counts.interrupts,
        "seconds": round(time.monotonic() - began),
        "fault": fault,
        "refusals": dict(counts.refusals.most_common()),
        **versions(["torch", "transformers", "hypothesis"]),
        "device": device_name(torch.device("cpu")),
        "commit": commit(mark=True),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    with ROWS.open("a") as rows:
        rows.write(json.dumps(row) + "\n")
    return 0 if fault is None else 1


if __name__ == "__main__":
    sys.exit(main())
