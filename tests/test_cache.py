"""The evicting cache on Llama and Qwen2, judged by a full cache whose dropped tokens are hidden."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache

import decantkv
from decantkv.cache.evicting_cache import EvictingLayer, cache_argument
from decantkv.cache.phases import Reading
from decantkv.cache.report import storage_bytes
from decantkv.hf import attention_hook
from tests.support import tiny
from tests.support.judge import evicted_and_judged, logits_with

FAMILIES = {"llama": tiny.llama, "qwen2": tiny.qwen2}
STEPS = [torch.tensor([[7]]), torch.tensor([[11]]), torch.tensor([[3, 5, 9]]), torch.tensor([[2]])]
METHODS = [
    "dropkv",
    "dropkv:authors-cache",
    "dropkv:kvpress-pr",
    "snapkv",
    "knorm",
    "streaming",
    "sliding",
    "recent",
    "random",
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("allocation", ["uniform", "shared"])
def test_equal_to_a_full_cache_whose_dropped_tokens_are_hidden(family, attention, allocation):
    model = FAMILIES[family](attention=attention)
    evicted, judged, cache = evicted_and_judged(
        model, {"input_ids": tiny.prompt(150)}, STEPS, budget=0.1, allocation=allocation
    )
    torch.testing.assert_close(evicted, judged, rtol=0, atol=1e-5)
    full = logits_with(model, DynamicCache(config=model.config), {"input_ids": tiny.prompt(150)}, STEPS)
    assert (full - judged).abs().max() > 1e-3, "hiding tokens changes what the model says"
    assert [layer.stored for layer in cache.layers] == [15 + 6] * 3
    assert cache.get_seq_length() == 156


@pytest.mark.parametrize("method", METHODS)
def test_every_method(method):
    evicted, judged, cache = evicted_and_judged(
        tiny.llama(), {"input_ids": tiny.prompt(150)}, STEPS[:2], method=method, budget=0.5, sinks=2, protect=[(40, 50)]
    )
    torch.testing.assert_close(evicted, judged, rtol=0, atol=1e-5)
    for layer in cache.layers:
        kept = layer.kept.mask(150)
        assert kept[..., :2].all()
        assert kept[..., 40:50].all()
        assert (kept.sum(-1) == 75).all()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("budget", [0.1, 20])
def test_a_left_padded_batch_equals_its_rows_alone(attention, budget):
    model = tiny.llama(attention=attention)
    rows = [tiny.prompt(150, seed=1), tiny.prompt(60, seed=2), tiny.prompt(6, seed=3)]
    batch_steps = [step.expand(3, -1) for step in STEPS]
    together = logits_with(
        model, decantkv.EvictingCache(model, budget=budget, sinks=1), tiny.left_padded(rows), batch_steps
    )
    for row, logits in zip(rows, together, strict=True):
        alone = logits_with(model, decantkv.EvictingCache(model, budget=budget, sinks=1), {"input_ids": row}, STEPS)
        torch.testing.assert_close(logits[None], alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "settings", [{"budget": 1.0}, {"budget": 150}, {"budget": 400}, {"budget": 0.001, "window": 150}]
)
def test_a_prompt_within_its_budget_gives_the_untouched_models_tokens(settings):
    model, ids = tiny.llama(), tiny.prompt(150)
    plain = model.generate(ids, max_new_tokens=12, **tiny.GREEDY)
    with decantkv.attach(model, **settings) as run:
        assert torch.equal(model.generate(ids, max_new_tokens=12, **tiny.GREEDY), plain)
    assert run.report().evictions == 0


@pytest.mark.parametrize("length", [1, 2, 8, 9])
def test_short_prompts(length):
    model, ids = tiny.llama(), tiny.prompt(length)
    plain = model.generate(ids, max_new_tokens=5, **tiny.GREEDY)
    with decantkv.attach(model, budget=0.01) as run:
        out = model.generate(ids, max_new_tokens=5, **tiny.GREEDY)
    if length <= 8:
        assert torch.equal(out, plain)
    assert all(layer["kept"] == [[min(8, length)] * 2] for layer in run.report().layers)


def test_positions_count_every_token_and_a_second_turn_feeds_only_the_new_ones():
    model, ids = tiny.llama(), tiny.prompt(150)
    cache = decantkv.EvictingCache(model, budget=0.1)
    first = model.generate(ids, max_new_tokens=4, **{cache_argument(model): cache}, **tiny.GREEDY)
    assert cache.get_seq_length() == first.shape[1] - 1
    turn = torch.cat([first, tiny.prompt(9, seed=5)], -1)
    fed = []
    hook = model.model.register_forward_pre_hook(lambda m, a, k: fed.append(k["input_ids"].shape[1]), with_kwargs=True)
    second = model.generate(turn, max_new_tokens=4, **{cache_argument(model): cache}, **tiny.GREEDY)
    hook.remove()
    assert fed == [10, 1, 1, 1]
    steps = [first[:, 150 + i : 151 + i] for i in range(3)] + [turn[:, first.shape[1] - 1 :]]
    steps += [second[:, turn.shape[1] + i : turn.shape[1] + 1 + i] for i in range(3)]
    _, judged, _ = evicted_and_judged(model, {"input_ids": ids}, steps, budget=0.1)
    assert torch.equal(judged[:, [0, 1, 2]].argmax(-1), first[:, 150:153])
    assert torch.equal(judged[:, -4:].argmax(-1), second[:, -4:])


@pytest.mark.parametrize("padded", [False, True])
def test_reorder_repeat_select_copy_and_crop(padded):
    model = tiny.llama()
    rows = [tiny.prompt(80, seed=1), tiny.prompt(30 if padded else 80, seed=2)]
    inputs = tiny.left_padded(rows)
    cache = decantkv.EvictingCache(model, budget=0.2)
    name = cache_argument(model)
    with torch.no_grad():
        model(**inputs, **{name: cache}, position_ids=(inputs["attention_mask"].cumsum(-1) - 1).clamp_min(0))
    real = [row.shape[1] for row in rows]

    def next_logits(c, order, tokens):
        mask = torch.cat(
            [inputs["attention_mask"][order], torch.ones(len(order), c.get_seq_length() - 80 + 1).long()], 1
        )
        position = torch.tensor([[real[i] + c.get_seq_length() - 80] for i in order])
        with torch.no_grad():
            return model(tokens, attention_mask=mask, position_ids=position, **{name: c}).logits[:, -1]

    token = torch.tensor([[5], [6]])
    base = next_logits(copy.deepcopy(cache), [0, 1], token)
    swapped = copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(next_logits(swapped, [1, 0], token.flip(0)), base.flip(0), rtol=0, atol=1e-5)
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    twice = next_logits(repeated, [0, 0, 1, 1], token.repeat_interleave(2, 0))
    torch.testing.assert_close(twice, base.repeat_interleave(2, 0), rtol=0, atol=1e-5)
    single = copy.deepcopy(cache)
    single.batch_select_indices(torch.tensor([1]))
    torch.testing.assert_close(next_logits(single, [1], token[1:]), base[1:], rtol=0, atol=1e-5)
    before = next_logits(cache, [0, 1], token)
    cache.crop(-1)
    torch.testing.assert_close(next_logits(cache, [0, 1], token), before, rtol=0, atol=0)
    with pytest.raises(ValueError, match="crop: expected to remove at most the 1 tokens"):
        cache.crop(-2)


def test_bytes_are_the_storages_and_the_full_prompt_is_gone():
    def alive():
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor and x.dim() == 4]
        return {x.untyped_storage().data_ptr() for x in tensors}

    model = tiny.llama(num_hidden_layers=4)
    before = alive()
    cache = decantkv.EvictingCache(model, budget=0.05)
    logits_with(model, cache, {"input_ids": tiny.prompt(400)}, [])
    per_layer = 2 * 2 * 20 * 8 * 4  # K and V, heads, tokens, head_dim, fp32
    assert cache.nbytes() == 4 * per_layer
    held = {x.untyped_storage().data_ptr() for layer in cache.layers for x in layer.tensors()}
    assert alive() - before == held


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_one_full_layer_is_alive_during_prefill(monkeypatch, attention):
    model = tiny.llama(num_hidden_layers=6, attention=attention)
    full: list[weakref.ref] = []
    most, live_bytes = [], []
    update = EvictingLayer.update

    def watched(self, keys, values, *args, **kwargs):
        full.append(weakref.ref(keys.untyped_storage()))
        return update(self, keys, values, *args, **kwargs)

    keep = EvictingLayer._decide

    def counted(self, *args):
        most.append(sum(ref() is not None for ref in full))
        live_bytes.append(cache.nbytes())
        keep(self, *args)

    monkeypatch.setattr(EvictingLayer, "update", watched)
    monkeypatch.setattr(EvictingLayer, "_decide", counted)
    cache = decantkv.EvictingCache(model, budget=0.05)
    logits_with(model, cache, {"input_ids": tiny.prompt(400)}, [])
    assert most == [1] * 6
    whole, kept = 2 * 2 * 400 * 8 * 4, 2 * 2 * 20 * 8 * 4
    assert live_bytes == [whole + i * kept for i in range(6)]


def test_a_view_of_a_larger_storage_is_not_kept_alive():
    model = tiny.llama()
    cache = decantkv.EvictingCache(model, budget=1.0)
    layer = cache.layers[0]
    layer.hold_all(Reading(torch.zeros(1, 3, 50, 8)[:, :1], torch.zeros(1, 3, 50, 8)[:, 1:2], 50))
    assert storage_bytes(layer.tensors()) == 2 * 50 * 8 * 4


def test_a_failure_at_the_prompt_leaves_the_cache_empty_and_the_model_usable():
    model, ids = tiny.llama(), tiny.prompt(50)
    plain = model.generate(ids, max_new_tokens=4, **tiny.GREEDY)
    cache = decantkv.EvictingCache(model, budget=0.5, protect=[(40, 60)])
    with pytest.raises(ValueError, match="protect: expected spans inside the prompt's 50 tokens"):
        logits_with(model, cache, {"input_ids": ids}, [])
    assert cache.get_seq_length() == 0
    assert cache.nbytes() == 0
    assert torch.equal(model.generate(ids, max_new_tokens=4, **tiny.GREEDY), plain)
    cache = decantkv.EvictingCache(model, budget=0.5)
    with pytest.raises(ValueError, match="without gradients"):
        model(ids, **{cache_argument(model): cache})
    right_padded = {"input_ids": torch.cat([ids, ids * 0], 1), "attention_mask": torch.cat([ids * 0 + 1, ids * 0], 1)}
    with pytest.raises(ValueError, match="padding on the left"):
        logits_with(model, cache, right_padded, [])


def test_attention_that_never_comes_is_refused():
    model = tiny.llama()
    cache = decantkv.EvictingCache(model, budget=0.5)
    k = torch.zeros(1, 2, 20, 8)
    cache.update(k, k, 0)
    with pytest.raises(attention_hook.UnsupportedModelError, match="layer 0"):
        cache.update(k, k, 1)
    cache.reset()
    cache.update(k, k, 0)
    with pytest.raises(attention_hook.UnsupportedModelError, match="layer 0"):
        cache.update(k, k, 0)


def test_a_model_off_the_attention_interface_is_refused_by_name():
    from transformers import FalconConfig, FalconForCausalLM

    model = FalconForCausalLM(FalconConfig(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match="FalconForCausalLM"):
        decantkv.EvictingCache(model, budget=0.5)
    with pytest.raises(TypeError, match="PreTrainedModel"):
        decantkv.attach(torch.nn.Linear(2, 2), budget=0.5)
