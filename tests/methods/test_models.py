"""The methods inside models: what they need is read from the modules, and every one of them generates."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM
from transformers.cache_utils import DynamicCache

import decantkv
from decantkv.hf.model_parts import output_projection, rotation
from decantkv.methods import METHODS, Streaming
from tests.support import tiny


def neox():
    torch.manual_seed(0)
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(vocab_size=199, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                      rotary_pct=0.25, max_position_embeddings=512)
    ).eval()  # fmt: skip


def gpt2():
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=199, n_embd=64, n_layer=2, n_head=4, n_positions=512)).eval()


@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen2, neox, gpt2])
def test_the_output_projection_is_each_heads_slice(build):
    model, seen = build(), []

    def hook(module, args, out):
        seen.append((args[0], out))

    names = ("o_proj", "dense", "c_proj")
    attention = next(m for n, m in model.named_modules() if n.split(".")[-1] in ("self_attn", "attention", "attn"))
    projection = next(getattr(attention, name) for name in names if hasattr(attention, name))
    handle = projection.register_forward_hook(hook)
    with torch.no_grad():
        model(tiny.prompt(9))
    handle.remove()
    flat, out = seen[0]
    heads, width = (8, 8) if build in (tiny.llama, tiny.qwen2) else (4, 16)
    w_o = output_projection(attention, torch.empty(1, heads, 9, width), torch.empty(1, 1, 9, width))
    assert w_o.untyped_storage().data_ptr() == projection.weight.untyped_storage().data_ptr()
    parts = flat.view(1, 9, heads, width)
    by_head = sum(parts[:, :, h] @ w_o[h] for h in range(heads))
    bias = projection.bias if projection.bias is not None else 0
    torch.testing.assert_close(by_head + bias, out, rtol=1e-4, atol=1e-5)


def test_a_module_without_an_output_projection_is_refused():
    with pytest.raises(ValueError, match="expected an attention module with an output projection"):
        output_projection(torch.nn.Linear(3, 3), torch.empty(1, 2, 1, 4), torch.empty(1, 1, 1, 4))
    model = tiny.llama()
    for layer in model.model.layers:
        layer.self_attn.out = layer.self_attn.o_proj
        del layer.self_attn.o_proj
        layer.self_attn.__class__ = renamed(type(layer.self_attn))
    with decantkv.attach(model, "criticalkv", budget=40), pytest.raises(ValueError, match="such as dropkv or snapkv"):
        model.generate(tiny.prompt(60), max_new_tokens=2, **tiny.GREEDY)


def renamed(base):
    class Renamed(base):
        @property
        def o_proj(self):
            return lambda x: self.out(x)

    return Renamed


@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen2, neox])
def test_the_rotation_moves_keys_as_the_model_does(build):
    model = build()
    ids = tiny.prompt(12)

    def first_keys(shift):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids, position_ids=torch.arange(12)[None] + shift, past_key_values=cache)
        return cache.layers[0].keys

    rotate, here = rotation(model), first_keys(0)
    torch.testing.assert_close(rotate(here, torch.full((12,), 31)), first_keys(31), rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(rotate(first_keys(31), torch.full((1, 12), -31)), here, rtol=1e-4, atol=2e-5)


def test_a_model_without_rotary_positions_is_refused():
    with pytest.raises(ValueError, match="expected a model with rotary positions"):
        decantkv.attach(gpt2(), "expected-attention", budget=0.2)
    with pytest.raises(ValueError, match="renumber=False"):
        decantkv.attach(gpt2(), "streaming:paper", budget=0.2)
    longrope = tiny.llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ValueError, match="frequencies that stay as they are"):
        decantkv.attach(longrope, "expected-attention", budget=0.2)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_generates_from_a_padded_batch(name):
    model = tiny.llama()
    batch = tiny.left_padded([tiny.prompt(90, 1), tiny.prompt(61, 2)])
    with decantkv.attach(model, name, budget=0.5, allocation="uniform") as run:
        together = model.generate(**batch, max_new_tokens=3, **tiny.GREEDY)
    method = METHODS[name]()
    kept = [max(length // 2, method.window + method.sinks) for length in (90, 61)]
    assert [layer["kept"] for layer in run.report().layers] == [[[n] * 2 for n in kept]] * 3
    for row, length in ((0, 90), (1, 61)):
        if name == "random":
            continue  # its noise is drawn for the shape of the batch
        with decantkv.attach(model, name, budget=0.5, allocation="uniform"):
            alone = model.generate(batch["input_ids"][row : row + 1, -length:], max_new_tokens=3, **tiny.GREEDY)
        assert torch.equal(alone[0, -3:], together[row, -3:])


def test_renumbered_streaming_is_the_original_cache_with_positions_from_zero():
    model = tiny.llama(num_hidden_layers=1)  # deeper layers' values would depend on the first cache
    ids, budget = tiny.prompt(80), 21
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=full)
    slots = torch.tensor([*range(4), *range(80 - 17, 80)])
    rotate = rotation(model)
    manual = DynamicCache(config=model.config)
    for i, layer in enumerate(full.layers):
        bare = rotate(layer.keys, -torch.arange(80))
        manual.update(rotate(bare[:, :, slots], torch.arange(budget)), layer.values[:, :, slots], i)
    cache = decantkv.EvictingCache(model, Streaming(renumber=True), budget=budget)
    kept_positions = decantkv.EvictingCache(model, Streaming(), budget=budget)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        model(ids, past_key_values=kept_positions)
        token = tiny.prompt(3, 5)
        want = model(token, past_key_values=manual, position_ids=torch.arange(budget, budget + 3)[None]).logits
        got = model(token, past_key_values=cache).logits
        ports = model(token, past_key_values=kept_positions).logits
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert float((ports - want).abs().max()) > 0.05


def test_pyramid_gives_lower_layers_more_and_keeps_the_total():
    model = tiny.llama(num_hidden_layers=4)
    with decantkv.attach(model, "pyramidkv", budget=30) as run:
        model.generate(tiny.prompt(200), max_new_tokens=3, **tiny.GREEDY)
    kept = [layer["kept"][0] for layer in run.report().layers]
    assert [k[0] for k in kept] == sorted((k[0] for k in kept), reverse=True)
    assert sum(k[0] for k in kept) == 4 * 30
    assert kept[-1][0] == 8 + 1  # (30 − 8)/20, rounded
