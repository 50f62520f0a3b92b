"""How `generate` reads a prompt into an evicting cache, brought by `attach` or given by the caller."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import transformers
from transformers import GenerationMixin

import decantkv
from decantkv.cache import chunked_reading
from decantkv.cache.evicting_cache import cache_argument
from tests.support import tiny
from tests.support.families import at_least

IDS = tiny.prompt(100)


def given(model, ids, *, options=None, **settings):
    """The answer of generate with a cache of the caller's, and the cache."""
    cache = decantkv.EvictingCache(model, **settings)
    answer = model.generate(ids, max_new_tokens=8, **{cache_argument(model): cache}, **(options or {}), **tiny.GREEDY)
    return answer, cache


def attached(model, ids, *, options=None, **settings):
    with decantkv.attach(model, **settings) as run:
        return model.generate(ids, max_new_tokens=8, **(options or {}), **tiny.GREEDY), run.report()


@pytest.mark.parametrize("chunk", [1, 16, 33, 64, 99, 100])
@pytest.mark.parametrize("allocation", ["uniform", "ada", "pyramid"])
def test_chunks_of_a_callers_cache_keep_what_one_piece_keeps(chunk, allocation):
    model = tiny.llama()
    whole, _ = attached(model, IDS, budget=0.3, allocation=allocation)
    parts, cache = given(
        model, IDS, options={"prefill_chunk_size": chunk}, budget=0.3, allocation=allocation, decode="own"
    )
    assert torch.equal(parts, whole)
    assert [layer["seen"] for layer in cache.report().layers] == [[100]] * 3
    assert all(layer.chunks == "none" for layer in cache.layers)


def test_chunks_of_a_padded_batch():
    model, batch = tiny.llama(), tiny.left_padded([IDS, tiny.prompt(45, seed=2)])
    answers = []
    for options in ({}, {"prefill_chunk_size": 33}):
        cache = decantkv.EvictingCache(model, budget=0.3)
        answers.append(
            model.generate(**batch, max_new_tokens=6, **{cache_argument(model): cache}, **options, **tiny.GREEDY)
        )
    assert torch.equal(*answers)


def test_a_callers_cache_carries_out_its_own_chunks_and_cap():
    model = tiny.llama()
    settings = {"budget": 0.3, "prefill_chunk": 16, "max_kv_tokens": 40}
    wanted, report = attached(model, IDS, **settings)
    answer, cache = given(model, IDS, **settings)
    assert torch.equal(answer, wanted)
    assert cache.report().rounds == report.rounds > 0
    cache = decantkv.EvictingCache(model, **settings)
    with torch.no_grad(), pytest.raises(ValueError, match="max_kv_tokens: expected a prompt in chunks of 16"):
        model(IDS, **{cache_argument(model): cache})
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("draft", ["early exit", "prompt_lookup"])
def test_drafts_beside_a_callers_cache_wait_for_the_prompt(draft):
    if draft == "early exit" and at_least("5.0") and not at_least("5.12"):
        pytest.skip("transformers 5.2's own early exit calls its drafting without an argument")
    model = tiny.llama(num_hidden_layers=4)
    ids = torch.cat([tiny.prompt(40), tiny.prompt(40), tiny.prompt(20)], 1)
    options = {"assistant_early_exit": 1} if draft == "early exit" else {"prompt_lookup_num_tokens": 5}
    if not at_least("5.17"):
        options["eos_token_id"] = tiny.VOCABULARY + 1
    plain, _ = given(model, ids, budget=0.3)
    drafted, cache = given(model, ids, options=options, budget=0.3)
    assert torch.equal(drafted[:, :108], plain)
    assert cache.report().layers[0]["seen"] == [100]


def phi3(**options):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0, 8.0, 12.0, 16.0]}
    if at_least("5.0"):
        options["rope_parameters"] = {**rope, "rope_theta": 1e4, "original_max_position_embeddings": 64}
    else:
        options["rope_scaling"] = {"type" if key == "rope_type" else key: value for key, value in rope.items()}
    base = {**tiny.BASE, "max_position_embeddings": 512, "original_max_position_embeddings": 64}
    torch.manual_seed(0)
    return transformers.Phi3ForCausalLM(transformers.Phi3Config(**base, sliding_window=None, **options)).eval()


@pytest.mark.parametrize(("length", "stored"), [(100, 27), (60, 22)])
@pytest.mark.parametrize("chunk", [None, 16, 80])
def test_a_model_that_throws_its_cache_away_fills_the_given_one(length, stored, chunk):
    if not at_least("5.0"):
        pytest.skip("transformers' own recomputation fails there: it goes on with the positions of one token")
    model, ids = phi3(), tiny.prompt(length)
    options = {"prefill_chunk_size": chunk} if chunk else {}
    wanted, _ = attached(model, ids, options=options, budget=20)
    answer, cache = given(model, ids, options=options, budget=20)
    assert torch.equal(answer, wanted)
    if length == 100 or at_least("5.18"):  # up to 5.17 transformers then reads the last token alone, without us too
        assert [layer.stored for layer in cache.layers] == [stored] * 3
        assert cache.get_seq_length() == length + 7
    full, _ = given(model, ids, options=options, budget=1.0)
    assert torch.equal(full, model.generate(ids, max_new_tokens=8, **options, **tiny.GREEDY))


def blip2():
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    former = {**vision, "encoder_hidden_size": 32, "vocab_size": 50}
    text = {"model_type": "opt", "vocab_size": tiny.VOCABULARY, "hidden_size": 64, "ffn_dim": 96}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 512, "pad_token_id": 0}
    config = transformers.Blip2Config(
        vision_config={**vision, "image_size": 16, "patch_size": 4}, qformer_config=former,
        text_config={**text, "word_embed_proj_dim": 64}, num_query_tokens=8, image_token_index=190,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Blip2ForConditionalGeneration(config).eval()


def test_a_model_whose_part_generates_is_followed_there():
    model = blip2()
    assert chunked_reading.generating_parts(model) == [model, model.language_model]
    ids = torch.cat([torch.full((1, 8), 190), torch.randint(3, 180, (1, 80))], 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(1, 3, 16, 16)}
    options = {**inputs, "max_new_tokens": 4, "min_new_tokens": 4, **tiny.GREEDY}
    plain = model.generate(**options)
    with decantkv.attach(model, budget=1.0):
        assert torch.equal(model.generate(**options), plain)
    with decantkv.attach(model, budget=0.3) as run:
        model.generate(**options)
        with pytest.raises(ValueError, match="cache_implementation: expected none beside attach"):
            model.generate(**options, cache_implementation="static")
    assert run.report().evictions == 3
    settings = {"budget": 0.3, "prefill_chunk": 16, "max_kv_tokens": 40}
    with decantkv.attach(model, **settings), pytest.raises(ValueError, match="prefill_chunk: expected input_ids"):
        model.generate(**options)
    assert torch.equal(model.generate(**options), plain)
    assert not {"forward", "_prefill", "_prepare_cache_for_generation"} & set(vars(model.language_model))


def test_generates_methods_are_as_before_when_no_cache_lives():
    gc.collect()
    before = dict(vars(GenerationMixin))
    model = tiny.llama()
    cache = decantkv.EvictingCache(model, budget=0.3)
    fork = copy.deepcopy(cache)
    del cache
    gc.collect()
    assert dict(vars(GenerationMixin)) != before
    assert torch.equal(copy.deepcopy(model).generate(IDS, max_new_tokens=3), model.generate(IDS, max_new_tokens=3))
    del fork
    gc.collect()
    assert dict(vars(GenerationMixin)) == before
