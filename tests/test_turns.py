"""Turns after the prompt: pads of their own, what `crop` takes back, and joined rows; rows alone are right."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.selection.selector import FILLER, Kept
from tests.support import tiny
from tests.support.families import build
from tests.support.judge import logits_with

PROMPTS = [tiny.prompt(40, seed=1), tiny.prompt(40, seed=2)]
TURNS = [tiny.prompt(4, seed=3), tiny.prompt(1, seed=4)]
WAYS = [
    {"allocation": "pyramid", "decode": "model"},
    {"allocation": "pyramid", "decode": "own"},
    {"decode": "own"},
    {"decode": "model"},
    {"store": "static"},
    {"allocation": "ada"},
    {"allocation": "layer"},
]


class Chat:
    """A batch that goes on, its attention mask with it."""

    def __init__(self, model, cache):
        self.model, self.cache, self.mask = model, cache, torch.zeros(0)

    @torch.no_grad()
    def say(self, rows: list[Tensor]) -> Tensor:
        """Logits after the rows' last tokens."""
        new = tiny.left_padded(rows)
        real = new["attention_mask"]
        self.mask = torch.cat([self.mask, real], 1) if self.mask.numel() else real
        position = (self.mask.cumsum(-1) - 1).clamp_min(0)[:, -real.shape[1] :]
        name = {cache_argument(self.model): self.cache}
        return self.model(new["input_ids"], attention_mask=self.mask, position_ids=position, **name).logits[:, -1]

    def fork(self) -> Chat:
        other = Chat(self.model, copy.deepcopy(self.cache))
        other.mask = self.mask
        return other

    def crop(self, number: int) -> None:
        self.cache.crop(-number)
        self.mask = self.mask[:, : self.mask.shape[1] - number]


def step(number: int, seed: int) -> list[Tensor]:
    return [tiny.prompt(1, seed=seed)] * number


def stored(cache) -> list:
    """What a head may see of every layer: its lanes' lengths, or slots and which of them are hidden."""
    found: list = []
    for layer in cache.layers:
        store = getattr(layer, "store", None)
        if store is not None and store.attends:
            found.append(store.lens.tolist())
        else:
            valid = getattr(store, "valid", None)
            found.append((layer.keys.shape[2], layer.get_seq_length(), valid is None or valid.tolist()))
    return found


@pytest.mark.parametrize(("attention", "way"), [("eager", WAYS[0]), *[("sdpa", way) for way in WAYS]])
@pytest.mark.parametrize("prompts", [PROMPTS, [PROMPTS[0], tiny.prompt(25, seed=2)]])
def test_rows_of_a_padded_turn_equal_rows_alone(attention, way, prompts):
    model = tiny.llama(attention=attention, num_hidden_layers=4)
    options = {"budget": 0.3, "window": 4, **way}

    def talk(rows):
        chat = Chat(model, decantkv.EvictingCache(model, **options))
        chat.say([prompts[i] for i in rows])
        said = [chat.say([TURNS[i] for i in rows]), *[chat.say(step(len(rows), seed)) for seed in (5, 6)]]
        said += [chat.say([TURNS[1 - i] for i in rows]), chat.say(step(len(rows), 7))]
        return torch.stack(said, 1)

    together = talk([0, 1])
    for i in range(2):
        torch.testing.assert_close(together[i : i + 1], talk([i]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("way", WAYS)
def test_crop_takes_back_a_padded_turn_and_nothing_else(way):
    model = tiny.llama(num_hidden_layers=4)
    chat = Chat(model, decantkv.EvictingCache(model, budget=0.3, window=4, **way))
    chat.say(PROMPTS)
    never = chat.fork()
    before = stored(chat.cache)
    chat.say(TURNS)
    half = chat.fork()
    for seed in (5, 6):
        chat.say(step(2, seed))
    chat.crop(2)
    torch.testing.assert_close(chat.say(step(2, 8)), half.fork().say(step(2, 8)), rtol=0, atol=2e-6)
    chat.crop(3)  # the step and half of the turn
    half.crop(2)
    assert stored(chat.cache) == stored(half.cache)
    chat.crop(2)
    assert stored(chat.cache) == before
    torch.testing.assert_close(chat.say(step(2, 9)), never.say(step(2, 9)), rtol=0, atol=2e-6)
    with pytest.raises(ValueError, match="crop: expected to remove at most the 1 tokens after the evicted prompt"):
        chat.crop(2)


@pytest.mark.parametrize("decode", ["own", "model"])
@pytest.mark.parametrize("turns", [TURNS, []])
@pytest.mark.parametrize("prompts", [PROMPTS, [PROMPTS[0], tiny.prompt(25, seed=2)], PROMPTS[:1]])
def test_a_cache_that_holds_everything_is_cropped_like_transformers_own(decode, turns, prompts):
    model, batch = tiny.llama(), len(prompts)
    length = 44 if turns else 40
    for number in (3, 7, length - 3, length):
        ours = Chat(model, decantkv.EvictingCache(model, budget=1.0, decode=decode))
        theirs = Chat(model, DynamicCache(config=model.config))
        for chat in (ours, theirs):
            chat.say(prompts)
            if turns:
                chat.say(turns[:batch])
            chat.crop(number)
        assert ours.cache.get_seq_length() == theirs.cache.get_seq_length() == length - number
        again = step(batch, 5) if number < length else prompts
        torch.testing.assert_close(ours.say(again), theirs.say(again), rtol=0, atol=2e-6)


@pytest.mark.parametrize("decode", ["own", "model"])
@pytest.mark.parametrize("number", [2, 5])
def test_a_row_whose_tokens_were_all_cropped_begins_anew(decode, number):
    """What was cropped of a padded row were pads as well, which had taken no slot."""
    model, prompts = tiny.llama(), [tiny.prompt(10, seed=1), tiny.prompt(2, seed=2)]
    ours = Chat(model, decantkv.EvictingCache(model, budget=1.0, decode=decode))
    theirs = Chat(model, DynamicCache(config=model.config))
    for chat in (ours, theirs):
        chat.say(prompts)
        chat.crop(number)
    for turn in (*[step(2, seed) for seed in (5, 6, 7)], TURNS, step(2, 8)):
        torch.testing.assert_close(ours.say(turn), theirs.say(turn), rtol=0, atol=2e-6)


@pytest.mark.parametrize("decode", ["own", "model"])
def test_crop_further_back_than_the_first_token_empties_the_cache(decode):
    model = tiny.llama()
    cache = decantkv.EvictingCache(model, budget=1.0, decode=decode)
    logits_with(model, cache, {"input_ids": PROMPTS[0]}, [TURNS[0]])
    cache.crop(-200)
    assert [layer.get_seq_length() for layer in cache.layers] == [0] * 3
    fresh = decantkv.EvictingCache(model, budget=1.0, decode=decode)
    expected = logits_with(model, fresh, {"input_ids": PROMPTS[1]}, [TURNS[0]])
    assert torch.equal(logits_with(model, cache, {"input_ids": PROMPTS[1]}, [TURNS[0]]), expected)


@pytest.mark.parametrize("argument", [-6, 16])
def test_a_refused_crop_leaves_every_layer_of_a_hybrid_as_it_was(argument):
    model = build("gemma3", "sdpa")
    cache = decantkv.EvictingCache(model, budget=0.3, window=4)
    logits_with(model, cache, {"input_ids": tiny.prompt(20)}, [tiny.prompt(2, seed=5)])
    before = stored(cache)
    with pytest.raises(ValueError, match="crop: expected to remove at most the 2 tokens after the evicted prompt"):
        cache.crop(argument)
    assert stored(cache) == before
    cache.crop(-2)
    assert {layer.get_seq_length() for layer in cache.layers} == {20}


def test_a_crop_that_a_sliding_layer_refuses_leaves_the_others_alone():
    model = build("gemma3", "sdpa")  # a window of 32, which this prompt has passed
    cache = decantkv.EvictingCache(model, budget=0.3, window=4)
    logits_with(model, cache, {"input_ids": tiny.prompt(60)}, [tiny.prompt(2, seed=5)])
    before = stored(cache)
    with pytest.raises((RuntimeError, ValueError), match="crop"):
        cache.crop(-2)
    assert stored(cache) == before


def test_a_prompt_that_still_comes_in_chunks_cannot_be_cropped():
    model = tiny.llama()
    cache = decantkv.EvictingCache(model, budget=0.5)
    with torch.no_grad(), decantkv.cache.evicting_cache.deferred(cache):
        model(PROMPTS[0], **{cache_argument(model): cache})
        with pytest.raises(ValueError, match="crop: expected a prompt that was read to its end"):
            cache.crop(-3)
        model(TURNS[0], position_ids=torch.arange(40, 44)[None], **{cache_argument(model): cache})
    assert cache.get_seq_length() == 44


@pytest.mark.parametrize("way", [*WAYS[:4], *WAYS[5:]])
@pytest.mark.parametrize("lengths", [(40, 40), (40, 25), (12, 6), (40, 4)])
def test_joined_rows_go_on_and_are_cropped_like_rows_alone(way, lengths):
    model = tiny.llama(num_hidden_layers=4)
    chats = []
    for length, answer in zip(lengths, (3, 2), strict=True):
        chat = Chat(model, decantkv.EvictingCache(model, budget=12, window=4, **way))
        chat.say([tiny.prompt(length, seed=length)])
        chat.say([tiny.prompt(answer, seed=answer)])
        chats.append(chat)
    joined = Chat(model, decantkv.EvictingCache.cat([chat.cache for chat in chats]))
    most = max(chat.mask.shape[1] for chat in chats)
    joined.mask = torch.cat([torch.nn.functional.pad(c.mask, (most - c.mask.shape[1], 0)) for c in chats])
    for everyone in (joined, *chats):
        everyone.crop(2)  # tokens that were there before the join
    for seed in (5, 6):
        said = joined.say(step(2, seed))
        for row, chat in enumerate(chats):
            torch.testing.assert_close(said[row : row + 1], chat.say(step(1, seed)), rtol=0, atol=2e-5)
    for everyone in (joined, *chats):
        everyone.crop(1)
    said = joined.say(step(2, 7))
    for row, chat in enumerate(chats):
        torch.testing.assert_close(said[row : row + 1], chat.say(step(1, 7)), rtol=0, atol=2e-5)


@pytest.mark.parametrize(("attention", "way"), [("eager", WAYS[0]), *[("sdpa", way) for way in WAYS]])
@pytest.mark.parametrize("budget", [12, 30])  # of the latter the shorter prompt is kept whole
def test_joined_rows_of_padded_turns_equal_rows_alone_and_name_no_pad(attention, way, budget):
    model = tiny.llama(attention=attention, num_hidden_layers=4)
    chats = []
    for length, turns in ((40, (4, 1)), (30, (1, 3))):
        chat = Chat(model, decantkv.EvictingCache(model, budget=budget, window=4, **way))
        chat.say([tiny.prompt(length, seed=length + row) for row in range(2)])
        chat.say([tiny.prompt(n, seed=n) for n in turns])
        chats.append(chat)
    joined = Chat(model, decantkv.EvictingCache.cat([chat.cache for chat in chats]))
    most = max(chat.mask.shape[1] for chat in chats)
    joined.mask = torch.cat([torch.nn.functional.pad(c.mask, (most - c.mask.shape[1], 0)) for c in chats])
    for layer in joined.cache.layers:
        assert layer.kept is None or not (layer.kept.mask(most) & (joined.mask == 0)[:, None]).any()
    for seed in (5, 6):
        said = joined.say(step(4, seed))
        alone = torch.cat([chat.say(step(2, seed)) for chat in chats])
        torch.testing.assert_close(said, alone, rtol=0, atol=2e-5)
    for chat in (joined, *chats):
        chat.crop(2)
    alone = torch.cat([chat.say(step(2, 7)) for chat in chats])
    torch.testing.assert_close(joined.say(step(4, 7)), alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("way", WAYS[:4] + WAYS[5:])
@pytest.mark.parametrize("chosen", [[1], [-1, 0], torch.tensor([False, True]), slice(1, 2)])
def test_rows_are_selected_as_transformers_selects_them(way, chosen):
    model = tiny.llama(num_hidden_layers=4)
    chat = Chat(model, decantkv.EvictingCache(model, budget=0.3, window=4, **way))
    chat.say(PROMPTS)
    chat.say(TURNS)
    some = chat.fork()
    some.cache.batch_select_indices(chosen)
    some.mask = some.mask[chosen]
    both = chat.say(step(2, 5))[chosen]
    torch.testing.assert_close(some.say(step(len(both), 5)), both, rtol=0, atol=2e-6)
    some.crop(5)


def test_a_layer_that_keeps_nothing_under_one_budget_for_all_takes_new_tokens():
    none = Kept(torch.full((1, 2, 3), FILLER), torch.zeros(1, 2, dtype=torch.long))
    store = RaggedStore.from_kept(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), none)
    keys, values = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)
    store.append(keys, values)
    torch.testing.assert_close(store.attend(torch.randn(1, 4, 1, 8), scale=1.0), values.repeat_interleave(2, 1))


@pytest.mark.parametrize("stored", ["first", "last", "all"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_4d_mask_that_hides_kept_tokens_is_refused_where_layers_store_unequally_many(attention, stored):
    model, turn = tiny.llama(attention=attention), tiny.prompt(5, seed=3)
    name = cache_argument(model)

    def say(**mask):
        cache = decantkv.EvictingCache(model, budget=0.3, window=4, allocation="pyramid", decode="model")
        with torch.no_grad():
            model(tiny.prompt(80), **{name: cache})
            older = {"first": cache.layers[0].stored, "last": cache.layers[-1].stored, "all": 80}[stored]
            if mask:
                seen = torch.ones(1, 1, 5, older + 5, dtype=torch.bool).tril(older)
                seen[..., older - 2 : older] = not mask["hides"]
                lowest = torch.finfo(torch.float32).min
                mask = {"attention_mask": seen if attention == "sdpa" else torch.where(seen, 0.0, lowest)}
            assert len({layer.stored for layer in cache.layers}) > 1
            return model(turn, position_ids=torch.arange(80, 85)[None], **mask, **{name: cache}).logits

    torch.testing.assert_close(say(hides=False), say(), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"attention_mask: .*got a 4-D one that hides older tokens"):
        say(hides=True)


@pytest.mark.parametrize("move", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_rows_stay_where_they_are_while_a_prompt_comes_in_chunks(move):
    model, prompt = tiny.llama(), tiny.prompt(20, batch=2)
    cache = decantkv.EvictingCache(model, budget=0.5)
    given = 2 if move == "batch_repeat_interleave" else torch.tensor([1, 0])
    with torch.no_grad(), decantkv.deferred(cache):
        model(prompt[:, :12], **{cache_argument(model): cache})
        with pytest.raises(ValueError, match="expected a prompt that was read to its end"):
            getattr(cache, move)(given)
        model(prompt[:, 12:], **{cache_argument(model): cache})
    assert {layer.stored for layer in cache.layers} == {10}
    getattr(cache, move)(given)
