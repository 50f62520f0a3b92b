"""One vLLM engine in a process of its own, timed: JSON in on stdin, JSON out on the one marked line of stdout."""

from __future__ import annotations

import fcntl
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT = "RESULT "
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Step:
    """One step of an engine.

    Attributes:
        seconds: since the step before it ended.
        read: prompt tokens that it read.
        answered: requests that it gave a token to, with their prompt read before.
        running: requests that were running when it ended.
    """

    seconds: float
    read: int
    answered: int
    running: int


def main() -> None:
    """Read a job, time it, say what came out."""
    job = json.load(sys.stdin)
    os.environ.update(ENVIRONMENT)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(job["shape"]))
        print(f"\n{RESULT}" + json.dumps(time_engine(folder, job)), flush=True)


def time_engine(folder: str, job: dict[str, Any]) -> dict[str, Any]:
    """Start an engine with random weights and time its prompts.

    Returns:
        first_token: seconds of a prompt alone; equal_batch: a decoding step of `together` requests whose prompts are
        `together` times shorter; load: all requests at once, see `summary`; counters; seconds of starting the engine.
    """
    with holding(job["lock"], fcntl.LOCK_SH):  # other engines may start as well, but none is timed
        begin = time.perf_counter()
        from vllm import LLM, SamplingParams

        engine = LLM(folder, skip_tokenizer_init=True, load_format="dummy", **job["engine"])
        started = time.perf_counter() - begin
    pick = random.Random(job["seed"])

    def generate(number: int, length: int, tokens: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": [pick.randrange(3, 1000) for _ in range(length)]} for _ in range(number)]
        begin = time.perf_counter()
        engine.generate(asked, sampling, use_tqdm=False)
        return time.perf_counter() - begin

    length, tokens, together = job["length"], job["tokens"], job["together"]
    with holding(job["lock"], fcntl.LOCK_EX):  # everybody has started, and one is timed at a time
        generate(1, length, 2)  # kernels are compiled
        first = [generate(1, length, 1) for _ in range(job["repeats"])]
        with watching(engine.llm_engine.engine_core.engine_core.scheduler) as steps:
            generate(together, length // together, tokens)
            same = [step.seconds for step in steps if step.read == 0 and step.answered == together]
        with watching(engine.llm_engine.engine_core.engine_core.scheduler) as steps:
            seconds = generate(job["requests"], length, tokens)
    return {
        "first_token": {"seconds_p50": statistics.median(first), "seconds": first},
        "equal_batch": {"requests": together, "prompt_tokens": length // together, "steps": len(same)}
        | ({"seconds_p50": statistics.median(same)} if same else {}),
        "load": summary(steps, seconds, job["requests"] * tokens),
        "counters": counters(),
        "start_seconds": started,
    }


def summary(steps: Sequence[Step], seconds: float, tokens: int) -> dict[str, Any]:
    """Return what a load took.

    Returns:
        tokens_a_second: answered tokens over all its seconds, the reading of prompts among them. decoding: the same of
        the steps alone that read no prompt, with their number, seconds and tokens. reading: steps and seconds of the
        others, and the prompt tokens read. running: most requests at once.
    """
    decoding, reading = [s for s in steps if s.read == 0], [s for s in steps if s.read]
    spent, answered = sum(s.seconds for s in decoding), sum(s.answered for s in decoding)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_a_second": tokens / seconds,
        "steps": len(steps),
        "running": max(s.running for s in steps),
        "decoding": {
            "steps": len(decoding),
            "seconds": spent,
            "tokens": answered,
            "tokens_a_second": answered / spent if spent else None,
        },
        "reading": {
            "steps": len(reading),
            "seconds": sum(s.seconds for s in reading),
            "prompt_tokens": sum(s.read for s in reading),
        },
    }


@contextmanager
def watching(scheduler: Any) -> Iterator[list[Step]]:
    """The engine's steps while open, noted when their results are handed to the scheduler.

    A step's time runs from the results of the one before it: with asynchronous scheduling the next is already under
    way by then, and the time between two results is what the device took.
    """
    steps: list[Step] = []
    update, last = scheduler.update_from_output, time.perf_counter()

    def noting(scheduled: Any, output: Any) -> Any:
        nonlocal last
        sizes = scheduled.num_scheduled_tokens.values()
        running = len(scheduler.running)
        out, now = update(scheduled, output), time.perf_counter()
        if sizes:
            steps.append(Step(now - last, sum(n for n in sizes if n > 1), sum(n == 1 for n in sizes), running))
        last = now
        return out

    scheduler.update_from_output = noting
    try:
        yield steps
    finally:
        del scheduler.update_from_output


@contextmanager
def holding(path: str | None, kind: int) -> Iterator[None]:
    """Hold a file's lock, shared or exclusive; without a path do nothing."""
    if path is None:
        yield
        return
    with open(path, "a") as file:
        fcntl.flock(file, kind)
        try:
            yield
        finally:  # closing is not enough: processes that an engine forks hold the file open as well
            fcntl.flock(file, fcntl.LOCK_UN)


def counters() -> dict[str, float]:
    """Return the plug-in's counters of this process."""
    from decantkv.engines.vllm.counters import ENGINE, HELP, WORKER

    return {name: getattr(ENGINE, name) + getattr(WORKER, name) for name in HELP}


if __name__ == "__main__":
    main()
