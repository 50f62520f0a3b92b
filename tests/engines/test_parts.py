"""The plug-in's parts that need no vLLM: options, refusals, rows of a step, windows across chunks, shifted tables."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decantkv.engines.blocks import BlockSettings
from decantkv.engines.common import asked
from decantkv.engines.common.plan import Plans, plan
from decantkv.engines.common.steps import end_of_chunk, read_step
from decantkv.engines.common.tables import ShiftedTables
from decantkv.engines.common.windows import Windows
from decantkv.engines.vllm import compat, refusals
from decantkv.engines.vllm.batch import Batch, current, told, watch
from decantkv.engines.vllm.counters import Counters
from decantkv.settings import Settings

BLOCKS = BlockSettings.of(Settings.parse("dropkv", budget=0.25), 16)


def batch(*rows, alive=()):
    """Rows of (request, prompt_len)."""
    names = [name for name, _ in rows]
    return Batch(names, np.array([n for _, n in rows]), {*names, *alive})


def step(rows, scheduled, seq_lens, **options):
    starts = np.concatenate([[0], np.cumsum(scheduled)])
    return read_step(batch(*rows, **options), Plans(BLOCKS), starts, np.array(seq_lens))


def test_a_step_sorts_its_rows():
    made = plan(200, BLOCKS)
    got = step(
        [("decodes", 200), ("finishes", 200), ("begins", 200), ("short", 10)], [1, 100, 50, 10], [230, 200, 50, 10]
    )
    assert got.first_blocks.tolist() == [made.first_block, 0, 0, 0]
    (run,) = got.queries
    assert (run.request_id, run.row, run.place, run.last) == ("finishes", 1, 0, True)
    assert (run.start, run.stop) == (93, 101)  # the last 8 of the tokens 1 to 100
    assert got.finishing == (run,)
    assert got.shifts


def test_a_window_over_two_steps():
    first = step([("a", 200)], [150], [195])
    last = step([("a", 200)], [5], [200])
    assert [(q.place, q.start, q.stop, q.last) for q in first.queries] == [(0, 147, 150, False)]
    assert [(q.place, q.start, q.stop, q.last) for q in last.queries] == [(3, 0, 5, True)]
    query = torch.arange(150.0)[:, None, None].expand(-1, 2, 4)
    windows = Windows(8)
    assert windows.take(first, query) == []
    ((run, whole),) = windows.take(last, query + 1000)
    assert whole[:, 0, 0].tolist() == [147, 148, 149, 1000, 1001, 1002, 1003, 1004]
    assert run.last
    assert not windows._held


def test_an_aborted_request_leaves_no_window():
    windows = Windows(8)
    windows.take(step([("a", 200)], [195], [195]), torch.zeros(195, 2, 4))
    assert set(windows._held) == {"a"}
    windows.take(step([("b", 200)], [195], [195]), torch.zeros(195, 2, 4))
    assert set(windows._held) == {"b"}


def test_rows_without_tokens_are_pads():
    assert not step([("a", 200)], [0], [0]).queries
    padded = read_step(batch(("a", 200)), Plans(BLOCKS), np.array([0, 1, 1, 1]), np.array([230, 0, 0]))
    assert padded.first_blocks.tolist() == [plan(200, BLOCKS).first_block, 0, 0]


def test_a_chunk_past_the_prompt_is_an_error_not_an_answer():
    with pytest.raises(RuntimeError, match=r"request a: expected a step that ends with the prompt's 200 tokens"):
        step([("a", 200)], [60], [220])


@given(
    prompt=st.integers(1, 400),
    answered=st.integers(0, 50),
    budgets=st.lists(st.integers(4, 120), min_size=1, max_size=400),
    graphs=st.booleans(),
)
def test_chunks_end_with_the_prompt_and_always_come_to_an_end(prompt, answered, budgets, graphs):
    made, computed, chunks = plan(prompt, BLOCKS), 0, []
    for i in range(400):
        if computed == prompt + answered:
            break
        wanted = min(budgets[i % len(budgets)], prompt + answered - computed)
        allowed = end_of_chunk(computed, wanted, made, window=8, graphs=graphs)
        assert 0 <= allowed <= wanted
        chunks.append((computed, allowed))
        computed += allowed
    assert computed == prompt + answered
    if not made.evicts:
        return
    assert not [c for c in chunks if c[0] < prompt < sum(c)]
    if graphs:
        assert not [(at, n) for at, n in chunks if n == 1 and prompt - 8 <= at < prompt and made.chosen]


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_lone_token_of_the_window_waits_for_company(left):
    made = plan(200, BLOCKS)
    assert end_of_chunk(195, left, made, window=8, graphs=True) == (0 if left == 1 else left)
    assert end_of_chunk(200 - left - 1, left, made, window=8, graphs=True) in (0, left - 1)
    assert end_of_chunk(199, 1, made, window=8, graphs=False) == 1


def test_tables_shift_by_row_in_place():
    tables = ShiftedTables(4, 6, 16, torch.device("cpu"))
    table = torch.arange(12, dtype=torch.int32).view(2, 6)
    out, lengths = tables.write(table, torch.tensor([90, 40], dtype=torch.int32), torch.tensor([2, 0]))
    assert out[0, :4].tolist() == [2, 3, 4, 5]
    assert out[1].tolist() == table[1].tolist()
    assert lengths.tolist() == [90 - 32, 40]
    again, _ = tables.write(table[:1], torch.tensor([91], dtype=torch.int32), torch.tensor([2]))
    assert again.data_ptr() == out.data_ptr(), "a graph would read an old address"
    assert table[0, 0] == 0


def test_a_batch_is_told_to_its_own_thread_alone():
    assert current() is None
    with told(batch(("a", 3))):
        assert current().request_ids == ["a"]
        with told(None):
            assert current() is None
    assert current() is None


def seen_by(build):
    """A function that notes the batch it runs under, and the notes."""
    notes = []

    def noting(*args, **kwargs):
        notes.append(current())
        return build

    return noting, notes


def test_the_first_model_runner_tells_real_steps_alone():
    noting, notes = seen_by("metadata")
    rows = SimpleNamespace(
        num_reqs=2, req_ids=["a", "b", "gone"], num_prompt_tokens=np.array([9, 8, 7], dtype=np.int32)
    )
    runner = SimpleNamespace(input_batch=rows, requests={"a": 1, "b": 1}, _build_attention_metadata=noting)
    watch(runner)
    assert runner._build_attention_metadata(num_tokens=3, num_scheduled_tokens={"a": 1, "b": 2}) == "metadata"
    assert runner._build_attention_metadata(num_tokens=3) == "metadata"
    assert (notes[0].request_ids, notes[0].prompt_lens.tolist()) == (["a", "b"], [9, 8])
    assert notes[1] is None
    assert current() is None


def test_the_second_model_runner_tells_before_another_object_builds():
    states = SimpleNamespace(
        prompt_len=SimpleNamespace(np=np.array([5, 6, 7], dtype=np.int32)), req_id_to_index={"a": 2}
    )
    runner = SimpleNamespace(
        req_states=states, prepare_attn=lambda batch: "tables", prepare_dummy_attn=lambda batch: "none"
    )
    watch(runner)
    with told(None):
        step = SimpleNamespace(req_ids=["a", "b"], idx_mapping_np=np.array([2, 0]))
        assert runner.prepare_attn(step) == "tables"
        assert (current().request_ids, current().prompt_lens.tolist()) == (["a", "b"], [7, 5])
        assert runner.prepare_dummy_attn(step) == "none"
        assert current() is None


def test_counters_are_taken_once():
    counters = Counters()
    assert counters.take() is None
    counters.add(tokens_kept=5, scoring_seconds=0.5)
    counters.add(tokens_kept=2)
    assert counters.take() == {**dict.fromkeys(counters.__dict__, 0), "tokens_kept": 7, "scoring_seconds": 0.5}
    assert counters.take() is None


def test_options_come_from_vllm_or_the_environment(monkeypatch):
    monkeypatch.delenv("DECANTKV_CONFIG", raising=False)
    assert asked.read({}) is None
    monkeypatch.setenv("DECANTKV_CONFIG", '{"budget": 0.5}')
    assert asked.read({}) == {"budget": 0.5}
    assert asked.read({"decantkv": {"budget": 0.1}}) == {"budget": 0.1}
    assert asked.read({"decantkv": asked.REFUSED}) is None
    monkeypatch.setenv("DECANTKV_CONFIG", "budget=0.5")
    with pytest.raises(ValueError, match="DECANTKV_CONFIG: expected JSON"):
        asked.read({})


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (0.1, "decantkv: expected options such as"),
        ({}, "budget: expected a fraction"),
        ({"budget": 2.5}, "budget: expected a fraction"),
        ({"budget": 4}, "budget: expected at least 8 tokens, which window 8 and sinks 0 always keep, got 4"),
        ({"budget": 0.1, "speed": 3}, "speed: expected one of dropkv's options"),
        ({"budget": 0.1, "method": "dropkw"}, "did you mean 'dropkv'"),
        ({"budget": 0.1, "protect": [[0, 3]]}, "protect: expected none inside vLLM"),
        ({"budget": 0.1, "strict": 1}, "strict: expected true or false"),
    ],
)
def test_bad_options_are_named(raw, message):
    with pytest.raises((TypeError, ValueError), match=message):
        asked.Asked.parse(raw)


def config(**changes):
    """As much of a `VllmConfig` as is asked about, for a model that can be evicted."""
    text = SimpleNamespace(layer_types=None)
    parts = {
        "use_mla": False,
        "runner_type": "generate",
        "is_encoder_decoder": False,
        "hf_text_config": text,
        "window": None,
        "dtype": torch.float32,
        "max_model_len": 2048,
        "cache_dtype": "auto",
        "block_size": 16,
        "speculative_config": None,
        "kv_transfer_config": None,
        "tensor_parallel_size": 1,
        "max_num_batched_tokens": 2048,
        "device_type": "cuda",
        **changes,
    }
    whole = SimpleNamespace(**parts)
    whole.get_sliding_window = lambda: parts["window"]
    return SimpleNamespace(
        model_config=whole,
        parallel_config=whole,
        cache_config=whole,
        scheduler_config=whole,
        device_config=whole,
        speculative_config=parts["speculative_config"],
        kv_transfer_config=parts["kv_transfer_config"],
    )


@pytest.fixture
def known(monkeypatch):
    monkeypatch.setattr(compat, "missing", lambda version: [])


def test_a_plain_model_is_served(known):
    refusals.check(config(), asked.Asked.parse({"budget": 0.1}), "0.32.0+cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_mla": True}, r"\(MLA\)"),
        ({"hf_text_config": SimpleNamespace(layer_types=["sliding_attention"] * 2)}, "got sliding_attention"),
        ({"window": 4096}, "full attention in every layer"),
        ({"hf_text_config": SimpleNamespace(attention_chunk_size=8192)}, "full attention in every layer"),
        ({"cache_dtype": "fp8_e4m3"}, "not quantised, got 'fp8_e4m3'"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size: expected 1"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size: expected 1"),
        ({"speculative_config": object()}, "speculative_config: expected none"),
        ({"kv_transfer_config": object()}, "kv_transfer_config: expected none"),
        ({"runner_type": "pooling"}, "expected one that generates"),
        ({"is_encoder_decoder": True}, "expected a decoder alone"),
        ({"enable_dbo": True}, "expected whole batches"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens: expected at least 4"),
        ({"block_size": 256}, "at least one block of 256 tokens, got 204 of the longest prompt's 2048"),
    ],
)
def test_each_refusal_is_one_sentence(known, changes, message):
    with pytest.raises(ValueError, match=message) as error:
        refusals.check(config(**changes), asked.Asked.parse({"budget": 0.1}), "0.32.0")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"allocation": "ada"}, "'uniform' or 'shared' inside vLLM"),
        ({"allocation": "pyramid"}, "'uniform' or 'shared' inside vLLM"),
        ({"allocation": "shared"}, "expected 'uniform' where 2 processes hold the heads"),
        ({"method": "h2o"}, "h2o"),
        ({"weigh": "output"}, r"dropkv \(W_O\)"),
    ],
)
def test_settings_that_blocks_cannot_hold_are_refused(known, raw, message):
    with pytest.raises(ValueError, match=message):
        refusals.check(config(tensor_parallel_size=2), asked.Asked.parse({"budget": 0.1, **raw}), "0.32.0")


@pytest.mark.parametrize("version", ["0.25.1", "0.31.0", "0.34.0", "1.0", None])
def test_an_unknown_version_is_refused(version):
    with pytest.raises(ValueError, match=r"vllm: expected version 0\.26, 0\.32, 0\.33, got"):
        refusals.check(config(), asked.Asked.parse({"budget": 0.1}), version)


def test_a_version_without_its_seams_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "missing", lambda version: ["vllm.v1:Gone"])
    with pytest.raises(ValueError, match=r"vllm: expected vllm\.v1:Gone in version 0\.33\.0"):
        refusals.check(config(), asked.Asked.parse({"budget": 0.1}), "0.33.0")


def test_nothing_imports_vllm_until_vllm_does():
    code = (
        "import sys, decantkv, decantkv.engines.vllm\n"
        "from decantkv.engines.vllm import activation, refusals\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('vllm', 'transformers', 'triton')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
