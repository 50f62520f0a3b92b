"""vLLM's bench on a CPU engine: what a pool that binds does to the numbers of its rows."""

from __future__ import annotations

import importlib.util

import pytest

from decantkv.lab.bench.cases import run
from decantkv.lab.bench.vllm import Load, cases

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; `make test-vllm` has it"
)

LOAD = Load("tiny", length=896, tokens=24, requests=6, together=2, pool=1280, block_size=32, graphs=False)
WHERE = {"device": "cpu", "geometry": "tiny"}


def test_a_pool_of_one_prompt(tmp_path):
    out = tmp_path / "rows.jsonl"
    made = list(run(cases(LOAD, [None, 0.1], repeats=2, lock=tmp_path / "lock"), WHERE, out))
    assert [new for _, new in made] == [True, True]
    stock, kept = (row["load"] for row, _ in made)
    assert stock["running"] == 1
    assert stock["decoding"]["steps"] == stock["decoding"]["tokens"] == 6 * 23  # a prompt's own step gives a token too
    assert stock["reading"]["prompt_tokens"] == kept["reading"]["prompt_tokens"] == 6 * 896
    assert kept["tokens"] == stock["tokens"] == 6 * 24
    assert kept["running"] >= 3  # 11 blocks are left beside a prompt of 28 that is being read
    assert kept["decoding"]["steps"] < stock["decoding"]["steps"]
    for row, _ in made:
        assert row["equal_batch"]["steps"] > 20
        assert len(row["first_token"]["seconds"]) == 2
    assert made[0][0]["counters"]["prompts_evicted"] == 0
    assert made[1][0]["counters"]["prompts_evicted"] >= 6
    again = list(run(cases(LOAD, [None, 0.1], repeats=2), WHERE, out))
    assert [(row["load"]["seconds"], new) for row, new in again] == [(row["load"]["seconds"], False) for row, _ in made]
    assert [new for _, new in run(cases(LOAD, [None], repeats=3), WHERE, out)] == [True]
