"""Our metadata builders over vLLM's own, without a kernel: what a graph would read, and where."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decantkv.engines.vllm.batch import Batch, told
from tests.engines.test_vllm_scheduler import BLOCK, SETTINGS, config  # noqa: F401  (a fixture)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; `make test-vllm` has it"
)

PLACES = {
    "DropKVTritonBackend": "decantkv.engines.vllm.backend_triton",
    "DropKVFlashBackend": "decantkv.engines.vllm.backend_flash",
    "DropKVCPUBackend": "decantkv.engines.vllm.backend_cpu",
}


@pytest.fixture(params=PLACES)
def backend(request):
    return getattr(importlib.import_module(PLACES[request.param]), request.param)


def builder(backend, config, eviction=SETTINGS):  # noqa: F811
    from vllm.config import set_current_vllm_config
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from decantkv.engines.vllm.spec import DropKVSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    spec = spec if eviction is None else DropKVSpec.of(spec, eviction)
    with set_current_vllm_config(config):
        return backend.get_builder_cls()(spec, [], config, torch.device("cpu"))


def metadata(scheduled, seq_lens):
    """Of rows whose tables count up from 100 times the row's number."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    starts = torch.tensor([0, *np.cumsum(scheduled)], dtype=torch.int32)
    rows, columns = len(scheduled), 2048 // BLOCK
    table = torch.arange(columns, dtype=torch.int32)[None] + 100 * torch.arange(1, rows + 1, dtype=torch.int32)[:, None]
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        seq_lens_cpu_upper_bound=lengths.clone(),
        num_reqs=rows,
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(scheduled),
        max_seq_len=max(seq_lens),
        block_table_tensor=table,
        slot_mapping=torch.arange(int(starts[-1])),
    )


def batch(*lengths):
    names = [f"r{i}" for i in range(len(lengths))]
    return Batch(names, np.array(lengths), set(names))


def test_decoding_rows_begin_behind_the_freed_blocks(backend, config):  # noqa: F811
    made, own = SETTINGS.plan(1000), builder(backend, config)
    common = metadata([1, 200, 1], [1010, 200, 60])
    with told(batch(1000, 500, 40)):
        got = own.build(0, common)
    kept = made.kept_blocks + 1
    assert got.block_table[0, :kept].tolist() == list(range(100 + made.first_block, 100 + made.first_block + kept))
    assert got.block_table[1, :7].tolist() == list(range(200, 207))
    assert got.seq_lens.tolist() == [1010 - made.dropped, 200, 60]
    assert got.max_seq_len == 1010 - made.dropped
    assert got.decantkv_step.queries == ()
    assert common.block_table_tensor[0, 0] == 100, "the runner's own table was written to"


def test_the_last_chunk_reads_all_and_is_evicted_after(backend, config):  # noqa: F811
    with told(batch(500)):
        got = builder(backend, config).build(0, metadata([200], [500]))
    assert got.seq_lens.tolist() == [500]
    ((run),) = got.decantkv_step.finishing
    assert (run.start, run.stop, run.place) == (192, 200, 0)


def test_graphs_read_from_one_place(backend, config):  # noqa: F811
    own = builder(backend, config)
    if not own.persistent:
        pytest.skip("no graphs on a CPU")
    with told(batch(7, 7)):  # left over from a step before
        captured = own.build_for_cudagraph_capture(metadata([1, 1], [1, 1]))
    assert captured.decantkv_step is None
    for lengths, seq_lens in (((1000, 40), [1010, 60]), ((1000, 1000), [1011, 1001])):
        with told(batch(*lengths)):
            replayed = own.build(0, metadata([1, 1], seq_lens))
        assert replayed.block_table.data_ptr() == captured.block_table.data_ptr()
        assert replayed.seq_lens.data_ptr() == captured.seq_lens.data_ptr()
    assert captured.seq_lens.tolist() == [1011 - SETTINGS.plan(1000).dropped, 1001 - SETTINGS.plan(1000).dropped]


def test_graphs_hold_steps_of_one_token_alone(backend, config):  # noqa: F811
    from vllm.v1.attention.backend import AttentionCGSupport

    own = builder(backend, config)
    support = type(own).get_cudagraph_support(config, own.kv_cache_spec)
    assert support in (AttentionCGSupport.NEVER, AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE)


def test_a_stock_specification_is_left_alone(backend, config):  # noqa: F811
    own = builder(backend, config, eviction=None)
    common = metadata([1], [1010])
    with told(batch(1000)):
        got = own.build(0, common)
    assert got.seq_lens.data_ptr() == common.seq_lens.data_ptr()
    assert not hasattr(got, "decantkv_step")


def test_prefixes_are_never_attended_to_in_common(backend, config):  # noqa: F811
    own = builder(backend, config)
    assert own.use_cascade_attention(512) is False
    assert own.supports_update_block_table is False


def test_an_evicting_worker_takes_the_backend_and_a_later_one_gives_it_back(config):  # noqa: F811
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from decantkv.engines.vllm.activation import activate

    def worker(options):
        told_to = SimpleNamespace(additional_config=options, device_config=SimpleNamespace(device_type="cpu"))
        made = SimpleNamespace(get_kv_cache_spec=lambda: "specs", init_device=lambda: "device")
        activate(made, told_to)
        return made

    stock = AttentionBackendEnum.CPU_ATTN.get_path()
    worker({"decantkv": {"budget": 0.1}})
    assert AttentionBackendEnum.CPU_ATTN.get_path() == "decantkv.engines.vllm.backend_cpu.DropKVCPUBackend"
    for options in ({}, {"decantkv": "refused"}):
        left_alone = worker(options)
        assert AttentionBackendEnum.CPU_ATTN.get_path() == stock
        assert left_alone.get_kv_cache_spec() == "specs"


@pytest.mark.parametrize("what", ["layer", "backend", "ALiBi", "shared"])
def test_what_only_a_worker_sees_stops_it(config, what):  # noqa: F811
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from decantkv.engines.common.asked import Asked
    from decantkv.engines.vllm.backend_cpu import DropKVCPUBackend
    from decantkv.engines.vllm.layers import evicting_specs

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    backend, impl = DropKVCPUBackend, SimpleNamespace(alibi_slopes=None, kv_sharing_target_layer_name=None)
    asked = Asked.parse({"budget": 0.1})

    def specs(spec, backend, impl):
        layer = SimpleNamespace(get_attn_backend=lambda: backend, impl=impl)
        held = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"a": layer}),
            device_config=SimpleNamespace(device_type="cpu"),
            model_config=SimpleNamespace(max_model_len=2048),
        )
        return evicting_specs({"a": spec}, asked, held)

    assert specs(spec, backend, impl)["a"].eviction == asked.in_blocks(BLOCK)
    if what == "layer":
        spec, sentence = replace(spec, sliding_window=128), "expected full attention"
    elif what == "backend":
        backend, sentence = SimpleNamespace(get_name=lambda: "OTHER"), "choose --attention-backend CPU_ATTN"
    elif what == "ALiBi":
        impl, sentence = SimpleNamespace(alibi_slopes=[1.0], kv_sharing_target_layer_name=None), "got ALiBi"
    else:
        impl, sentence = SimpleNamespace(alibi_slopes=None, kv_sharing_target_layer_name="b"), "a cache of its own"
    with pytest.raises(ValueError, match=sentence):
        specs(spec, backend, impl)
