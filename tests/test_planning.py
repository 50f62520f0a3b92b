"""What a cache will weigh, from a configuration; held against caches that were filled."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from transformers import AutoConfig, DynamicCache, Gemma3TextConfig, LlamaConfig, Phi3Config

import decantkv
from decantkv.cli import main
from decantkv.hf.model_parts import decoder_of
from decantkv.lab.sizing import parse_memory, plan
from decantkv.scoring.rehearsal import Rehearsal
from tests.support import tiny
from tests.support.families import at_least, build
from tests.support.judge import logits_with

PHI3_MINI = {  # microsoft/Phi-3-mini-128k-instruct
    "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 131072, "sliding_window": 262144, "vocab_size": 32064,
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 131072, "vocab_size": 128256,
}  # fmt: skip


def test_phi_3_mini_at_128k_is_48_gib():
    made = plan(Phi3Config(**PHI3_MINI), length=131072, budget=0.05, dtype=torch.bfloat16, memory=80e9)
    assert made.bytes_full == 48 * 2**30
    assert made.n_keep == 6553
    assert made.bytes_kept == 48 * 2**30 * 6553 // 131072
    assert made.weights == 3_821_079_552 * 2
    assert (made.batch_full, made.batch_kept) == (1, 24)


@pytest.mark.parametrize(
    ("budget", "note"), [("5%", None), (8, "fill the budget"), ("0.5%", "exceed the budget's share")]
)
def test_budgets_that_leave_scores_no_say_are_noted(capsys, tmp_path, budget, note):
    made = plan(LlamaConfig(**LLAMA_8B), length=200, budget=budget)
    assert (note is None) == (made.note is None)
    LlamaConfig(**LLAMA_8B).save_pretrained(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["plan", "--model", str(tmp_path), "--length", "200", "--budget", str(budget)])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert ("note:" in shown) == (note is not None)
    assert note is None or note in shown


def test_the_8b_geometry():
    made = plan(LlamaConfig(**LLAMA_8B), length=131072, budget=0.05, new_tokens=100, dtype=torch.bfloat16)
    assert made.weights == 8_030_261_248 * 2
    assert made.bytes_full == (131072 + 100) * 131072
    assert made.bytes_kept == (6553 + 100) * 131072
    assert made.batch_kept is None


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3", "qwen3"])
def test_the_numbers_are_those_of_filled_caches(family):
    model, ids = build(family, "sdpa"), tiny.prompt(120)
    full, kept = DynamicCache(config=model.config), decantkv.EvictingCache(model, budget=0.2)
    for cache in (full, kept):
        logits_with(model, cache, {"input_ids": ids}, [])
    made = plan(model.config, length=120, budget=0.2, dtype=torch.float32)
    assert made.weights == sum(p.numel() for p in model.parameters()) * 4
    # a sliding layer holds one token less than its window until the next one comes
    slack = sum(type(layer).__name__ == "DynamicSlidingWindowLayer" for layer in full.layers) * 2 * 2 * 16 * 4
    held = sum(x.numel() * 4 for layer in full.layers for x in (layer.keys, layer.values))
    assert made.bytes_full == held + slack
    assert made.bytes_kept == sum(x.numel() * 4 for layer in kept.layers for x in (layer.keys, layer.values)) + slack


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_rehearsal_holds_the_whole_prompt_its_passage_and_its_scores(family):
    model, held, rehearsal = build(family, "sdpa"), [], Rehearsal(replay=True, chunk=40)
    cache = decantkv.EvictingCache(model, budget=0.2, rehearsal=rehearsal)

    def measure(*_):
        tensors = [x for layer in cache.layers for x in (layer.keys, layer.values, *layer.rehearsed())]
        held.append(sum(x.numel() * x.element_size() for x in tensors))

    decoder_of(model).layers[-1].register_forward_hook(measure)
    logits_with(model, cache, {"input_ids": tiny.prompt(120)}, [])
    made = plan(model.config, length=120, budget=0.2, dtype=torch.float32, rehearsal=rehearsal)
    assert made.bytes_peak == max(held) > made.bytes_full


def test_a_window_as_long_as_the_context_is_full_attention():
    model = build("phi3", "sdpa")
    before = logits_with(model, decantkv.EvictingCache(model, budget=0.2), {"input_ids": tiny.prompt(90)}, STEPS)
    model.config.sliding_window = 4096
    cache = decantkv.EvictingCache(model, budget=0.2)
    torch.testing.assert_close(logits_with(model, cache, {"input_ids": tiny.prompt(90)}, STEPS), before)
    assert [layer.stored for layer in cache.layers] == [20] * 3


STEPS = [torch.tensor([[5]]), torch.tensor([[9]])]


def test_a_model_of_windows_alone_and_bad_numbers_are_refused():
    windows = Gemma3TextConfig(num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    with pytest.raises(ValueError, match="model: expected full-attention layers"):
        plan(windows, length=100, budget=0.5)
    for bad in (
        {"length": 0, "budget": 0.5},
        {"length": 9, "budget": 0.5, "new_tokens": -1},
        {"length": 9, "budget": 2.0},
    ):
        with pytest.raises(ValueError, match="expected"):
            plan(LlamaConfig(), **bad)
    assert parse_memory("H200") == 141e9
    assert parse_memory("24 GB") == 24e9
    for text in ("h3000", "-5", "nan"):
        with pytest.raises(ValueError, match="gpu: expected"):
            parse_memory(text)


def test_the_command(capsys, tmp_path):
    AutoConfig.for_model("phi3", **PHI3_MINI, dtype="bfloat16").save_pretrained(tmp_path)
    base = ["plan", "--model", str(tmp_path), "--length", "131072", "--budget", "0.05"]
    with pytest.raises(SystemExit) as stop:
        main([*base, "--gpu", "h100"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert "48.00 GiB" in text
    assert "2.40 GiB" in text
    with pytest.raises(SystemExit):
        main([*base, "--json"])
    assert json.loads(capsys.readouterr().out)["bytes_full"] == 48 * 2**30
    for extra, says in ((["--gpu", "x"], "gpu: expected"), (["--dtype", "x"], "dtype: expected")):
        with pytest.raises(SystemExit) as stop:
            main([*base, *extra])
        assert stop.value.code == 2
        assert says in capsys.readouterr().err


@pytest.mark.skipif(not at_least("5.24"), reason="no layers that differ in their numbers")
def test_layers_of_unequal_width_are_counted_one_by_one():
    config = transformers.Gemma4TextConfig(
        **{**tiny.BASE, "num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32, "sliding_window": 32},
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        hidden_size_per_layer_input=0,
    )
    made = plan(config, length=120, budget=0.2, dtype=torch.float32)
    assert made.bytes_kept == 2 * 4 * (2 * 16 * 32 + 2 * 2 * 32 * 24)
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(config).eval()
    with pytest.raises(ValueError, match="method: expected rotary positions that add up"):
        decantkv.EvictingCache(model, method="expected-attention", budget=0.5)
