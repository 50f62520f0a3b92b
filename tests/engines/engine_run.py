"""A real vLLM engine in a process of its own: JSON in on stdin, JSON out on the one marked line of stdout."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path

import torch

from tests.engines.recording import recording

RESULT = "RESULT "
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}
LLM = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 2048,
    "block_size": 32,
    "max_num_seqs": 4,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks_override": 400,
    "gpu_memory_utilization": 0.3,  # on a CPU of the host's memory, which others use too
    "seed": 0,
}


def run(model, prompts, *, eviction=None, tokens=12, environment=None, aborts=0, record=False, timeout=600, **llm):
    """What an engine answers, greedily; several processes where `llm` says so.

    Returns:
        A dict: tokens and logprobs (a list per prompt), cached (tokens from the prefix cache), and, of engines in one
        process, running (most at once), steps, preempted, left (blocks in use at the end), counters; log is stderr.
        With `record` evictions, as `recording` notes them.
    """
    many = llm.get("tensor_parallel_size", 1) * llm.get("pipeline_parallel_size", 1) > 1
    options = {**LLM, **llm}
    if eviction is not None:
        options["additional_config"] = {"decantkv": eviction}
    job = {"model": str(model), "prompts": prompts, "llm": options, "tokens": tokens, "aborts": aborts}
    env = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(many)), **(environment or {})}
    if many:
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    with tempfile.TemporaryDirectory() as folder:
        if record:
            job["record"] = str(Path(folder, "evictions.pt"))
        result = start(job, env, timeout)
        if record:
            result["evictions"] = torch.load(job["record"])
    return result


def start(job, env, timeout):
    """Run `main` on a job in a process of its own."""
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [announced(), env.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.engine_run"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=env,
        timeout=timeout,
        check=False,
    )
    log = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(log[-6000:])
    (said,) = (line for line in done.stdout.splitlines() if line.startswith(RESULT))
    return {**json.loads(said.removeprefix(RESULT)), "log": log}


def announced():
    """A folder whose metadata names the plug-in, where decantkv runs from its sources; None where it is installed."""
    if any(entry.name == "decantkv" for entry in entry_points(group="vllm.general_plugins")):
        return None
    folder = Path(tempfile.gettempdir(), f"decantkv-plug-in-{os.getuid()}")
    info = folder / "decantkv-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: decantkv\nVersion: 0\n")
    info.joinpath("entry_points.txt").write_text("[vllm.general_plugins]\ndecantkv = decantkv.engines.vllm:register\n")
    return str(folder)


def main():
    job = json.load(sys.stdin)
    from vllm import LLM as Engine
    from vllm import SamplingParams

    engine = Engine(job["model"], **job["llm"])
    sampling = SamplingParams(temperature=0, max_tokens=job["tokens"], ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    core = getattr(engine.llm_engine.engine_core, "engine_core", None)
    watched = contextlib.nullcontext({}) if core is None else watching(core.scheduler, engine.llm_engine)
    noting = recording() if job.get("record") else contextlib.nullcontext([])
    with noting as evictions, watched as seen:
        if job["aborts"]:
            answers = churn(engine.llm_engine, prompts, job["tokens"], job["aborts"])
        else:
            answers = [
                {
                    "tokens": list(out.outputs[0].token_ids),
                    "logprobs": [next(iter(step.values())).logprob for step in out.outputs[0].logprobs],
                    "cached": out.num_cached_tokens,
                }
                for out in engine.generate(prompts, sampling, use_tqdm=False)
            ]
    from decantkv.engines.vllm import counters

    if job.get("record"):
        torch.save(evictions, job["record"])
    sums = {name: getattr(counters.ENGINE, name) + getattr(counters.WORKER, name) for name in counters.HELP}
    result = {name: [answer[name] for answer in answers] for name in answers[0]} if answers else {}
    print(f"\n{RESULT}" + json.dumps({**result, **seen, "counters": sums}), flush=True)


@contextlib.contextmanager
def watching(scheduler, engine):
    """Count what the scheduler does, by looking on after every step."""
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    seen = {"running": 0, "steps": 0, "preempted": 0, "used": []}
    step, preempt = engine.step, scheduler._preempt_request

    def counted_step():
        out = step()
        seen["running"] = max(seen["running"], len(scheduler.running))
        seen["steps"] += 1
        seen["used"].append(free - pool.get_num_free_blocks())
        return out

    def counted_preemption(*args, **kwargs):
        seen["preempted"] += 1
        return preempt(*args, **kwargs)

    engine.step, scheduler._preempt_request = counted_step, counted_preemption
    yield seen
    seen["left"] = free - pool.get_num_free_blocks()
    seen["held"] = sum(
        len(manager.req_to_blocks) for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
    )
    seen["manager"] = type(scheduler.kv_cache_manager.coordinator.single_type_managers[0]).__name__


def churn(engine, prompts, tokens, aborts):
    """Requests that come while others run; some are aborted while they wait, read or answer."""
    from vllm import SamplingParams

    pick = random.Random(0)
    waiting, alive, finished = list(enumerate(prompts)), set(), 0
    while waiting or engine.has_unfinished_requests():
        for _ in range(pick.randrange(4)):
            if waiting:
                number, prompt = waiting.pop()
                sampling = SamplingParams(temperature=0, max_tokens=pick.randrange(1, tokens + 1), ignore_eos=True)
                engine.add_request(str(number), prompt, sampling)
                alive.add(str(number))
        if alive and aborts and pick.random() < 0.4:
            gone = pick.choice(sorted(alive))
            engine.abort_request([gone])
            alive.discard(gone)
            aborts -= 1
        for out in engine.step():
            if out.finished:
                alive.discard(out.request_id)
                finished += 1
    return [{"finished": finished, "aborts_left": aborts}]


if __name__ == "__main__":
    main()
