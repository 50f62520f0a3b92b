"""The block plan: whole numbers with guarantees, and the same tokens from the transformers path."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decantkv.cache.evicting_cache import EvictingCache, new_recorder
from decantkv.engines.blocks import BlockSettings
from decantkv.engines.common.plan import plan
from decantkv.settings import Settings
from tests.support import tiny

SIZES = st.sampled_from([1, 2, 8, 16, 32, 128])
SHARES = st.sampled_from([0.001, 0.05, 0.1, 0.25, 0.5, 0.9, 1.0])


def settings(budget=0.1, block_size=16, **options):
    return BlockSettings.of(Settings.parse("dropkv", budget=budget, **options), block_size)


@given(
    length=st.integers(1, 5000), block_size=SIZES, budget=SHARES, window=st.integers(1, 64), sinks=st.integers(0, 40)
)
def test_the_plan_holds_the_budget_and_wastes_less_than_a_block(length, block_size, budget, window, sinks):
    plain = Settings.parse("dropkv", budget=budget, window=window, sinks=sinks)
    made = plan(length, BlockSettings.of(plain, block_size))
    (wanted,) = plain.n_keep([length])
    assert 0 <= made.kept_blocks <= made.tail_block == length // block_size
    assert made.kept + made.dropped == length
    assert made.kept >= min(window, length)
    # what must stay beside the budget: first tokens, and the tail of a block that is not moved
    tail, first = length % block_size, min(sinks, max(0, length - max(window, length % block_size)))
    least = max(wanted, max(tail, min(window, length)) + first)
    assert wanted <= made.kept < least + block_size
    assert made.first_block * block_size <= length - min(window, length), "a window's query was served from a cache"


@given(length=st.integers(1, 5000), block_size=SIZES, tokens=st.integers(8, 6000))
def test_a_number_of_tokens_is_kept_whole(length, block_size, tokens):
    made = plan(length, settings(tokens, block_size))
    assert made.kept >= min(tokens, length)
    assert made.evicts == (made.kept < length)
    if tokens >= length:
        assert made.dropped == 0


@given(length=st.integers(1, 3000), budget=SHARES)
def test_blocks_of_one_token_are_plain_settings(length, budget):
    plain = Settings.parse("dropkv", budget=budget)
    assert plan(length, BlockSettings.of(plain, 1)).kept == plain.n_keep([length])[0]


@given(length=st.integers(33, 3000), block_size=SIZES, budget=SHARES)
def test_a_longer_prompt_never_keeps_fewer_blocks_from_its_start_on(length, block_size, budget):
    """The scheduler frees by the plan of the whole prompt alone: one more token must not un-free a block."""
    one, more = (plan(n, settings(budget, block_size)) for n in (length, length + block_size))
    assert more.first_block >= one.first_block - 1
    assert more.kept >= one.kept - block_size


def test_selection_keeps_the_tail_and_nothing_but_the_plan():
    made = settings(0.2, 16)
    scores = torch.rand(1, 2, 100, generator=torch.Generator().manual_seed(1))
    x = torch.randn(1, 2, 100, 8)
    from decantkv.scoring.window import make_window

    kept = made.choose(scores, win=make_window(x[:, :, -8:], x, x))
    p = plan(100, made)
    assert kept.indices.shape[2] == p.kept == 20
    assert (kept.indices[..., p.chosen :] == torch.arange(96, 100)).all()
    assert (kept.indices[..., : p.chosen] < 96).all()


@pytest.mark.parametrize("length", [7, 64, 100, 130])
def test_the_transformers_path_keeps_the_plan(length):
    model, made = tiny.llama(), settings(0.1, 16)
    cache = EvictingCache.of(model, made, new_recorder(made))
    model.generate(tiny.prompt(length), past_key_values=cache, max_new_tokens=2, **tiny.GREEDY)
    assert [layer["kept"] for layer in cache.report().layers] == [[[plan(length, made).kept] * 2]] * 3


def test_bad_block_sizes_are_refused():
    with pytest.raises(ValueError, match="block_size: expected a whole number of at least 1"):
        settings(0.1, 0)
    with pytest.raises(TypeError, match="block_size"):
        settings(0.1, 1.5)
