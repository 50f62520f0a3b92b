"""The kernels on paged storage in Triton's interpreter: scores against float64, compaction against torch."""

from __future__ import annotations

import os

import pytest
import torch

from decantkv.engines.common import paged as twin
from tests.kernels.pages import LAYOUTS, check_compaction, check_scores, choose, own, paged
from tests.kernels.windows import QUANTITIES

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
]
SMALL = {"H": 1, "g": 2, "w": 4, "D": 16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [16, 32])
def test_ragged_requests_meet_the_contract(size, dtype):
    from decantkv.kernels.paged import score_paged

    made = paged(3, [70, 4, 33], size=size, dtype=dtype, sink=14, **SMALL)
    check_scores(score_paged, made, max_len=96)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_awkward_dims(layout):
    from decantkv.kernels.paged import score_paged

    made = paged(4, [41, 19], layout=layout, H=2, g=3, w=2, D=20, Dv=12, sink=9, softcap=4.0,
                 sink_logits=torch.linspace(-2, 4, 6), spare=0)  # fmt: skip
    check_scores(score_paged, made)


def test_rows_beyond_one_tile():
    from decantkv.kernels.paged import score_paged

    check_scores(score_paged, paged(5, [60, 35], H=1, g=3, w=13, D=16, sink=6, spare=0))


@pytest.mark.parametrize("name", QUANTITIES)
def test_every_quantity(name):
    from decantkv.kernels.paged import score_paged

    quantity, options = QUANTITIES[name]
    check_scores(score_paged, paged(6, [50, 9], sink=5, projection=12, spare=0, **SMALL), quantity, **options)


def test_the_twin_is_judged_too():
    for name in ("alignment", "chunks", "W_O"):
        quantity, options = QUANTITIES[name]
        options = {k: v for k, v in options.items() if k != "weigh"} | {"weigh": options.get("weigh", "value")}
        check_scores(twin.score_paged, paged(7, [50, 9], sink=5, projection=12, **SMALL), quantity, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("most", [16, 64])
@pytest.mark.parametrize("first", ["the last blocks", "the first", "between"])
def test_compaction_where_destinations_overlap_sources(first, most, layout):
    from decantkv.kernels.move import launch_compact

    made = paged(8, [150, 133], size=16, layout=layout, H=2, g=1, w=1, D=40, Dv=24)
    kept, tail = 64, 5
    index, _ = choose(made, kept, 9, tail=tail)
    to = {"the last blocks": [128 // 16 - 4, 128 // 16 - 4], "the first": [0, 0], "between": [2, 3]}[first]

    def compact(k, v, table, index, first, counts):
        launch_compact(k, v, table, index, first, counts, most=most)

    check_compaction(compact, twin.compact_paged, made, index, torch.tensor(to))


def test_compaction_of_unequal_budgets():
    from decantkv.kernels.paged import compact_paged

    made = paged(10, [90, 30, 17], size=16, H=2, g=1, w=1, D=16, dtype=torch.float32)
    index, counts = choose(made, 48, 11)
    first = torch.tensor([2, 0, 0], dtype=torch.int32)
    check_compaction(compact_paged, twin.compact_paged, made, index, first, counts)


def test_a_wrong_order_would_be_noticed():
    """The judge can say no: a copy that runs forwards reads what it has overwritten."""
    made = paged(12, [64], H=1, g=1, w=1, D=16)
    index = torch.arange(0, 48)[None, None]

    def forwards(k, v, table, index, first, counts):
        for i, n in enumerate(index[0, 0].tolist()):
            to = int(first) * 16 + i
            for cache in (k, v):
                cache[table[0, to // 16].long(), to % 16] = cache[table[0, n // 16].long(), n % 16]

    with pytest.raises(AssertionError):
        check_compaction(forwards, twin.compact_paged, made, index, torch.tensor([1]))


def test_ops_are_registered_and_compile_without_a_break():
    from decantkv.kernels.paged import compact_paged, score_paged

    made = paged(14, [37, 20], **SMALL)
    index, _ = choose(made, 16, 15)
    first = torch.tensor([1, 0])

    def evict(q, k, v, table, lengths):
        scores = score_paged(q, k, v, table, lengths, scale=0.25)
        compact_paged(k, v, table, index, first)
        return scores

    plain, traced = own(made), own(made)
    compiled = torch.compile(evict, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*traced[1:]), evict(*plain[1:]))
    for got, want in zip(traced[2:4], plain[2:4], strict=True):
        assert torch.equal(got.nan_to_num(123.0), want.nan_to_num(123.0))


def test_wrong_arguments_are_named():
    from decantkv.kernels.paged import compact_paged, score_paged

    made = paged(13, [20], **SMALL)
    q, k, v, table, lengths = made[1:]
    index, first = torch.zeros(1, 1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for message, call in {
        "q: expected": lambda: score_paged(q[..., :8], k, v, table, lengths, scale=1.0),
        "q: expected one of": lambda: score_paged(q.double(), k, v, table, lengths, scale=1.0),
        "k_cache, v_cache: expected": lambda: score_paged(q, k[0], v, table, lengths, scale=1.0),
        "v_cache: expected": lambda: compact_paged(k, v.float(), table, index, first),
        "block_table: expected": lambda: score_paged(q, k, v, table.long(), lengths, scale=1.0),
        "lengths: expected": lambda: score_paged(q, k, v, table, lengths.float(), scale=1.0),
        "max_len: expected": lambda: score_paged(q, k, v, table, lengths, scale=1.0, max_len=10**6),
        "quantity, row_pool": lambda: score_paged(q, k, v, table, lengths, scale=1.0, quantity="beauty"),
        "index: expected": lambda: compact_paged(k, v, table, index.int(), first),
        "first_block: expected": lambda: compact_paged(k, v, table, index, first.float()),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


def test_eviction_inside_vllm_by_the_kernels(monkeypatch):
    """The plug-in's own test, with the kernels instead of their twin."""
    from decantkv.engines.vllm import eviction
    from decantkv.kernels import paged as kernels
    from tests.engines import test_eviction

    monkeypatch.setattr(eviction, "kernels_for", lambda device: kernels)
    test_eviction.test_every_prompt_keeps_what_it_would_alone(
        "HND", {"reduce": "max"}, eviction.Heads(0.3, softcap=20.0)
    )
