"""What a backend does of its own: flex attention's block masks, attention weights given back, offloading, gradients."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import DynamicCache

import decantkv
import decantkv.cache.evicting_cache
from decantkv.cache.evicting_cache import cache_argument
from tests.support import tiny
from tests.support.families import at_least
from tests.support.judge import logits_with

STEPS = [torch.tensor([[7]]), torch.tensor([[11]])]
PADDED = tiny.left_padded([tiny.prompt(120, seed=1), tiny.prompt(50, seed=2)])


@pytest.fixture
def flex(monkeypatch):
    """A function that reads a prompt and steps with a backend; flex attention and its masks stay uncompiled."""
    from transformers import masking_utils
    from transformers.integrations import flex_attention as module

    def block_mask(*args, _compile=False, **options):
        return create_block_mask(*args, **options)

    monkeypatch.setattr(masking_utils, "create_block_mask", block_mask)
    monkeypatch.setattr(module, "WrappedFlexAttention", lambda training: lambda: flex_attention)
    model = tiny.llama(attention="flex_attention", hidden_size=128)

    def run(backend, inputs, steps=STEPS, **settings):
        model.set_attn_implementation(backend)
        cache = decantkv.EvictingCache(model, **settings)
        rows = inputs["input_ids"].shape[0]
        return logits_with(model, cache, inputs, [step.expand(rows, -1) for step in steps]), cache

    return run


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_says_what_sdpa_says(flex):
    inputs = {"input_ids": tiny.prompt(120)}
    said, cache = flex("flex_attention", inputs, budget=0.2)
    expected, other = flex("sdpa", inputs, budget=0.2)
    torch.testing.assert_close(said, expected, rtol=0, atol=1e-5)
    for layer, same in zip(cache.layers, other.layers, strict=True):
        assert layer.stored == 24 + 2
        assert torch.equal(layer.kept.indices, same.kept.indices)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_padding(flex):
    said, cache = flex("flex_attention", PADDED, budget=30)  # every row keeps as many: no filler to hide
    expected, other = flex("sdpa", PADDED, budget=30)
    torch.testing.assert_close(said, expected, rtol=0, atol=1e-5)
    for layer, same in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(layer.kept.indices, same.kept.indices)
    with pytest.raises(ValueError, match="flex_attention: expected a batch whose rows keep equally many tokens"):
        flex("flex_attention", PADDED, budget=0.2)
    with pytest.raises(ValueError, match="allocation: expected one that gives all layers alike with flex attention"):
        flex("flex_attention", {"input_ids": tiny.prompt(120)}, budget=0.3, allocation="pyramid")


def test_attention_weights_are_given_back_over_what_is_stored():
    model = tiny.llama(attention="eager")
    asked = {"output_attentions": True, "return_dict_in_generate": True}
    with decantkv.attach(model, budget=0.2):
        out = model.generate(tiny.prompt(100), max_new_tokens=3, **asked, **tiny.GREEDY)
        plain = model.generate(tiny.prompt(100), max_new_tokens=3, **tiny.GREEDY)
    assert torch.equal(out.sequences, plain)
    for step, (queries, keys) in zip(out.attentions, [(100, 100), (1, 21), (1, 22)], strict=True):
        assert [tuple(weights.shape) for weights in step] == [(1, 8, queries, keys)] * 3
        for weights in step:
            torch.testing.assert_close(weights.sum(-1), torch.ones(1, 8, queries))


def test_training_under_attach():
    model, ids = tiny.llama(), tiny.prompt(60)
    model(ids, use_cache=False, labels=ids).loss.backward()
    expected = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()
    with decantkv.attach(model, budget=0.2):
        with pytest.raises(ValueError, match="model: expected a forward without gradients"):
            model(ids, use_cache=True)
        model(ids, use_cache=False, labels=ids).loss.backward()  # no cache, no eviction
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight.grad, expected)


class Stream(contextlib.nullcontext):
    def wait_stream(self, other):
        pass


@pytest.mark.skipif(not at_least("5.2"), reason="offloading became an argument of DynamicCache later")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_callers_offloading_cache(monkeypatch, attention):
    """transformers moves a layer away between its update and its attention; streams exist on accelerators only."""
    moved = []
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "default_stream", lambda *device: Stream())
    model = tiny.llama(attention=attention)
    offload = decantkv.cache.evicting_cache.EvictingLayer.offload
    monkeypatch.setattr(
        decantkv.cache.evicting_cache.EvictingLayer,
        "offload",
        lambda layer: (moved.append(layer.layer_idx), offload(layer)),
    )
    for inputs in ({"input_ids": tiny.prompt(100)}, PADDED):
        with decantkv.attach(model, budget=0.2):
            plain = model.generate(**inputs, max_new_tokens=5, **tiny.GREEDY)
            moved.clear()
            cache = DynamicCache(config=model.config, offloading=True)
            out = model.generate(**inputs, max_new_tokens=5, **{cache_argument(model): cache}, **tiny.GREEDY)
        assert torch.equal(out, plain)
        assert moved == [0, 1, 2] * 5
        assert cache.layers[0].get_seq_length() == inputs["input_ids"].shape[1] + 4
        assert cache.layers[0].stored == inputs["input_ids"].shape[1] // 5 + 4
