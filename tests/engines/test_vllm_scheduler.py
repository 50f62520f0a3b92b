"""vLLM's scheduler under our specification, without a model: what is read, freed, cached and read again.

It needs no kernels, so it also runs on the Python sources of versions that this machine cannot run.
"""

from __future__ import annotations

import importlib.util
import random

import pytest

from decantkv.engines.blocks import BlockSettings
from decantkv.settings import Settings
from tests.support import tiny

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; `make test-vllm` has it"
)

BLOCK = 32
SETTINGS = BlockSettings.of(Settings.parse("dropkv", budget=0.25), BLOCK)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    from vllm.engine.arg_utils import EngineArgs

    folder = tmp_path_factory.mktemp("config")
    tiny.llama(head_dim=32, hidden_size=128).config.save_pretrained(folder)
    return EngineArgs(
        str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=2048,
        block_size=BLOCK,
        max_num_seqs=4,
        max_num_batched_tokens=300,
        enable_prefix_caching=True,
        enforce_eager=True,
    ).create_engine_config()


class Run:
    """A scheduler whose model answers 7."""

    def __init__(self, config, kind, blocks=200, eviction=SETTINGS):
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from decantkv.engines.vllm.spec import DropKVSpec

        with set_current_vllm_config(config):
            stock = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
            spec = stock if eviction is None else DropKVSpec.merge([DropKVSpec.of(stock, eviction)] * 2)
            caches = KVCacheConfig(
                num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["a", "b"], spec)]
            )
            config.cache_config.num_gpu_blocks = blocks
            self.scheduler = kind(
                vllm_config=config,
                kv_cache_config=caches,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK,
                hash_block_size=BLOCK,
                log_stats=True,
            )
        hash_of = get_hash_fn_by_name("sha256")
        init_none_hash(hash_of)
        self.hasher = get_request_block_hasher(BLOCK, hash_of)
        self.free = self.pool.get_num_free_blocks()
        self.reads = {}  # request -> [(computed, scheduled)]

    @property
    def pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def used(self):
        return self.free - self.pool.get_num_free_blocks()

    def add(self, name, ids, tokens=8):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        sampling.update_from_generation_config({}, 0)
        request = Request(name, ids, sampling, None, block_hasher=self.hasher)
        self.scheduler.add_request(request)
        return request

    def schedule(self):
        out = self.scheduler.schedule()
        computed = {new.req_id: new.num_computed_tokens for new in out.scheduled_new_reqs}
        old = out.scheduled_cached_reqs
        computed |= dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        for name, number in out.num_scheduled_tokens.items():
            self.reads.setdefault(name, []).append((computed[name], number))
        return out

    def answer(self, out):
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(out.num_scheduled_tokens)
        sampled = []
        for name in names:
            request, (computed, number) = self.scheduler.requests[name], self.reads[name][-1]
            sampled.append([7] if computed + number >= request.num_prompt_tokens + request.num_output_tokens else [])
        result = ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled_token_ids=sampled)
        return self.scheduler.update_from_output(out, result)

    def step(self):
        return self.answer(self.schedule())

    def blocks(self, name):
        (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return manager.req_to_blocks[name]


def ids(number, seed=0):
    pick = random.Random(seed)
    return [pick.randrange(1, tiny.VOCABULARY) for _ in range(number)]


@pytest.fixture
def kind():
    from vllm.v1.core.sched.scheduler import Scheduler

    return Scheduler


def test_head_blocks_come_back_after_the_prompt(config, kind):
    run, made = Run(config, kind), SETTINGS.plan(1000)
    run.add("a", ids(1000))
    for _ in range(4):
        run.step()
    assert run.reads["a"] == [(0, 300), (300, 300), (600, 300), (900, 100)]
    assert run.used == 32
    run.step()
    assert run.used == 32 - made.first_block
    assert [block.is_null for block in run.blocks("a")] == [True] * made.first_block + [False] * (32 - made.first_block)
    while run.scheduler.has_unfinished_requests():
        run.step()
    assert run.used == 0


def test_a_second_reading_hits_up_to_the_compacted_blocks(config, kind):
    run, made = Run(config, kind), SETTINGS.plan(1000)
    run.add("a", ids(1000))
    while run.scheduler.has_unfinished_requests():
        run.step()
    run.add("b", ids(1000))
    run.add("c", ids(1000) + ids(500, seed=1))
    while run.scheduler.has_unfinished_requests():
        run.step()
    assert run.reads["b"][0][0] == made.dropped
    assert made.dropped - BLOCK <= run.reads["c"][0][0] <= made.dropped, "a compacted block was published"
    assert run.used == 0


def test_a_resumed_request_reads_its_answer_after_its_prompt(config, kind):
    run = Run(config, kind)
    request = run.add("a", ids(250), tokens=40)
    for _ in range(12):
        run.step()
    answered = request.num_output_tokens
    assert answered > 5
    run.scheduler.running.remove(request)
    run.scheduler._preempt_request(request, 0.0)
    assert run.used == 0
    run.reads.clear()
    run.step()
    run.step()
    hit, first = run.reads["a"][0]
    assert hit + first == 250, "the chunk crosses the end of the prompt"
    assert run.reads["a"][1] == (250, answered)
    assert request.num_output_tokens == answered + 1
    while run.scheduler.has_unfinished_requests():
        run.step()
    assert run.used == 0


def test_nothing_is_freed_while_the_step_that_compacts_is_in_flight(config):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    run, made = Run(config, AsyncScheduler), SETTINGS.plan(280)
    run.add("a", ids(280))
    first = run.schedule()  # the whole prompt
    second = run.schedule()  # its first token is not known yet
    assert run.reads["a"] == [(0, 280), (280, 1)]
    assert run.used == 9
    run.answer(first)
    third = run.schedule()
    assert run.used == 9 - made.first_block
    run.answer(second)
    run.answer(third)


def test_counters_reach_the_engines_statistics(config, kind):
    from decantkv.engines.vllm.counters import CARRIER, ENGINE

    ENGINE.take()
    run, made = Run(config, kind), SETTINGS.plan(280)
    run.add("a", ids(280))
    run.step()
    (outputs,) = run.step().values()
    assert outputs.scheduler_stats.kv_connector_stats == {
        CARRIER: {
            "prompts_evicted": 1,
            "tokens_kept": made.kept,
            "tokens_dropped": made.dropped,
            "blocks_freed": made.first_block,
            "scoring_seconds": 0.0,
        }
    }


def test_other_engines_are_scheduled_as_ever(config, kind):
    run = Run(config, kind, eviction=None)
    run.add("a", ids(1000))
    for _ in range(6):
        run.step()
    assert run.used == 32
    while run.scheduler.has_unfinished_requests():
        run.step()
    run.add("b", ids(1000))
    run.step()
    assert run.reads["b"][0][0] == 31 * BLOCK


def test_every_seam_is_where_the_table_says():
    from decantkv.engines.vllm import compat

    assert compat.missing(compat.installed()) == []
