"""Prefill end to end: time to first token of a model with random weights, with and without eviction."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from decantkv.attachment import attach
from decantkv.base.options import Impl
from decantkv.lab.bench import gate
from decantkv.lab.bench.rows import Row, circumstances
from decantkv.lab.bench.score import Geometry, inputs
from decantkv.lab.bench.timing import quantiles

MODELS: dict[str, tuple[Callable[[Any], PreTrainedModel], Callable[[], Any]]] = {
    "llama-3.1-8b": (
        LlamaForCausalLM,
        lambda: LlamaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072 + 64, rope_theta=500000.0,
        ),
    ),
    "qwen2.5-7b": (
        Qwen2ForCausalLM,
        lambda: Qwen2Config(
            vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28,
            num_attention_heads=28, num_key_value_heads=4, max_position_embeddings=131072 + 64, rope_theta=1e6,
        ),
    ),
    "mistral-7b": (
        MistralForCausalLM,
        lambda: MistralConfig(
            vocab_size=32768, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=131072 + 64, sliding_window=None,
        ),
    ),
    "tiny": (  # for trying the commands out, on any device
        LlamaForCausalLM,
        lambda: LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=131072 + 64,
        ),
    ),
}  # fmt: skip


def measure(
    name: str, lengths: Sequence[int], *, impls: Sequence[Impl], budget: float, rehearsals: Sequence[str] = ()
) -> Iterator[Row]:
    """Rows per length: without eviction, then with it by each implementation, and after each rehearsal.

    Raises:
        gate.RedGateError: the kernels are wrong on this geometry.
    """
    if name not in MODELS:
        raise ValueError(f"geometries: expected some of {', '.join(MODELS)}, got {name!r}")
    build, config_of = MODELS[name]
    config = config_of()
    geometry = Geometry(name, config.num_attention_heads, config.num_key_value_heads, 128)
    win, hinted = inputs(geometry, 4096, seed=0)
    green = gate.check(win, hinted, n_keep=204)
    del win, hinted
    model = random_model(build, config)
    where = circumstances()
    for length in lengths:
        ids = torch.randint(0, config.vocab_size, (1, length), device="cuda")
        contenders: dict[str, dict[str, Any] | None] = {"no eviction": None}
        contenders |= {f"dropkv {impl}": {"impl": impl} for impl in impls}
        contenders |= {f"dropkv, {text}": {"rehearsal": text} for text in rehearsals}
        for contender, options in contenders.items():
            with nullcontext() if options is None else attach(model, "dropkv", budget=budget, **options):
                times, peak = first_token(model, ids, repeats=8 if length <= 8192 else 4 if length <= 65536 else 2)
            yield {
                **where, "step": "prefill", "geometry": {"name": name}, "kv_len": length, "gate": green,
                "contender": contender, "budget": budget, "layers": config.num_hidden_layers,
                "wall_us": dict(quantiles(times)._asdict()), "wall_us_all": [round(t, 1) for t in times],
                "peak_bytes": peak,
            }  # fmt: skip
    del model
    gc.collect()
    torch.cuda.empty_cache()


def random_model(build: Callable[[Any], PreTrainedModel], config: Any, device: str = "cuda") -> PreTrainedModel:
    """bf16 weights drawn on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            model = build(config)
        model = model.to_empty(device=device)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.02)
        for module in model.modules():
            if "rmsnorm" in type(module).__name__.lower():
                module.weight.data.fill_(1.0)
            if hasattr(module, "inv_freq"):
                with torch.device(device):
                    fresh = type(module)(config)
                module.inv_freq = fresh.inv_freq
                module.original_inv_freq = fresh.inv_freq
    finally:
        torch.set_default_dtype(before)
    return model.eval()


def first_token(model: PreTrainedModel, ids: torch.Tensor, *, repeats: int) -> tuple[list[float], int]:
    """(wall times in µs of a prompt until its next token is known, peak bytes beyond what was there before)."""
    times = []
    peak = 0
    for step in range(repeats + 1):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        with torch.no_grad():
            out = model(ids, use_cache=True, logits_to_keep=1)
            out.logits[:, -1].argmax(-1).item()
        torch.cuda.synchronize()
        if step:  # the first warms up
            times.append(1e6 * (time.perf_counter() - begin))
            peak = max(peak, torch.cuda.max_memory_allocated() - held)
        del out
    return times, peak
