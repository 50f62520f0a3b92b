"""vLLM on a GPU: both backends and model runners, with and without CUDA graphs, against transformers evicting alike.

Run on a machine with a GPU and vLLM by `make test-gpu`; written before such a run, see docs/vllm.md.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from decantkv.cache import EvictingCache, new_recorder
from decantkv.engines.blocks import BlockSettings
from decantkv.settings import Settings
from tests import tiny
from tests.engines.engine_run import run
from tests.engines.test_vllm_engine import folder, prompts  # noqa: F401  (a fixture)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed here"),
]

BLOCK, TOKENS, BUDGET = 16, 16, 0.25
NEAR = 0.15  # of log-probabilities of bfloat16 models whose weights are sharpened
DEVICE = {
    "block_size": BLOCK,
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 2**30,  # said, not found out: tests run side by side on one GPU
    "num_gpu_blocks_override": 2000,
    "max_num_batched_tokens": 2048,
}


@pytest.fixture(scope="session")
def model():
    return tiny.llama(head_dim=64, hidden_size=256, max_position_embeddings=4096).to("cuda", torch.bfloat16)


def engine(folder, asked, *, backend, runner, graphs, eviction=BUDGET, **options):  # noqa: F811
    return run(
        folder,
        asked,
        eviction=None if eviction is None else {"budget": eviction, "strict": True},
        environment={"VLLM_USE_V2_MODEL_RUNNER": str(runner - 1), "VLLM_USE_FLASHINFER_SAMPLER": "0"},
        attention_config={"backend": backend},
        enforce_eager=not graphs,
        tokens=TOKENS,
        timeout=500,
        **{**DEVICE, **options},
    )


def assert_agrees(model, ids, said, logprobs):
    """Every token is the reference's, or as likely to it as its own up to rounding; from there on texts may part."""
    settings = BlockSettings.of(Settings.parse("dropkv", budget=BUDGET), BLOCK)
    cache = EvictingCache.of(model, settings, new_recorder(settings))
    out = model.generate(
        torch.tensor([ids], device="cuda"),
        past_key_values=cache,
        max_new_tokens=TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
        **tiny.GREEDY,
    )
    want = torch.cat(out.logits).float().log_softmax(-1)
    for i, token in enumerate(said):
        assert abs(float(want[i, token]) - logprobs[i]) < NEAR, f"token {i} of {len(ids)} tokens"
        best = int(want[i].argmax())
        if token != best:
            assert float(want[i, best] - want[i, token]) < NEAR
            return i
    return len(said)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("backend", ["TRITON_ATTN", "FLASH_ATTN"])
class TestBackends:
    def test_mixed_lengths(self, model, folder, backend, runner, graphs):  # noqa: F811
        asked = prompts(1000, 517, 64, 1500, 33, 96, 700, 7)
        got = engine(folder, asked, backend=backend, runner=runner, graphs=graphs)
        assert got["counters"]["blocks_freed"] > 150
        agreed = [assert_agrees(model, ids, got["tokens"][i], got["logprobs"][i]) for i, ids in enumerate(asked)]
        assert sum(agreed) > len(asked) * TOKENS // 2, agreed
        assert got["left"] == 0

    def test_small_chunks(self, model, folder, backend, runner, graphs):  # noqa: F811
        asked = prompts(519, 261, 136, 395, 300)
        got = engine(folder, asked, backend=backend, runner=runner, graphs=graphs, max_num_batched_tokens=67)
        for i, ids in enumerate(asked):
            assert_agrees(model, ids, got["tokens"][i], got["logprobs"][i])

    def test_a_budget_of_everything_is_stock_vllm(self, folder, backend, runner, graphs):  # noqa: F811
        asked = prompts(900, 300, 33)
        stock = engine(folder, asked, backend=backend, runner=runner, graphs=graphs, eviction=None)
        everything = engine(folder, asked, backend=backend, runner=runner, graphs=graphs, eviction=2048)
        assert stock["tokens"] == everything["tokens"]


@pytest.mark.parametrize("runner", [1, 2])
def test_graphs_say_what_eager_says(folder, runner):  # noqa: F811
    asked = prompts(1000, 517, 700)
    eager, graphs = (
        engine(folder, asked, backend="TRITON_ATTN", runner=runner, graphs=graphs) for graphs in (False, True)
    )
    assert eager["tokens"] == graphs["tokens"]


def test_shared_prefixes_and_preemption(model, folder):  # noqa: F811
    (a, b) = prompts(1000, 400, seed=1)
    asked = [a, a, a[:600] + b, a[:992]]
    options = {"backend": "TRITON_ATTN", "runner": 2, "graphs": True}
    got = engine(folder, asked, enable_prefix_caching=True, max_num_seqs=1, **options)
    assert got["cached"][1] > 500
    for i, ids in enumerate(asked):
        assert_agrees(model, ids, got["tokens"][i], got["logprobs"][i])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_over_two_gpus(model, folder):  # noqa: F811
    asked = prompts(1000, 517, 64)
    got = engine(folder, asked, backend="FLASH_ATTN", runner=2, graphs=True, tensor_parallel_size=2)
    for i, ids in enumerate(asked):
        assert_agrees(model, ids, got["tokens"][i], got["logprobs"][i])
