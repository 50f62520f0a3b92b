"""A real vLLM engine on the CPU, evicting, against transformers that evicts alike: the same tokens."""

from __future__ import annotations

import importlib.util
import random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decantkv.cache.evicting_cache import EvictingCache, new_recorder
from decantkv.engines.blocks import BlockSettings
from decantkv.settings import Settings
from tests.engines.engine_run import run
from tests.support import tiny

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; `make test-vllm` has it"
)

BLOCK = 32
TOKENS = 12
CLOSE = 2e-4  # of log-probabilities in float32


@pytest.fixture(scope="session")
def model():
    return tiny.llama(head_dim=32, hidden_size=128, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w0")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}w5"
    tokenizer.save_pretrained(path)
    return path


def prompts(*lengths, seed=0):
    pick = random.Random(seed)
    return [[pick.randrange(1, tiny.VOCABULARY) for _ in range(n)] for n in lengths]


def reference(model, ids, *, budget, tokens=TOKENS, block_size=BLOCK, **options):
    """Tokens and log-probabilities of the evicting transformers path, one prompt alone."""
    settings = BlockSettings.of(Settings.parse(options.pop("method", "dropkv"), budget=budget, **options), block_size)
    cache = EvictingCache.of(model, settings, new_recorder(settings))
    out = model.generate(
        torch.tensor([ids], device=model.device),
        past_key_values=cache,
        max_new_tokens=tokens,
        output_logits=True,
        return_dict_in_generate=True,
        **tiny.GREEDY,
    )
    said = out.sequences[0, len(ids) :]
    logprobs = torch.cat(out.logits).float().log_softmax(-1).gather(1, said[:, None])[:, 0]
    return said.tolist(), logprobs.tolist()


def full(model, ids, tokens=TOKENS):
    return model.generate(torch.tensor([ids]), max_new_tokens=tokens, **tiny.GREEDY)[0, len(ids) :].tolist()


def assert_same(got, model, asked, **options):
    options.setdefault("tokens", TOKENS)
    for i, ids in enumerate(asked):
        said, logprobs = reference(model, ids, **options)
        assert got["tokens"][i] == said, f"prompt {i} of {len(ids)} tokens"
        assert max(abs(a - b) for a, b in zip(got["logprobs"][i], logprobs, strict=True)) < CLOSE


MIXED = (1000, 517, 64, 1500, 33, 96, 700, 7)


def test_mixed_lengths_batched_continuously(model, folder):
    asked = prompts(*MIXED)
    got = run(folder, asked, eviction={"budget": 0.25, "strict": True})
    assert got["manager"] == "DropKVManager"
    assert_same(got, model, asked, budget=0.25)
    assert got["left"] == 0
    assert sum(said != full(model, ids) for said, ids in zip(got["tokens"], asked, strict=True)) >= 3
    used = got["used"]
    assert used[0] > 2 * used[3] > 0, used[:8]
    assert got["counters"]["blocks_freed"] > 70
    assert got["counters"]["tokens_dropped"] == 32 * got["counters"]["blocks_freed"]
    assert got["counters"]["scoring_seconds"] > 0


@pytest.mark.parametrize("chunk", [130, 33])
def test_prompts_in_chunks_that_cut_the_window(model, folder, chunk):
    asked = prompts(519, 261, 136, 395, 300)
    got = run(folder, asked, eviction={"budget": 0.25, "strict": True}, max_num_batched_tokens=chunk)
    assert_same(got, model, asked, budget=0.25)
    assert got["steps"] > sum(map(len, asked)) // chunk


def test_shared_prefixes_are_served_from_the_cache(model, folder):
    (a, b) = prompts(1000, 400, seed=1)
    asked = [a, a, a[:600] + b, a[:992], a[:200], a + b, a[:650] + b]
    got = run(
        folder,
        asked,
        eviction={"budget": 0.25, "strict": True},
        enable_prefix_caching=True,
        max_num_batched_tokens=256,
        max_num_seqs=1,
    )
    assert_same(got, model, asked, budget=0.25)
    settings = BlockSettings.of(Settings.parse("dropkv", budget=0.25), BLOCK)
    for cached, ids in zip(got["cached"], asked, strict=True):
        assert cached <= settings.plan(len(ids)).dropped
    assert got["cached"][0] == 0
    assert got["cached"][1] == settings.plan(1000).dropped
    assert max(got["cached"]) > 700


def test_a_budget_of_everything_is_stock_vllm(folder):
    asked = prompts(*MIXED)
    stock = run(folder, asked)
    asked_for_all = run(folder, asked, eviction={"budget": 2048, "strict": True})
    assert stock["manager"] == "FullAttentionManager"
    assert asked_for_all["manager"] == "DropKVManager"
    assert (stock["tokens"], stock["logprobs"]) == (asked_for_all["tokens"], asked_for_all["logprobs"])
    assert asked_for_all["counters"]["blocks_freed"] == 0


def test_a_small_pool_runs_more_requests(folder):
    asked = prompts(*[900] * 16, seed=2)
    pool = {"num_gpu_blocks_override": 100, "max_num_seqs": 16, "max_num_batched_tokens": 1024, "tokens": 64}
    stock = run(folder, asked, **pool)
    evicting = run(folder, asked, eviction={"budget": 0.1, "strict": True}, **pool)
    assert stock["running"] <= 3
    assert evicting["running"] >= 12
    assert evicting["steps"] < stock["steps"] / 3
    assert evicting["left"] == stock["left"] == 0


def test_preempted_requests_say_the_same(model, folder):
    asked = prompts(300, 260, 290, 310, 280, seed=3)
    got = run(
        folder,
        asked,
        eviction={"budget": 0.25, "strict": True},
        tokens=200,
        num_gpu_blocks_override=34,
        max_model_len=600,
        max_num_batched_tokens=600,
    )
    assert got["preempted"] > 0
    assert_same(got, model, asked, budget=0.25, tokens=200)
    assert got["left"] == 0


def test_no_block_is_lost_in_random_traffic(folder):
    pick = random.Random(4)
    asked = prompts(*[pick.randrange(1, 400) for _ in range(500)], seed=5)
    got = run(
        folder,
        asked,
        eviction={"budget": 0.2, "strict": True},
        aborts=120,
        tokens=16,
        num_gpu_blocks_override=60,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=160,
        enable_prefix_caching=True,
    )
    assert got["aborts_left"] == [0]
    assert 300 < got["finished"][0] <= 500 - 1
    assert got["left"] == 0
    assert got["held"] == 0


@pytest.mark.parametrize(
    ("parallel", "options"),
    [
        ("tensor", {"tensor_parallel_size": 2}),
        # eager pipelines fail in stock vLLM on a CPU; compiled ones work
        (
            "pipeline",
            {
                "pipeline_parallel_size": 2,
                "enforce_eager": False,
                "compilation_config": {"mode": 2, "backend": "eager"},
            },
        ),
    ],
)
def test_over_two_processes(model, folder, parallel, options):
    asked = prompts(1000, 517, 64, 33, 700)
    got = run(folder, asked, eviction={"budget": 0.25, "strict": True}, **options)
    assert_same(got, model, asked, budget=0.25)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "snapkv", "window": 16, "kernel_size": 7},
        {"method": "dropkv", "reduce": "max", "sinks": 4},
        {"method": "streaming"},
        {"method": "dropkv", "allocation": "shared"},
    ],
)
def test_other_methods_and_options(model, folder, options):
    asked = prompts(500, 300)
    got = run(folder, asked, eviction={"budget": 0.2, "strict": True, **options})
    assert_same(got, model, asked, budget=0.2, **options)


def test_the_environment_asks_too(model, folder):
    asked = prompts(500)
    got = run(folder, asked, environment={"DECANTKV_CONFIG": '{"budget": 100, "window": 16}'})
    assert_same(got, model, asked, budget=100, window=16)


@pytest.mark.parametrize(
    ("eviction", "sentence"),
    [
        ({"budget": 0.001}, "budget: expected at least one block of 32 tokens, got 2 of the longest prompt's 2048"),
        ({"budget": 0.1, "windw": 8}, "windw: expected one of dropkv's options"),
        ({"budget": 0.1, "allocation": "ada"}, "allocation: expected 'uniform' or 'shared' inside vLLM"),
        ({"method": "h2o", "budget": 0.1}, "method: expected one that looks at the window's queries"),
    ],
)
def test_what_cannot_be_done_is_said_and_vllm_serves_on(model, folder, eviction, sentence):
    asked = prompts(200)
    got = run(folder, asked, eviction=eviction)
    assert got["log"].count("decantkv stays off") == 1
    assert sentence in got["log"]
    assert got["manager"] == "FullAttentionManager"
    assert got["tokens"][0] == full(model, asked[0])


def test_another_plug_in_keeps_the_backend_it_took(model, folder, tmp_path):
    (tmp_path / "other.py").write_text(
        "from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend\n"
        "class Backend(CPUAttentionBackend):\n    pass\n"
        "def register():\n"
        "    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend\n"
        "    register_backend(AttentionBackendEnum.CPU_ATTN, 'other.Backend')\n"
    )
    info = tmp_path / "other-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nother = other:register\n")
    asked = prompts(200)
    got = run(folder, asked, eviction={"budget": 0.25}, environment={"PYTHONPATH": str(tmp_path)})
    assert "attention backend CPU_ATTN: expected vLLM's own, got other.Backend of another plug-in" in got["log"]
    assert got["manager"] == "FullAttentionManager"
    assert got["tokens"][0] == full(model, asked[0])


def test_strict_stops_instead(folder):
    with pytest.raises(RuntimeError, match="budget: expected a fraction"):
        run(folder, prompts(50), eviction={"budget": 1.5, "strict": True})
