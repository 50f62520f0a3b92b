"""Buffers with slack: written in place, grown in steps, honest about their bytes."""

from __future__ import annotations

import copy

import pytest
import torch

import decantkv
from decantkv.cache import layer
from decantkv.cache.evicting_cache import cache_argument
from decantkv.cache.stores import ragged
from decantkv.cache.stores.dense import ROOM, DenseStore
from tests.support import tiny
from tests.support.judge import evicted_and_judged, logits_with


def tokens(number, batch=2):
    return torch.randn(batch, 3, number, 4), torch.randn(batch, 3, number, 6)


def test_a_store_is_the_concatenation_of_what_it_was_given():
    torch.manual_seed(0)
    parts = [tokens(n) for n in (5, 1, 1, ROOM - 2, 1, 3 * ROOM, 1)]
    store = DenseStore(*parts[0])
    for i, part in enumerate(parts[1:], start=2):
        keys, values = store.update(*part)
        assert torch.equal(keys, torch.cat([k for k, _ in parts[:i]], 2))
        assert torch.equal(values, torch.cat([v for _, v in parts[:i]], 2))
    store.crop(7)
    assert torch.equal(store.keys, torch.cat([k for k, _ in parts], 2)[:, :, :-7])
    whole = store.keys.clone()
    store.select_rows(torch.tensor([1, 0]))
    assert torch.equal(store.keys, whole.flip(0))
    assert store.capacity == store.length


def test_slack_is_taken_at_the_first_new_token_and_then_not_again():
    store = DenseStore(*tokens(5))
    assert store.capacity == 5
    store.update(*tokens(1))
    assert store.capacity == 5 + ROOM
    place = [x.data_ptr() for x in store.buffers()]
    for _ in range(ROOM - 1):
        store.update(*tokens(1))
    assert [x.data_ptr() for x in store.buffers()] == place
    store.update(*tokens(1))
    assert store.capacity == 5 + 2 * ROOM
    announced = DenseStore(*tokens(5))
    announced.update(*tokens(1), reserve=299)
    assert announced.capacity == 305


@pytest.fixture
def growths(monkeypatch):
    """What stores grew to, as they do: tokens they held, and slots."""
    found, make_room, grow = [], DenseStore.make_room, ragged.RaggedStore._grow

    def watched(store, new, reserve):
        before = store.capacity
        make_room(store, new, reserve)
        if store.capacity != before:
            found.append((store.length, store.capacity))

    def widened(lanes, room):
        grow(lanes, room)
        found.append((int(lanes.lens[0]), int(lanes.lens[0]) + room))

    monkeypatch.setattr(DenseStore, "make_room", watched)
    monkeypatch.setattr(ragged.RaggedStore, "_grow", widened)
    return found


@pytest.mark.parametrize("decode", ["model", "own"])
def test_an_answer_longer_than_a_growth_goes_on_in_long_steps(monkeypatch, growths, decode):
    monkeypatch.setattr(layer, "RESERVE", 200)
    model = tiny.llama()
    with decantkv.attach(model, budget=0.2, decode=decode):
        model.generate(tiny.prompt(60), max_new_tokens=600, min_new_tokens=600)
    assert growths[::3] == growths[1::3] == growths[2::3]  # three layers
    assert growths[::3] == [(12, 213), (213, 414), (414, 612)]  # the last token is never stored, one slot stays free


@pytest.mark.parametrize("every", [None, 16])
def test_a_prompt_in_chunks_moves_to_buffers_that_double(growths, every):
    model = tiny.llama()
    with decantkv.attach(model, budget=0.1, prefill_chunk=150, every=every):
        model.generate(tiny.prompt(1500), max_new_tokens=1)
    assert growths[::3] == growths[1::3] == growths[2::3]
    assert growths[::3] == [(150, 300), (300, 600), (600, 1200), (1200, 1501)]  # the answer is announced


def test_bytes_count_the_slack_and_decoding_concatenates_nothing(monkeypatch):
    model = tiny.llama()
    cache = decantkv.EvictingCache(model, budget=0.1)
    logits_with(model, cache, {"input_ids": tiny.prompt(150)}, [])
    per_token = 3 * 2 * 2 * 8 * 4  # layers, K and V, heads, head_dim, fp32
    assert cache.nbytes() == 15 * per_token
    name, step = cache_argument(model), torch.tensor([[7]])
    with torch.no_grad():
        model(step, **{name: cache})
        assert cache.nbytes() == (15 + ROOM) * per_token
        places = [x.data_ptr() for layer in cache.layers for x in layer.tensors()]
        joined, cat = [], torch.cat

        def watched(parts, *args, **kwargs):
            joined.append(parts[0].shape)
            return cat(parts, *args, **kwargs)

        monkeypatch.setattr(torch, "cat", watched)
        model(step, **{name: cache})
    assert [x.data_ptr() for layer in cache.layers for x in layer.tensors()] == places
    assert not [shape for shape in joined if len(shape) == 4 and shape[2] > 1], "no cache is copied"


def test_longer_than_the_slack_still_equals_the_judge():
    steps = [torch.full((1, 60), 7), *[torch.tensor([[3 + i]]) for i in range(5)], torch.full((1, 90), 9)]
    evicted, judged, cache = evicted_and_judged(tiny.llama(), {"input_ids": tiny.prompt(150)}, steps, budget=0.1)
    torch.testing.assert_close(evicted, judged, rtol=0, atol=1e-5)
    assert cache.layers[0].stored == 15 + 155


@pytest.mark.parametrize("length", [1, 2, 150])
def test_crop_copy_and_go_on(length):
    model = tiny.llama()
    cache, name = decantkv.EvictingCache(model, budget=0.2), cache_argument(model)
    logits_with(model, cache, {"input_ids": tiny.prompt(length)}, [])

    def step(where, token):
        with torch.no_grad():
            return model(torch.tensor([[token]]), **{name: where}).logits

    fork = copy.deepcopy(cache)
    first, second = step(cache, 5), step(cache, 6)
    step(fork, 50)
    fork.crop(-1)
    assert torch.equal(step(fork, 5), first), "what was cropped is overwritten"
    assert torch.equal(step(fork, 6), second)
