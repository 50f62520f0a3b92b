"""torch's modes around a forward: inference mode, autocast and a default device; and models that view what they get."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import transformers
from transformers import DynamicCache, cache_utils

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from tests.support import tiny
from tests.support.judge import logits_with

WAYS = [
    {"decode": "model"},
    {"decode": "own"},
    {"allocation": "ada"},
    {"allocation": "layer"},
    {"store": "static"},
    {"every": 2, "decode": "model"},
    {"every": 2, "decode": "own"},
]
FP8 = [{"store": "fp8"}] if hasattr(cache_utils, "Fp8QuantizedLayer") else []
STEPS = [tiny.prompt(1, seed=4), tiny.prompt(3, seed=5), tiny.prompt(1, seed=6)]


def forwards(model, cache, modes):
    """Logits of a prompt and the steps, each read in its own mode."""
    name, said, length = cache_argument(model), [], 0
    for tokens, mode in zip([tiny.prompt(100), *STEPS], modes, strict=True):
        with mode:
            position = torch.arange(length, length + tokens.shape[1])[None]
            said.append(model(tokens, position_ids=position, **{name: cache}).logits[:, -1].clone())
        length += tokens.shape[1]
    return torch.stack(said, 1), cache


@pytest.mark.parametrize("way", [*WAYS, *FP8])
@pytest.mark.parametrize("inside", ["yynn", "yyyn", "nyny", "ynyn"])
def test_what_was_read_in_inference_mode_goes_on_outside(way, inside):
    model = tiny.llama()
    modes = [torch.inference_mode() if one == "y" else torch.no_grad() for one in inside]
    got, cache = forwards(model, decantkv.EvictingCache(model, budget=0.3, **way), modes)
    expected, _ = forwards(model, decantkv.EvictingCache(model, budget=0.3, **way), [torch.no_grad() for _ in modes])
    assert torch.equal(got, expected)
    if "every" not in way:
        with torch.no_grad():
            cache.crop(-2)
            model(STEPS[1], position_ids=torch.arange(103, 106)[None], **{cache_argument(model): cache})


def test_a_prompt_in_chunks_may_leave_inference_mode_half_way():
    model, name = tiny.llama(), cache_argument(tiny.llama())
    said = []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = decantkv.EvictingCache(model, budget=0.3, prefill_chunk=30, max_kv_tokens=40, decode="own")
        with torch.no_grad(), decantkv.cache.evicting_cache.deferred(cache):
            for i, chunk in enumerate(tiny.prompt(100).split(30, 1)):
                with mode() if i < 2 else nullcontext():
                    position = torch.arange(30 * i, 30 * i + chunk.shape[1])[None]
                    out = model(chunk, position_ids=position, **{name: cache})
        said.append(out.logits)
    assert torch.equal(*said)


@pytest.mark.parametrize("way", [*WAYS, {"prefill_chunk": 33, "decode": "own"}, {"reuse_lse": True}])
@pytest.mark.parametrize("method", ["dropkv", "caote"])
def test_autocast_gives_what_it_gives_the_models_own_attention(way, method):
    model = tiny.llama()
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True, **tiny.GREEDY}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = torch.stack(model.generate(tiny.prompt(100), **options).logits)
        with decantkv.attach(model, method, budget=1.0, **{k: v for k, v in way.items() if k != "every"}):
            got = torch.stack(model.generate(tiny.prompt(100), **options).logits)
        with decantkv.attach(model, method, budget=0.3, **way) as run:
            model.generate(tiny.prompt(100), **options)
    torch.testing.assert_close(got, plain, rtol=0, atol=0.02)
    if "every" not in way and "allocation" not in way:
        assert [layer["kept"] for layer in run.report().layers] == [[[30, 30]]] * 3


@pytest.mark.parametrize("way", [*WAYS[:5], *FP8])
def test_autocast_may_begin_or_end_between_prompt_and_answer(way):
    model = tiny.llama()
    for modes in (["y", "n", "n", "y"], ["n", "y", "y", "n"]):
        contexts = [torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "y") for mode in modes]
        with torch.no_grad():
            got, _ = forwards(model, decantkv.EvictingCache(model, budget=1.0, **way), contexts)
            plain, _ = forwards(model, DynamicCache(config=model.config), contexts)
        torch.testing.assert_close(got, plain, rtol=0, atol=0.05 if way in FP8 else 0.02)


@pytest.mark.parametrize(
    ("method", "way"),
    [
        *[("dropkv", way) for way in WAYS],
        ("expected-attention", {}),
        ("random", {}),
        ("h2o", {}),
        ("dropkv", {"protect": [(3, 9)]}),
    ],
)
def test_a_default_device_is_not_taken_for_the_host(method, way):
    model = tiny.llama()
    inputs = tiny.left_padded([tiny.prompt(60, seed=1), tiny.prompt(41, seed=2)])
    name, steps = cache_argument(model), [tiny.prompt(1, seed=3).expand(2, 1)] * 4

    def talk(cache):
        mask = inputs["attention_mask"]
        masks = [mask, *[torch.cat([mask, torch.ones(2, i + 1, dtype=torch.long)], 1) for i in range(4)]]
        places = [(m.cumsum(1) - 1).clamp_min(0) for m in masks]
        return inputs["input_ids"], masks, places, cache

    def run(cache, device):
        ids, masks, places, cache = talk(cache)
        said = []
        torch.set_default_device(device)
        try:
            for tokens, mask, place in zip([ids, *steps], masks, places, strict=True):
                out = model(tokens, attention_mask=mask, position_ids=place[:, -tokens.shape[1] :], **{name: cache})
                said.append(out.logits[:, -1])
        finally:
            torch.set_default_device(None)
        return torch.stack(said)

    with torch.no_grad():
        try:
            run(DynamicCache(config=model.config), "meta")
        except Exception:
            pytest.skip("transformers' own cache does not run so in this version")
        got = run(decantkv.EvictingCache(model, method, budget=0.4, **way), "meta")
        assert torch.equal(got, run(decantkv.EvictingCache(model, method, budget=0.4, **way), None))


@pytest.mark.skipif(not hasattr(transformers, "AfmoeConfig"), reason="this transformers has no AFMoE")
@pytest.mark.parametrize("way", [{"decode": "own"}, {"allocation": "ada"}])
def test_a_model_that_views_the_attentions_output_reads_a_second_turn(way):
    own = {"moe_intermediate_size": 32, "head_dim": 16, "num_experts": 4, "num_local_experts": 4}
    more = {"num_experts_per_tok": 2, "num_shared_experts": 1, "sliding_window": 32, "num_hidden_layers": 4}
    torch.manual_seed(0)
    model = transformers.AfmoeForCausalLM(transformers.AfmoeConfig(**{**tiny.BASE, **own, **more})).eval()
    ids, turn = {"input_ids": tiny.prompt(100)}, [tiny.prompt(5, seed=2)]
    got = logits_with(model, decantkv.EvictingCache(model, budget=1.0, **way), ids, turn)
    expected = logits_with(model, DynamicCache(config=model.config), ids, turn)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
