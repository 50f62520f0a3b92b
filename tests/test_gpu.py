"""The main path on a GPU: the CPU's kept tokens, memory by the allocator, and no waiting inside the evict step."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from decantkv.cache.eviction import Eviction
from tests.support import tiny
from tests.support.judge import evicted_and_judged, kept_masks, logits_with

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
STEPS = [torch.tensor([[7]]), torch.tensor([[3, 5, 9]]), torch.tensor([[2]])]
WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 512, "num_hidden_layers": 4}


def on_gpu(steps):
    return [step.to(CUDA) for step in steps]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("allocation", ["uniform", "shared"])
def test_judged_by_a_full_cache_whose_dropped_tokens_are_hidden(attention, allocation):
    model = tiny.llama(attention=attention, **WIDE).to(CUDA)
    inputs = {"input_ids": tiny.prompt(300).to(CUDA)}
    with sdpa_kernel(SDPBackend.MATH):  # the others round differently
        evicted, judged, _ = evicted_and_judged(model, inputs, on_gpu(STEPS), budget=0.1, allocation=allocation)
    torch.testing.assert_close(evicted, judged, rtol=0, atol=1e-4)


@pytest.mark.parametrize("method", ["dropkv", "snapkv", "knorm", "streaming"])
def test_a_gpu_keeps_what_a_cpu_keeps(method):
    model, ids = tiny.llama(**WIDE), tiny.prompt(400)
    kept = []
    for device in ("cpu", "cuda"):
        cache = decantkv.EvictingCache(model.to(device), method, budget=0.1, sinks=2)
        logits_with(model, cache, {"input_ids": ids.to(device)}, [])
        kept.append({layer: mask.cpu() for layer, mask in kept_masks(cache, 400).items()})
    for layer, mask in kept[0].items():
        same = (mask & kept[1][layer]).sum() / mask.sum()
        assert same > 0.98, f"layer {layer}: {same:.3f} of the tokens agree"


def test_implementations_choose_the_same_tokens():
    g = torch.Generator(CUDA).manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 128, device=CUDA, generator=g) for h, n in ((8, 8), (2, 3000), (2, 3000)))
    lengths = torch.tensor([3000, 1100], device=CUDA)
    options = {"n_keep": [300, 110], "window": 8, "pool": "max", "kernel_size": 11, "sinks": 4, "lengths": [3000, 1100]}
    kept = [
        decantkv.select(decantkv.score(q, k, v, lengths=lengths, impl=impl), impl=impl, **options).indices
        for impl in ("torch", "triton")
    ]
    assert (kept[0] == kept[1]).float().mean() > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_left_padded_batch_in_half_precision(dtype, attention):
    model = tiny.llama(attention=attention, **WIDE).to(CUDA, dtype)
    rows = [tiny.prompt(400, seed=1).to(CUDA), tiny.prompt(150, seed=2).to(CUDA)]
    steps = [torch.full((2, 1), 7, device=CUDA)] * 2
    cache = decantkv.EvictingCache(model, budget=0.2)
    together = logits_with(model, cache, tiny.left_padded(rows), steps)
    assert torch.isfinite(together).all()
    assert [layer.kept.counts.tolist() for layer in cache.layers] == [[[80, 80], [30, 30]]] * 4


def test_bytes_are_the_allocators_and_one_full_layer_is_alive_at_a_time():
    length, model = 16_384, tiny.llama(max_position_embeddings=20_000, **WIDE).to(CUDA, torch.bfloat16)
    ids = tiny.prompt(length).to(CUDA)
    with torch.no_grad():
        model(ids[:, :64], use_cache=False)  # workspaces are taken before anything is measured
        full = 2 * 2 * length * 64 * 2  # K and V, heads, head_dim, bytes of one layer
        peaks = {}
        for budget in (0.05, 1.0):
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            cache = decantkv.EvictingCache(model, budget=budget)
            out = model(ids, logits_to_keep=1, **{cache_argument(model): cache})
            del out
            gc.collect()
            held = torch.cuda.memory_allocated() - before
            assert cache.nbytes() <= held <= cache.nbytes() + 4 * 2**21, "within one block a layer"
            peaks[budget] = torch.cuda.max_memory_allocated() - before
            del cache
    assert peaks[1.0] - peaks[0.05] > 2.5 * full, "four full layers against one and three kept ones"


def test_the_evict_step_never_makes_the_host_wait(monkeypatch):
    model = tiny.llama(max_position_embeddings=20_000, **WIDE).to(CUDA, torch.bfloat16)
    ids = tiny.prompt(4096).to(CUDA)
    decide, seen = Eviction.decide, []

    def watched(self, layer, *args):
        torch.cuda.set_sync_debug_mode("error")
        try:
            decide(self, layer, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        seen.append(layer.stored)

    with torch.no_grad(), decantkv.attach(model, budget=0.05):
        model(ids, use_cache=True)  # kernels compile on first use
        monkeypatch.setattr(Eviction, "decide", watched)
        model(ids, use_cache=True)
    assert seen == [204] * 4


def test_generate_on_the_gpu():
    model, ids = tiny.llama(**WIDE).to(CUDA), tiny.prompt(500).to(CUDA)
    plain = model.generate(ids, max_new_tokens=6, **tiny.GREEDY)
    with decantkv.attach(model, budget=1.0):
        assert torch.equal(model.generate(ids, max_new_tokens=6, **tiny.GREEDY), plain)
    with decantkv.attach(model, budget=0.1) as run:
        model.generate(ids, max_new_tokens=6, **tiny.GREEDY)
    report = run.report()
    assert report.evictions == 4
    assert report.seconds["prefill"] > report.seconds["scoring"] > 0
