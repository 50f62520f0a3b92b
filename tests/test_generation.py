"""Every way of generating: beams, drafts, chunks, turns, forks, streams."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from transformers import TextIteratorStreamer

import decantkv
from decantkv.cache.evicting_cache import cache_argument, deferred
from decantkv.hf.attention_hook import UnsupportedModelError
from tests.support import tiny
from tests.support.families import at_least
from tests.support.judge import evicted_and_judged, hiding, kept_masks, logits_with

BUDGET = 0.2


@pytest.fixture(params=["sdpa", "eager"])
def model(request):
    return tiny.llama(attention=request.param)


def kept_of(model, ids, **settings):
    cache = decantkv.EvictingCache(model, budget=BUDGET, **settings)
    logits_with(model, cache, {"input_ids": ids}, [])
    return kept_masks(cache, ids.shape[1])


def test_beams_equal_beams_on_a_full_cache_whose_dropped_tokens_are_hidden(model):
    ids = tiny.prompt(100)
    options = {"max_new_tokens": 8, "num_beams": 3, **tiny.GREEDY}
    with decantkv.attach(model, budget=BUDGET):
        evicted = model.generate(ids, **options)
    with hiding(model, kept_of(model, ids)):
        assert torch.equal(model.generate(ids, **options), evicted)
    assert not torch.equal(model.generate(ids, **options), evicted)


def test_beams_on_a_padded_batch_equal_each_row_alone(model):
    rows = [tiny.prompt(100, seed=1), tiny.prompt(45, seed=2)]
    options = {"max_new_tokens": 6, "num_beams": 3, **tiny.GREEDY}
    with decantkv.attach(model, budget=BUDGET):
        together = model.generate(**tiny.left_padded(rows), **options)
        for row, out in zip(rows, together, strict=True):
            assert torch.equal(model.generate(row, **options)[0, row.shape[1] :], out[100:])


@pytest.mark.parametrize("draft", ["prompt_lookup", "assistant"])
def test_drafts_give_the_tokens_of_plain_greedy_decoding(model, draft):
    ids = torch.cat([tiny.prompt(40), tiny.prompt(40), tiny.prompt(20)], 1)  # something to look up
    options = {"prompt_lookup_num_tokens": 5} if draft == "prompt_lookup" else {"assistant_model": tiny.llama(seed=1)}
    if not at_least("5.17"):
        options["eos_token_id"] = tiny.VOCABULARY + 1  # prompt lookup wants one; this never comes
    forwards = []
    hook = model.register_forward_pre_hook(lambda m, a, k: forwards.append(k["input_ids"].shape[1]), with_kwargs=True)
    with decantkv.attach(model, budget=BUDGET):
        plain = model.generate(ids, max_new_tokens=16, **tiny.GREEDY)
        forwards.clear()
        drafted = model.generate(ids, max_new_tokens=16, **options, **tiny.GREEDY)
    hook.remove()
    assert torch.equal(drafted[:, :116], plain)  # before 5.17 transformers' last draft may run past max_new_tokens
    assert forwards[0] == 100, "the prompt comes alone"
    assert max(forwards[1:]) > 1, "drafts were checked"


@pytest.mark.parametrize("chunk", [1, 7, 33, 40, 99, 100, 500])
@pytest.mark.parametrize("method", ["dropkv", "snapkv", "h2o"])
def test_chunks_keep_what_one_shot_keeps(model, chunk, method):
    ids = tiny.prompt(100)
    with decantkv.attach(model, method, budget=0.4) as run:
        whole = model.generate(ids, max_new_tokens=5, **tiny.GREEDY)
    with decantkv.attach(model, method, budget=0.4) as chunked:
        parts = model.generate(ids, max_new_tokens=5, prefill_chunk_size=chunk, **tiny.GREEDY)
    assert torch.equal(parts, whole)
    assert [r["kept"] for r in chunked.report().layers] == [r["kept"] for r in run.report().layers] == [[[40, 40]]] * 3


def test_a_second_turn_in_chunks(model):
    ids, name = tiny.prompt(100), cache_argument(model)
    turn, ends = torch.cat([ids, tiny.prompt(30, seed=4)], 1), []
    for options in ({}, {"prefill_chunk_size": 7}):
        cache = decantkv.EvictingCache(model, budget=BUDGET)
        logits_with(model, cache, {"input_ids": ids}, [])
        with decantkv.attach(model, budget=BUDGET):
            if options and not at_least("5.24"):
                with pytest.raises(ValueError, match="prefill_chunk_size: expected an empty cache before transformers"):
                    model.generate(turn, max_new_tokens=4, **{name: cache}, **options, **tiny.GREEDY)
                return
            ends.append(model.generate(turn, max_new_tokens=4, **{name: cache}, **options, **tiny.GREEDY))
    assert torch.equal(*ends)


@pytest.mark.parametrize("chunk", [3, 33, 60])
def test_chunks_of_a_padded_batch(model, chunk):
    batch = tiny.left_padded([tiny.prompt(100, seed=1), tiny.prompt(45, seed=2)])
    with decantkv.attach(model, budget=BUDGET):
        whole = model.generate(**batch, max_new_tokens=5, **tiny.GREEDY)
        assert torch.equal(model.generate(**batch, max_new_tokens=5, prefill_chunk_size=chunk, **tiny.GREEDY), whole)


def test_chunks_by_hand_keep_the_same_sets(model):
    ids, name = tiny.prompt(100), cache_argument(model)
    cache = decantkv.EvictingCache(model, budget=BUDGET)
    with torch.no_grad(), deferred(cache):
        for chunk in ids.split(30, dim=1):
            model(chunk, **{name: cache})
        assert cache.layers[0].stored == 100
    for layer, kept in kept_of(model, ids).items():
        assert torch.equal(cache.layers[layer].kept.mask(100), kept)


def test_several_questions_on_one_evicted_context(model):
    context, name = tiny.prompt(100), cache_argument(model)
    cache = decantkv.EvictingCache(model, budget=BUDGET)
    logits_with(model, cache, {"input_ids": context}, [])
    nbytes = cache.nbytes()
    for seed in (5, 6):
        question = torch.cat([context, tiny.prompt(12, seed=seed)], 1)
        fork = copy.deepcopy(cache)
        out = model.generate(question, max_new_tokens=5, **{name: fork}, **tiny.GREEDY)
        steps = [question[:, 100:], *[out[:, 112 + i : 113 + i] for i in range(4)]]
        _, judged, _ = evicted_and_judged(model, {"input_ids": context}, steps, budget=BUDGET)
        assert torch.equal(judged[:, 12:].argmax(-1), out[:, 112:])
    assert cache.nbytes() == nbytes


def test_a_second_turn_of_a_padded_batch(model):
    rows = [tiny.prompt(100, seed=1), tiny.prompt(45, seed=2)]
    turn, name = tiny.prompt(7, seed=9), cache_argument(model)
    inputs, cache = tiny.left_padded(rows), decantkv.EvictingCache(model, budget=BUDGET)
    first = model.generate(**inputs, max_new_tokens=3, **{name: cache}, **tiny.GREEDY)
    ids = torch.cat([first, turn.expand(2, -1)], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(2, 10, dtype=torch.long)], 1)
    second = model.generate(ids, attention_mask=mask, max_new_tokens=4, **{name: cache}, **tiny.GREEDY)
    for row, out in zip(rows, second, strict=True):
        alone = decantkv.EvictingCache(model, budget=BUDGET)
        start = model.generate(row, max_new_tokens=3, **{name: alone}, **tiny.GREEDY)
        end = model.generate(torch.cat([start, turn], 1), max_new_tokens=4, **{name: alone}, **tiny.GREEDY)
        assert torch.equal(end[0, row.shape[1] :], out[100:])


def test_streaming_from_a_thread(model):
    class Words:
        def decode(self, ids, **_):
            return "".join(f"{int(i)} " for i in ids)

    ids, streamer = tiny.prompt(100), TextIteratorStreamer(Words(), skip_prompt=True)
    with decantkv.attach(model, budget=BUDGET) as run:
        plain = model.generate(ids, max_new_tokens=6, **tiny.GREEDY)
        thread = threading.Thread(
            target=model.generate, args=(ids,), kwargs={"max_new_tokens": 6, "streamer": streamer, **tiny.GREEDY}
        )
        thread.start()
        said = "".join(streamer).split()
        thread.join()
    assert [int(word) for word in said] == plain[0, 100:].tolist()
    assert len(run.report().layers) == 6


def test_sampling_several_sequences(model):
    ids = tiny.prompt(100)
    with decantkv.attach(model, budget=BUDGET) as run:
        torch.manual_seed(0)
        out = model.generate(ids, max_new_tokens=4, do_sample=True, num_return_sequences=3)
    assert out.shape == (3, 104)
    assert run.report().layers[0]["kept"] == [[20, 20]] * 3


def test_a_4d_mask_after_eviction_is_refused(model):
    name, cache = cache_argument(model), decantkv.EvictingCache(model, budget=BUDGET)
    logits_with(model, cache, {"input_ids": tiny.prompt(100)}, [])
    mask = torch.zeros(1, 1, 1, 101)
    with torch.no_grad(), pytest.raises(ValueError, match="attention_mask: expected a 2-D mask of all tokens"):
        model(tiny.prompt(1), attention_mask=mask, position_ids=torch.tensor([[100]]), **{name: cache})


def test_a_cache_made_for_another_model_is_refused(model):
    other = tiny.llama(seed=3)
    cache = decantkv.EvictingCache(other, budget=BUDGET)
    with pytest.raises(ValueError, match="cache: expected the LlamaForCausalLM it was made for"):
        logits_with(model, cache, {"input_ids": tiny.prompt(100)}, [])
    assert cache.get_seq_length() == 0


def test_continuous_batching_is_refused(model):
    if not hasattr(model, "generate_batch"):
        pytest.skip("this transformers has no continuous batching")
    with decantkv.attach(model, budget=BUDGET), pytest.raises(ValueError, match="continuous batching: expected"):
        model.generate_batch([[1, 2, 3]])
    assert "generate_batch" not in vars(model)


def test_a_backend_registered_behind_our_back_is_refused_not_ignored(model):
    from transformers import modeling_utils

    functions = modeling_utils.ALL_ATTENTION_FUNCTIONS._global_mapping
    before, name = model.config._attn_implementation, cache_argument(model)
    cache = decantkv.EvictingCache(model, budget=BUDGET)
    functions["strange"] = lambda module, q, k, v, mask, **kw: (q.transpose(1, 2), None)
    try:
        model.config._attn_implementation = "strange"
        with torch.no_grad(), pytest.raises(UnsupportedModelError, match="layer 0"):
            model(tiny.prompt(30), **{name: cache})
        with torch.no_grad(), decantkv.attach(model, budget=BUDGET):  # a cache made afterwards sees it
            assert model(tiny.prompt(30), use_cache=True)[name].layers[0].stored == 8
    finally:
        model.config._attn_implementation = before
        del functions["strange"]
    cache.reset()
    with torch.no_grad():
        assert model(tiny.prompt(30), **{name: cache})[name].layers[0].stored == 8
