"""The judge of evictions, on a CPU engine: it passes a right one and names each kind of mistake."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch

from decantkv.engines.blocks import BlockSettings
from decantkv.settings import Settings
from tests.engines.engine_run import run
from tests.engines.judge import Mistake, judge
from tests.engines.test_vllm_engine import BLOCK, CLOSE, folder, model, prompts  # noqa: F401  (fixtures)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed here; `make test-vllm` has it"
)

BUDGET = 0.25
SETTINGS = BlockSettings.of(Settings.parse("dropkv", budget=BUDGET), BLOCK)
ASKED = prompts(517, 64, 700, 33)


def evicting(folder, **options):  # noqa: F811
    return run(folder, ASKED, eviction={"budget": BUDGET, "strict": True, **options}, record=True)


@pytest.fixture(scope="module")
def got(folder):  # noqa: F811
    return evicting(folder)


def test_a_right_eviction_passes_and_no_mistake_would(model, got):  # noqa: F811
    for answer in judge(model, SETTINGS, ASKED, got, "float32"):
        assert float(answer.differences.max()) < CLOSE
        assert all(float(control.max()) > 100 * CLOSE for control in answer.controls.values()), answer.controls
    assert len(judge(model, SETTINGS, ASKED, got, "float32")[0].controls) == 4


@pytest.mark.parametrize("options", [{"method": "snapkv", "window": 8}, {"method": "streaming", "window": 8}])
def test_tokens_of_another_method_are_a_mistake(model, folder, options):  # noqa: F811
    with pytest.raises(Mistake, match=r"dropped tokens score up to|lies inf"):
        judge(model, SETTINGS, ASKED, evicting(folder, **options), "float32")


def test_no_eviction_is_a_mistake(model, folder):  # noqa: F811
    with pytest.raises(Mistake, match="was not evicted"):
        judge(model, SETTINGS, ASKED, run(folder, ASKED, record=True), "float32")


def one_token_off(note):
    note["q"] = note["q"].roll(1, 0)


def another_token(note):
    """The head that kept token j keeps the one after the best dropped: the last slot's is replaced by the first."""
    start = note["first_block"] * note["block_size"]
    for name in ("k", "v"):
        note[f"{name}_after"][:, start] = note[name][:, note["tail_block"] * note["block_size"] - 9]


def heads_crossed(note):
    start, stop = (note[name] * note["block_size"] for name in ("first_block", "tail_block"))
    for name in ("k_after", "v_after"):
        note[name][:, start:stop] = note[name][:, start:stop].flip(0)


def values_of_others(note):
    start, stop = (note[name] * note["block_size"] for name in ("first_block", "tail_block"))
    note["v_after"][:, start:stop] = note["v_after"][:, start:stop].roll(1, 1)


def a_block_too_far(note):
    note["first_block"] += 1


def partial_block_overwritten(note):
    note["k_after"][:, -1] = note["k_after"][:, 0]


def another_request_overwritten(note):
    note["changed"] = 1


@pytest.mark.parametrize(
    ("mistake", "sentence"),
    [
        (one_token_off, "q lies"),
        (another_token, "not ascending"),
        (heads_crossed, "slots hold no token"),
        (values_of_others, "slots hold no token"),
        (a_block_too_far, "expected the plan"),
        (partial_block_overwritten, "the partial block changed"),
        (another_request_overwritten, "slots outside"),
    ],
)
def test_each_mistake_is_named(model, got, mistake, sentence):  # noqa: F811
    spoilt = {**got, "evictions": copy.deepcopy(got["evictions"])}
    note = next(note for note in spoilt["evictions"] if note["layer"] == 1 and note["prompt_len"] == 517)
    mistake(note)
    with pytest.raises(Mistake, match=sentence):
        judge(model, SETTINGS, ASKED, spoilt, "float32")


def test_one_wrong_token_of_a_head_is_a_mistake(model, got):  # noqa: F811
    """The least of the tokens that can be dropped in place of the best one kept."""
    spoilt = {**got, "evictions": copy.deepcopy(got["evictions"])}
    note = next(note for note in spoilt["evictions"] if note["layer"] == 2 and note["prompt_len"] == 700)
    start, stop = (note[name] * note["block_size"] for name in ("first_block", "tail_block"))
    kept = (note["k_after"][0, start:stop, None] == note["k"][0]).all(-1).int().argmax(-1)
    gap = int((kept.diff() > 1).nonzero()[0])  # the token after this one was dropped
    for name in ("k", "v"):
        note[f"{name}_after"][0, start + gap] = note[name][0, kept[gap] + 1]
    assert int(torch.isin(torch.arange(700), kept).sum()) == stop - start
    with pytest.raises(Mistake, match="dropped tokens score"):
        judge(model, SETTINGS, ASKED, spoilt, "float32")
