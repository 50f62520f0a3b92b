"""vLLM on a GPU: both backends and model runners, with and without CUDA graphs, against transformers evicting alike.

Run on a machine with a GPU and vLLM by `make test-gpu`, with `-n 8` in workers side by side: 20 engines, of 30 to 50
seconds each, and one more where there are two GPUs. `judge` says how an answer is judged, and `test_vllm_judge.py`
that mistakes do not pass.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from decantkv.engines.blocks import BlockSettings
from decantkv.settings import Settings
from tests.engines.engine_run import run
from tests.engines.judge import judge, rounded
from tests.engines.test_vllm_engine import folder, prompts, reference  # noqa: F401  (a fixture)
from tests.support import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
]

BLOCK, TOKENS, BUDGET = 16, 16, 0.25
SETTINGS = BlockSettings.of(Settings.parse("dropkv", budget=BUDGET), BLOCK)
MIXED = (1000, 517, 64, 1500, 33, 96, 700, 7)
# of log-probabilities in float32; vLLM's Triton attention multiplies in tf32, which makes up to 0.0015
NEAR = 0.005
DEVICE = {
    "block_size": BLOCK,
    "gpu_memory_utilization": 0.02,  # tests run side by side on one GPU, so others may hold most of it
    "kv_cache_memory_bytes": 2**30,  # said, not found out, for the same reason
    "num_gpu_blocks_override": 2000,
    "max_num_batched_tokens": 2048,
}
EAGER_AND_GRAPHS = pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
RUNNERS = pytest.mark.parametrize("runner", [1, 2])


@pytest.fixture(scope="session")
def model():
    return tiny.llama(head_dim=64, hidden_size=256, max_position_embeddings=4096).to("cuda")


def engine(folder, asked, *, dtype, backend, runner, graphs, eviction=BUDGET, tokens=TOKENS, **options):  # noqa: F811
    return run(
        folder,
        asked,
        eviction=None if eviction is None else {"budget": eviction, "strict": True},
        environment={"VLLM_USE_V2_MODEL_RUNNER": str(runner - 1), "VLLM_USE_FLASHINFER_SAMPLER": "0"},
        attention_config={"backend": backend},
        enforce_eager=not graphs,
        dtype=dtype,
        tokens=tokens,
        record=options.get("tensor_parallel_size", 1) == 1,
        timeout=500,
        **{**DEVICE, **options},
    )


def assert_float32(model, asked, got):
    """Every eviction is right, and every token of every answer as likely as transformers says with the same kept."""
    for ids, answer in zip(asked, judge(model, SETTINGS, asked, got, "float32"), strict=True):
        assert float(answer.differences.max()) < NEAR, f"{len(ids)} tokens: {answer.differences.tolist()}"
        for name, control in answer.controls.items():
            assert float(control.max()) > 2 * NEAR, f"{len(ids)} tokens: {name} would pass"
    assert got["left"] == 0


def texts_agree(model, asked, got):
    """How many answers are those of the library's own eviction, token for token."""
    return sum(
        reference(model, ids, budget=BUDGET, tokens=TOKENS, block_size=BLOCK)[0] == got["tokens"][i]
        for i, ids in enumerate(asked)
    )


@EAGER_AND_GRAPHS
@RUNNERS
def test_mixed_lengths_in_float32(model, folder, runner, graphs):  # noqa: F811
    asked = prompts(*MIXED)
    got = engine(folder, asked, dtype="float32", backend="TRITON_ATTN", runner=runner, graphs=graphs)
    assert_float32(model, asked, got)
    assert got["counters"]["blocks_freed"] == sum(SETTINGS.plan(len(ids)).first_block for ids in asked)
    # tf32 moves scores a little, and a head that keeps another token at the edge may end in another text: one did
    assert texts_agree(model, asked, got) >= len(asked) - 3


# every pair of backend, runner and graphs, and among them vLLM's own choice, the last
@pytest.mark.parametrize(
    ("backend", "runner", "graphs"),
    [("TRITON_ATTN", 1, True), ("TRITON_ATTN", 2, False), ("FLASH_ATTN", 1, False), ("FLASH_ATTN", 2, True)],
    ids=["triton-1-graphs", "triton-2-eager", "flash-1-eager", "flash-2-graphs"],
)
def test_bfloat16(model, folder, backend, runner, graphs):  # noqa: F811
    """Stock vLLM says how far bfloat16 is from float32; evicting may be three times as far, mistakes are farther."""
    asked, held = prompts(*MIXED), rounded(model, "bfloat16")
    kind = {"dtype": "bfloat16", "backend": backend, "runner": runner, "graphs": graphs}
    stock = engine(folder, asked, eviction=None, **kind)
    bound = 3 * max(rms(answer.differences) for answer in judge(held, None, asked, stock, "bfloat16"))
    got = engine(folder, asked, **kind)
    for ids, answer in zip(asked, judge(held, SETTINGS, asked, got, "bfloat16"), strict=True):
        assert rms(answer.differences) < bound, f"{len(ids)} tokens: {answer.differences.tolist()}"
        for name, control in answer.controls.items():
            assert rms(control) > 2 * bound, f"{len(ids)} tokens: {name} would pass {bound:.3f}"
    assert got["counters"]["blocks_freed"] == sum(SETTINGS.plan(len(ids)).first_block for ids in asked)
    assert got["left"] == 0
    everything = engine(folder, asked, eviction=2048, **kind)
    assert everything["tokens"] == stock["tokens"]
    assert not everything["evictions"]


def rms(differences):
    return float(differences.square().mean().sqrt())


@pytest.mark.parametrize(("runner", "graphs"), [(1, False), (2, True)], ids=["1-eager", "2-graphs"])
def test_small_chunks_in_float32(model, folder, runner, graphs):  # noqa: F811
    asked = prompts(519, 261, 136, 395, 300)
    got = engine(
        folder,
        asked,
        dtype="float32",
        backend="TRITON_ATTN",
        runner=runner,
        graphs=graphs,
        max_num_batched_tokens=67,
    )
    assert_float32(model, asked, got)
    assert got["steps"] > sum(map(len, asked)) // 67
    assert texts_agree(model, asked, got) >= len(asked) - 2


def test_shared_prefixes_in_float32(model, folder):  # noqa: F811
    (a, b) = prompts(1000, 400, seed=1)
    asked = [a, a, a[:600] + b, a[:992]]
    got = engine(
        folder,
        asked,
        dtype="float32",
        backend="TRITON_ATTN",
        runner=2,
        graphs=True,
        enable_prefix_caching=True,
        max_num_seqs=1,
    )
    assert_float32(model, asked, got)
    assert got["cached"][0] == 0
    for cached, ids in zip(got["cached"][1:], asked[1:], strict=True):
        assert 500 < cached <= SETTINGS.plan(len(ids)).dropped


def test_preempted_requests_in_float32(model, folder):  # noqa: F811
    asked = prompts(300, 260, 290, 310, 280, seed=3)
    got = engine(
        folder,
        asked,
        dtype="float32",
        backend="TRITON_ATTN",
        runner=1,
        graphs=True,
        tokens=200,
        num_gpu_blocks_override=60,
        max_model_len=600,
        max_num_batched_tokens=600,
    )
    assert got["preempted"] > 0
    assert_float32(model, asked, got)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_over_two_gpus_in_float32(model, folder):  # noqa: F811
    """Evictions happen in other processes and are not noted: texts and, while they agree, log-probabilities."""
    asked = prompts(*MIXED)
    got = engine(folder, asked, dtype="float32", backend="TRITON_ATTN", runner=2, graphs=True, tensor_parallel_size=2)
    right = 0
    for i, ids in enumerate(asked):
        said, logprobs = reference(model, ids, budget=BUDGET, tokens=TOKENS, block_size=BLOCK)
        pairs = zip(logprobs, got["logprobs"][i], strict=True)
        right += got["tokens"][i] == said and max(abs(a - b) for a, b in pairs) < NEAR
    assert right >= len(asked) - 3
