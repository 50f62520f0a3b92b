"""A prompt read in chunks, without masks where the model allows it, is the prompt read in one piece."""

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from decantkv import scoring
from decantkv.cache import own_attention
from decantkv.cache.layer import EvictingLayer
from decantkv.lab.eval.engine.policy import parse_policies
from decantkv.lab.eval.engine.reading import Reader

LENGTH, CUT = 91, 64
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}
POLICIES = parse_policies("dropkv,snapkv,h2o,criticalkv,adadropkv")


def llama(kv_heads, attention="sdpa"):
    torch.manual_seed(1)
    made = LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=kv_heads)).eval()
    made.set_attn_implementation(attention)
    return made


def gemma():
    """Full attention in every layer, logits softly capped."""
    torch.manual_seed(1)
    config = Gemma2Config(
        **SMALL, num_key_value_heads=2, head_dim=16, layer_types=["full_attention"] * 3, attn_logit_softcapping=5.0
    )
    made = Gemma2ForCausalLM(config).eval()
    made.set_attn_implementation("eager")
    return made


MODELS = {
    "grouped heads": (lambda: llama(2), True),
    "a KV head each": (lambda: llama(4), True),
    "one KV head": (lambda: llama(1), True),
    "eager": (lambda: llama(2, "eager"), False),
    "softcap": (gemma, False),
}


def read(model, ids, chunk, cuts):
    """Next logits, the cache and what is kept at every cut."""
    settings = {policy.label: policy.settings("0.3") for policy in POLICIES}
    needs = frozenset(need for each in settings.values() for need in each.method.needs)
    reader = Reader(model, rows=max(each.rows for each in settings.values()), needs=needs)
    reader.chunk_of = lambda length: chunk
    kept = {}
    for cut in reader.read(ids, cuts):
        for label, each in settings.items():
            kept[label, cut.length] = [layer.kept.indices.tolist() for layer in cut.evict(each).layers]
    return reader, reader.reading(), kept


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_chunks_of_any_size_give_the_logits_and_choices_of_one_piece(name, monkeypatch):
    make, without_masks = MODELS[name]
    model = make()
    ids = torch.randint(1, 97, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
    attended, attend = [], own_attention.attend_chunk
    monkeypatch.setattr(
        own_attention, "attend_chunk", lambda *a, **k: attended.append(a[0].shape[2]) or attend(*a, **k)
    )
    with torch.no_grad():
        whole = model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1]
    reader, one, kept = read(model, ids, LENGTH, [])
    assert (reader.plain, attended) == (without_masks, [])
    assert model.config._attn_implementation in ("sdpa", "eager")
    torch.testing.assert_close(one.next_logits, whole, atol=2e-5, rtol=1e-5)
    for chunk in (LENGTH - 1, 30, 7):  # the first leaves a last chunk of one token
        attended.clear()
        _, reading, here = read(model, ids, chunk, [])
        assert bool(attended) == without_masks
        assert here == kept
        torch.testing.assert_close(reading.next_logits, whole, atol=2e-4, rtol=1e-4)
        for mine, theirs in zip(reading.whole.layers, one.whole.layers, strict=True):
            torch.testing.assert_close(mine.keys, theirs.keys, atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(mine.values, theirs.values, atol=2e-4, rtol=1e-4)
    # cut where a regime cuts it: there the kept sets are those of a prompt that ends there
    _, _, short = read(model, ids[:CUT], CUT, [])
    _, _, cut = read(model, ids, 30, [CUT])
    assert {k: v for k, v in cut.items() if k[1] == CUT} == short


def test_a_layer_builds_no_mask_and_is_watched_all_the_same(monkeypatch):
    model, seen = llama(2), []
    after = EvictingLayer.after_attention
    monkeypatch.setattr(
        EvictingLayer,
        "after_attention",
        lambda self, call: (seen.append((call.mask, call.query.shape[2], call.key.shape[2])), after(self, call))[1],
    )
    reader = Reader(model, rows=8)
    seen.clear()
    reader.chunk_of = lambda length: 40
    for cut in reader.read(list(range(1, 92)), []):
        assert [cut.window(layer, 8).q.shape[2] for layer in range(3)] == [8] * 3
    assert seen == [(None, new, kv) for new, kv in ((40, 40), (40, 80), (11, 91)) for _ in range(3)]


def test_a_model_that_attends_twice_a_layer_is_refused():
    from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

    model = DiffLlamaForCausalLM(DiffLlamaConfig(**SMALL, num_key_value_heads=2))
    with pytest.raises(ValueError, match="one attention call per layer"):
        Reader(model, rows=8)


def test_queries_of_a_whole_prompt_are_held_until_it_is_scored():
    model, ids = llama(2), list(range(1, 92))
    reader = Reader(model, rows=8, needs=frozenset({"queries"}))
    for cut in reader.read(ids, [CUT]):
        assert cut.window(0, 8, frozenset({"queries"})).queries.shape[2] == cut.length
    for cut in reader.reading().cuts.values():
        assert cut.layers[0].call.query.shape[2] == 8


def test_memory_for_masks_is_counted_where_there_are_any(monkeypatch):
    reader = Reader(llama(2), rows=8, memory=2**24)
    on_cpu = reader.chunk_of(100_000)
    monkeypatch.setattr(type(reader.model), "device", torch.device("cuda"))
    assert reader.chunk_of(100_000) > on_cpu
    reader.plain = False
    assert reader.chunk_of(100_000) == on_cpu


def test_a_later_cut_goes_on_from_an_earlier_cuts_sums(monkeypatch):
    model = llama(2)
    ids = torch.randint(1, 97, (LENGTH,), generator=torch.Generator().manual_seed(6)).tolist()
    settings = parse_policies("h2o")[0].settings("0.3")
    summed, compute = [], scoring.compute
    monkeypatch.setattr(scoring, "compute", lambda name, win, **k: summed.append(win.window) or compute(name, win, **k))
    got = {}
    for cuts in ([CUT, LENGTH], [LENGTH]):
        summed.clear()
        reader = Reader(model, rows=8, needs=frozenset({"queries"}))
        for cut in reader.read(ids, cuts):
            got[len(cuts), cut.length] = torch.cat(cut.score(settings))
        assert sum(summed) == 3 * LENGTH, "every query is looked at once, whatever the cuts"
    torch.testing.assert_close(got[2, LENGTH], got[1, LENGTH], rtol=1e-5, atol=1e-7)
    for cut in reader.read(ids[:CUT], [CUT]):  # nothing is carried from one prompt to the next
        torch.testing.assert_close(torch.cat(cut.score(settings)), got[2, CUT], rtol=1e-5, atol=1e-7)
