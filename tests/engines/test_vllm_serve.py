"""`vllm serve` and its HTTP API: two nodes, counters, and a question that is answered from a tenth of the cache."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.engines.serving import serve
from tests.engines.test_vllm_engine import folder, full, model, prompts, reference  # noqa: F401  (fixtures)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; `make test-vllm` has it"
)

BUDGET = 0.25


def evicting(**options):
    return ("--additional-config", json.dumps({"decantkv": {"strict": True, **options}}))


def ids_of(text):
    return [int(word.removeprefix("w")) for word in text.split()]


def test_two_nodes_serve_over_http(model, folder, tmp_path):  # noqa: F811
    options = (*evicting(budget=BUDGET), "--tensor-parallel-size", "2")
    with serve(folder, tmp_path, *options, nodes=2) as server:
        for ids in prompts(900, 70):
            answer = server.ask(
                "/v1/completions", prompt=ids, max_tokens=12, temperature=0, ignore_eos=True, return_token_ids=True
            )
            said = answer["choices"][0]["token_ids"]
            assert said == reference(model, ids, budget=BUDGET)[0]
            assert len(ids) < 100 or said != full(model, ids)


def test_counters_and_streams(model, folder, tmp_path):  # noqa: F811
    (ids,) = prompts(500)
    with serve(folder, tmp_path, *evicting(budget=BUDGET)) as server:
        assert set(server.counters().values()) == {0.0}
        answers = [
            server.ask("/v1/completions", prompt=ids, max_tokens=n, temperature=0, ignore_eos=True) for n in (12, 6)
        ]
        counted = server.counters()
    want = " ".join(f"w{i}" for i in reference(model, ids, budget=BUDGET)[0])
    assert ids_of(answers[0]["choices"][0]["text"]) == ids_of(want)
    assert ids_of(answers[1]["choices"][0]["text"]) == ids_of(want)[:6]
    # 500 tokens in blocks of 32: 4 blocks and a tail of 20 are kept, 11 blocks are freed, twice
    assert counted["prompts_evicted_total"] == 2
    assert counted["tokens_kept_total"] == 2 * (4 * 32 + 20)
    assert counted["tokens_dropped_total"] == 2 * 11 * 32
    assert counted["blocks_freed_total"] == 2 * 11
    assert counted["scoring_seconds_total"] > 0


def test_without_being_asked_nothing_is_touched(model, folder, tmp_path):  # noqa: F811
    (ids,) = prompts(300)
    with serve(folder, tmp_path) as server:
        answer = server.ask(
            "/v1/completions", prompt=ids, max_tokens=8, temperature=0, ignore_eos=True, return_token_ids=True
        )
        assert server.counters() == {}
        assert "decantkv" not in server.log()
    assert answer["choices"][0]["token_ids"] == full(model, ids, 8)


@pytest.mark.model
def test_a_needle_is_found_in_a_tenth_of_the_cache(model_path, tmp_path):
    """The example's own question, asked of SmolLM2 as the example asks it."""
    from examples.serve_with_vllm import NUMBER, ask

    from decantkv.hf.loading import convert_gguf

    path = Path(model_path)
    weights = convert_gguf(path) if path.is_file() else path
    with serve(weights, tmp_path, *evicting(budget=0.1)) as server:
        answer = ask(server.address)
        counted = server.counters()
    assert NUMBER in answer
    assert counted["tokens_dropped_total"] > 5 * counted["tokens_kept_total"]
