"""One vLLM engine in a process of its own, timed: JSON in on stdin, JSON out on the one marked line of stdout."""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULT = "RESULT "
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


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
        seconds_to_first_token: of a prompt alone, once per repeat; seconds, steps, tokens and running (most at once)
        of all requests together; seconds_of_a_step: median of steps in which `requests_together` requests decode.
    """
    from vllm import LLM, SamplingParams

    engine = LLM(folder, skip_tokenizer_init=True, load_format="dummy", **job["engine"])
    pick = random.Random(job["seed"])

    def prompts(number: int) -> list[dict[str, Any]]:
        return [{"prompt_token_ids": [pick.randrange(3, 1000) for _ in range(job["length"])]} for _ in range(number)]

    def generate(number: int, tokens: int) -> float:
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = prompts(number)
        begin = time.perf_counter()
        engine.generate(asked, sampling, use_tqdm=False)
        return time.perf_counter() - begin

    generate(1, 2)  # kernels are compiled
    first = [generate(1, 1) for _ in range(job["repeats"])]
    scheduler: Any = engine.llm_engine.engine_core.engine_core.scheduler
    steps: list[tuple[float, int]] = []
    step = engine.llm_engine.step

    def timed_step() -> Any:
        begin = time.perf_counter()
        out = step()
        steps.append((time.perf_counter() - begin, len(scheduler.running)))
        return out

    engine.llm_engine.step = timed_step
    together = job["requests_together"]
    generate(together, job["tokens"])
    decoding = [seconds for seconds, running in steps[-(job["tokens"] // 2) :] if running == together]
    steps.clear()
    seconds = generate(job["requests"], job["tokens"])
    return {
        "seconds_to_first_token": first,
        "seconds_of_a_step": statistics.median(decoding) if decoding else None,
        "seconds": seconds,
        "tokens": job["requests"] * job["tokens"],
        "steps": len(steps),
        "running": max(running for _, running in steps),
        "counters": counters(),
    }


def counters() -> dict[str, float]:
    """What the plug-in counted in this process."""
    from decantkv.engines.vllm.counters import ENGINE, HELP, WORKER

    return {name: getattr(ENGINE, name) + getattr(WORKER, name) for name in HELP}


if __name__ == "__main__":
    main()
