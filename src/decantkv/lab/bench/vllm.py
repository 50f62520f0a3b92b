"""vLLM with and without eviction at the same pool: tokens per second, time to first token, requests at once."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from decantkv.engines.vllm import compat
from decantkv.lab.bench.cases import Case
from decantkv.lab.bench.rows import Row
from decantkv.lab.bench.vllm_engine import RESULT

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        **LLAMA,
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "torch_dtype": "bfloat16",
    },
    "tiny": {
        **LLAMA,
        "vocab_size": 1024,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "torch_dtype": "float32",
    },
}

# on an H200 a prompt token of an 8B shape takes 41 µs (32768 of them 1.35 s), a decoding step about 10 ms, and an
# engine about a minute to start: for telling beforehand how long a measurement lasts
SECONDS = {"llama-3.1-8b": {"start": 60.0, "prompt_token": 1.35 / 32768, "step": 0.01}}


@dataclass(frozen=True)
class Load:
    """The load on an engine.

    Attributes:
        shape: name of the random-weight model's shape in `SHAPES`.
        length: tokens of every prompt.
        tokens: tokens of every answer.
        requests: number of requests that come at once.
        together: how many decode together, with prompts as many times shorter, when a step at equal batch is timed.
        pool: tokens that the pool of blocks holds.
        block_size: tokens of a block.
        backend: vLLM's name of an attention backend; None: vLLM's choice.
        runner: 1 or 2, the model runner; None: vLLM's choice.
        graphs: CUDA graphs.
        parallel: processes the model is spread over.
    """

    shape: str
    length: int
    tokens: int
    requests: int
    together: int
    pool: int
    block_size: int = 16
    backend: str | None = None
    runner: int | None = None
    graphs: bool = True
    parallel: int = 1

    def engine(self, budget: float | None) -> dict[str, Any]:
        """Arguments of vLLM's `LLM`."""
        asked: dict[str, Any] = {} if budget is None else {"decantkv": {"budget": budget, "strict": True}}
        chosen: dict[str, Any] = {} if self.backend is None else {"attention_config": {"backend": self.backend}}
        shape = SHAPES[self.shape]
        if torch.cuda.is_available():  # said, not found out: engines may start side by side
            width = torch.finfo(getattr(torch, shape["torch_dtype"])).bits // 8
            token = 2 * width * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
            chosen |= {"gpu_memory_utilization": 0.02, "kv_cache_memory_bytes": self.pool * token}
        else:
            chosen["gpu_memory_utilization"] = 0.3  # of the host's memory, which others use too
        return {
            "dtype": shape["torch_dtype"],
            "max_model_len": self.length + self.tokens + self.block_size,
            "num_gpu_blocks_override": self.pool // self.block_size,
            "block_size": self.block_size,
            "max_num_seqs": max(self.requests, self.together),
            "enable_prefix_caching": False,
            "enforce_eager": not self.graphs,
            "tensor_parallel_size": self.parallel,
            "additional_config": asked,
            **chosen,
        }


def cases(
    load: Load, budgets: Sequence[float | None], *, repeats: int = 4, seed: int = 0, lock: Path | None = None
) -> Iterator[Case]:
    """An engine for each budget, None being vLLM without the plug-in; see `vllm_engine.time_engine` for the rows.

    Args:
        repeats: prompts that are read alone.
        lock: a file; engines that name the same one start side by side and are timed one after the other, once all
            have started.

    Raises:
        RuntimeError: when measured: an engine that failed, with the end of what it said.
    """

    def measure(budget: float | None) -> Row:
        job = {
            "shape": SHAPES[load.shape],
            "engine": load.engine(budget),
            "length": load.length,
            "tokens": load.tokens,
            "requests": load.requests,
            "together": load.together,
            "repeats": repeats,
            "seed": seed,
            "lock": None if lock is None else str(lock),
        }
        return _run(job, {} if load.runner is None else {"VLLM_USE_V2_MODEL_RUNNER": str(load.runner - 1)})

    for budget in budgets:
        about = {"vllm": compat.installed(), "engine": asdict(load), "budget": budget, "repeats": repeats, "seed": seed}
        yield Case(about, functools.partial(measure, budget))


def expected_seconds(load: Load, budget: float | None, repeats: int) -> dict[str, float] | None:
    """Return about how many seconds an engine takes on an H200, start and timing; None for shapes never run there."""
    known = SECONDS.get(load.shape)
    if known is None:
        return None
    held = load.length if budget is None else int(budget * load.length) + load.block_size
    at_once = 1 + max(0, load.pool - load.length - load.tokens) // (held + load.tokens)
    turns = -(-load.requests // at_once)
    prompts = 1 + repeats + 1 + load.requests
    timed = prompts * load.length * known["prompt_token"] / load.parallel + (1 + turns) * load.tokens * known["step"]
    return {"start": known["start"], "timed": timed}


def _run(job: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "decantkv.lab.bench.vllm_engine"],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"vLLM failed: {(done.stdout + done.stderr)[-3000:]}")
    (said,) = (line for line in done.stdout.splitlines() if line.startswith(RESULT))
    found: dict[str, Any] = json.loads(said.removeprefix(RESULT))
    return found
