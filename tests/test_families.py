"""Every architecture and backend, judged by a full cache whose dropped tokens are hidden."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import DynamicCache

import decantkv
from decantkv.cache.evicting_cache import EvictingLayer, cache_argument
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.hf import attention_hook
from tests.support import tiny
from tests.support.families import CASES, FAMILIES, REFUSED, at_least, build
from tests.support.judge import evicted_and_judged, logits_with

STEPS = [torch.tensor([[7]]), torch.tensor([[11]]), torch.tensor([[3]])]
HEADS_ALIKE = ("deepseek_v3", "diffllama")  # the models' own attention decodes, whatever is wanted
DECODES = pytest.mark.parametrize("decode", ["model", "own"])  # what a CPU takes by default, and CUDA


@DECODES
@pytest.mark.parametrize(("family", "backend"), CASES)
def test_equal_to_a_full_cache_whose_dropped_tokens_are_hidden(family, backend, decode):
    model, ids = build(family, backend), {"input_ids": tiny.prompt(120)}
    evicted, judged, cache = evicted_and_judged(model, ids, STEPS, budget=0.2, decode=decode)
    torch.testing.assert_close(evicted, judged, rtol=0, atol=1e-5)
    full = logits_with(model, DynamicCache(config=model.config), ids, STEPS)
    assert (full - judged).abs().max() > 1e-4, "hiding tokens changes what the model says"
    evicting = [layer for layer in cache.layers if isinstance(layer, EvictingLayer)]
    assert evicting
    assert all(layer.stored == 24 + 3 for layer in evicting)
    own = decode == "own" and family not in HEADS_ALIKE
    assert all(isinstance(layer.phase.store, RaggedStore) == own for layer in evicting)


@DECODES
@pytest.mark.parametrize(("family", "backend"), CASES)
def test_budget_one_is_the_untouched_model(family, backend, decode):
    model, ids = build(family, backend), tiny.prompt(70)
    plain = model.generate(ids, max_new_tokens=6, **tiny.GREEDY)
    with decantkv.attach(model, budget=1.0, decode=decode):
        assert torch.equal(model.generate(ids, max_new_tokens=6, **tiny.GREEDY), plain)


@DECODES
@pytest.mark.parametrize(("family", "backend"), CASES)
def test_a_left_padded_batch_equals_its_rows_alone(family, backend, decode):
    if family == "lfm2":
        pytest.skip("its convolutions read pads: transformers' own padded rows differ from the rows alone")
    atol = 1e-4 if family in ("gpt_oss", "mixtral", "deepseek_v3") else 3e-5  # experts are chosen by the last digits
    model, settings = build(family, backend), {"budget": 0.2, "decode": decode}
    rows = [tiny.prompt(120, seed=1), tiny.prompt(50, seed=2)]
    if family == "diffllama":
        with pytest.raises(ValueError, match="DiffLlamaAttention, which attends twice"):
            logits_with(model, decantkv.EvictingCache(model, **settings), tiny.left_padded(rows), [])
        return
    together = logits_with(
        model, decantkv.EvictingCache(model, **settings), tiny.left_padded(rows), [s.expand(2, -1) for s in STEPS]
    )
    for row, logits in zip(rows, together, strict=True):
        alone = logits_with(model, decantkv.EvictingCache(model, **settings), {"input_ids": row}, STEPS)
        torch.testing.assert_close(logits[None], alone, rtol=0, atol=atol)


@pytest.mark.parametrize("family", [name for name in HEADS_ALIKE if name not in REFUSED])
def test_one_set_for_all_heads_where_heads_cannot_be_told_apart(family):
    _, _, cache = evicted_and_judged(build(family, "eager"), {"input_ids": tiny.prompt(120)}, STEPS, budget=0.2)
    for layer in cache.layers:
        assert (layer.kept.indices == layer.kept.indices[:, :1]).all()
        if family == "deepseek_v3":  # the latent itself since 5.17, heads made of it before
            assert layer.keys.shape[1] == (1 if at_least("5.17") else 8)
    with pytest.raises(ValueError, match="allocation: expected 'uniform', 'shared' or 'pyramid' for a model whose"):
        decantkv.attach(build(family, "eager"), budget=0.2, allocation="ada")


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_an_older_transformers_writes_differently_is_refused_by_name(family):
    with pytest.raises(attention_hook.UnsupportedModelError, match=FAMILIES[family][1]):
        decantkv.attach(build(family, "eager"), budget=0.5)


def test_a_model_without_a_full_attention_layer_is_refused():
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**{**tiny.BASE, "sliding_window": 16}))
    with pytest.raises(ValueError, match="MistralForCausalLM whose layers all have bounded caches"):
        decantkv.attach(model, budget=0.5)


@pytest.mark.parametrize(
    ("config", "model", "options"),
    [
        ("FalconConfig", "FalconForCausalLM", {"hidden_size": 32, "num_attention_heads": 4}),
        ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_head": 4}),
        ("MptConfig", "MptForCausalLM", {"d_model": 32, "n_heads": 4}),
    ],
)
def test_models_off_the_attention_interface_are_refused_by_name(config, model, options):
    made = getattr(transformers, model)(getattr(transformers, config)(vocab_size=50, n_layers=1, **options))
    with pytest.raises(attention_hook.UnsupportedModelError, match=model):
        decantkv.attach(made, budget=0.5)


def test_relative_position_biases_are_refused_by_name(monkeypatch):
    from transformers.models.llama import modeling_llama

    model = tiny.llama(attention="eager")
    original = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention,
        "forward",
        lambda self, *args, **kwargs: original(self, *args, **{**kwargs, "position_bias": torch.zeros(1)}),
    )
    with (
        torch.no_grad(),
        pytest.raises(attention_hook.UnsupportedModelError, match="LlamaAttention with relative position"),
    ):
        model(tiny.prompt(30), **{cache_argument(model): decantkv.EvictingCache(model, budget=0.5)})


@pytest.mark.parametrize(
    ("version", "fine"),
    [("4.55.4", False), ("4.56.0", True), ("5.24.0", True), ("6.0.0", False), ("6.0.0.dev0", False)],
)
def test_versions_outside_the_range_are_refused_in_words(version, fine):
    if fine:
        attention_hook.check_version(version)
    else:
        with pytest.raises(ImportError, match=r"transformers: expected a version from 4\.56 and below 6, got"):
            attention_hook.check_version(version)
