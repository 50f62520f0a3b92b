"""Generation on a CUDA device: own attention, graphs, chunks and caps, judged by the model's own attention."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from tests.support import tiny
from tests.support.judge import logits_with

pytestmark = pytest.mark.gpu


def model(dtype=torch.float32, **options):
    return tiny.llama(head_dim=64, **options).to("cuda", dtype)


def on_gpu(inputs):
    return {name: x.cuda() for name, x in inputs.items()}


INPUTS = {
    "one": {"input_ids": tiny.prompt(600)},
    "padded": tiny.left_padded([tiny.prompt(600, seed=1), tiny.prompt(245, seed=2)]),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("allocation", ["uniform", "ada"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphed_steps_say_what_the_models_own_attention_says(name, allocation, dtype):
    llama, inputs = model(dtype), on_gpu(INPUTS[name])
    options = {"max_new_tokens": 40, "output_logits": True, "return_dict_in_generate": True, **tiny.GREEDY}
    # one forced answer, so that a tie cannot send the two on different ways
    forced = torch.randint(1, 199, (40,), generator=torch.Generator().manual_seed(0)).tolist()

    def force(ids, scores):
        step = ids.shape[1] - inputs["input_ids"].shape[1]
        return torch.full_like(scores, -1e4).index_fill_(1, torch.tensor([forced[step]], device=ids.device), 0.0)

    said = {}
    for decode in ("model", "own"):
        with decantkv.attach(llama, budget=0.3, allocation=allocation, decode=decode) as run:
            out = llama.generate(**inputs, logits_processor=[force], **options)
        said[decode] = torch.stack(out.logits)
    assert (run.trust.broken, run.trust.checked, run.trust.replayed) == (None, 2, 38)
    scale = float(said["model"].abs().max())
    allowed = 1e-3 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(said["own"], said["model"], rtol=0, atol=allowed * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", INPUTS)
def test_chunks_keep_what_one_shot_keeps(name, dtype):
    llama, inputs = model(dtype), on_gpu(INPUTS[name])
    kept = []
    for chunk in ({}, {"prefill_chunk": 128}):
        with decantkv.attach(llama, budget=0.3, decode="own", **chunk):
            out = llama.generate(**inputs, max_new_tokens=2, return_dict_in_generate=True, **tiny.GREEDY)
        kept.append([layer.kept.mask(600).cpu() for layer in out[cache_argument(llama)].layers])
    share = [float((a & b).sum() / a.sum()) for a, b in zip(*kept, strict=True)]
    assert min(share) == 1.0 if dtype == torch.float32 else min(share) > 0.9


def test_a_capped_prompt_stays_under_its_cap_by_the_allocator():
    llama = model(torch.bfloat16, num_hidden_layers=8)
    ids = tiny.prompt(2000).repeat(1, 32).cuda()
    peaks = {}
    for name, bounds in (("whole", {}), ("capped", {"prefill_chunk": 1024, "max_kv_tokens": 2048})):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with decantkv.attach(llama, budget=0.02, decode="own", **bounds) as run:
            out = llama.generate(ids, max_new_tokens=2, return_dict_in_generate=True, **tiny.GREEDY)
        peaks[name] = torch.cuda.max_memory_allocated() - before
        assert [layer["kept"] for layer in run.report().layers] == [[[1280, 1280]]] * 8
        del out
    per_token = 2 * 2 * 64 * 2  # K and V, heads, head_dim, bytes
    assert peaks["capped"] < (8 * 2048 + 4 * 3072) * per_token + 1024 * 64 * 2 * 40
    assert peaks["capped"] < peaks["whole"] / 2


def test_an_answer_evicted_again_equals_the_models_own_attention():
    llama, inputs = model(), on_gpu(INPUTS["padded"])
    said = []
    for decode in ("own", "model"):
        cache = decantkv.EvictingCache(llama, budget=60, every=8, decode=decode)
        steps = [torch.full((2, 1), 3 + i, device="cuda") for i in range(30)]
        said.append(logits_with(llama, cache, inputs, steps))
    torch.testing.assert_close(*said, rtol=0, atol=1e-3)
    options = {"max_new_tokens": 40, **tiny.GREEDY}
    out = []
    for decode in ("own", "model"):
        with decantkv.attach(llama, budget=60, every=8, decode=decode) as run:
            out.append(llama.generate(**inputs, **options))
        assert run.trust.broken is None
    assert torch.equal(*out)


def test_a_step_takes_no_memory_once_room_is_there():
    llama, inputs = model(torch.bfloat16), on_gpu(INPUTS["one"])
    name, cache = cache_argument(llama), decantkv.EvictingCache(llama, budget=0.3, decode="own")
    cache.expect_length(700)
    logits_with(llama, cache, inputs, [torch.tensor([[5]], device="cuda")])
    before = cache.nbytes()
    with torch.no_grad():
        for _ in range(50):
            llama(torch.tensor([[7]], device="cuda"), **{name: cache})
    assert cache.nbytes() == before


def test_a_step_that_waits_is_found_before_it_is_captured():
    llama, inputs = model(), on_gpu(INPUTS["one"])
    hook = llama.model.layers[1].register_forward_hook(lambda m, a, out: float(out.sum()) and None)
    with (
        decantkv.attach(llama, budget=0.3, decode="own") as run,
        pytest.warns(UserWarning, match="synchronizing CUDA operation"),
    ):
        llama.generate(**inputs, max_new_tokens=8, **tiny.GREEDY)
    hook.remove()
    assert (run.trust.replayed, torch.cuda.get_sync_debug_mode()) == (0, 0)
    with decantkv.attach(llama, budget=0.3, decode="own") as run:  # nothing is left behind: sampling, new graphs
        llama.generate(**inputs, max_new_tokens=8, do_sample=True)
    assert (run.trust.broken, run.trust.replayed) == (None, 6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_on_another_gpu_than_the_current_one():
    llama = model().to("cuda:1")
    inputs = {name: x.to("cuda:1") for name, x in INPUTS["one"].items()}
    with decantkv.attach(llama, budget=0.3, decode="model"):
        plain = llama.generate(**inputs, max_new_tokens=12, **tiny.GREEDY)
    with decantkv.attach(llama, budget=0.3, decode="own") as run:
        assert torch.equal(llama.generate(**inputs, max_new_tokens=12, **tiny.GREEDY), plain)
    assert (run.trust.broken, run.trust.replayed) == (None, 10)


def test_recorded_steps_keep_their_stand_ins_through_many_layers_of_bfloat16():
    torch.manual_seed(0)  # not sharpened: such weights make a percent of a rounding in 32 layers, not half of the whole
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 32, "head_dim": 64}
    llama = LlamaForCausalLM(LlamaConfig(**{**tiny.BASE, **sizes})).to("cuda", torch.bfloat16).eval()
    inputs = on_gpu(INPUTS["one"])
    with decantkv.attach(llama, budget=0.3, decode="own") as run:
        llama.generate(**inputs, max_new_tokens=12, **tiny.GREEDY)
        assert {standin.name for standin in run.trust.standins} == {"forward", "apply_rotary_pos_emb"}
    assert (run.trust.broken, run.trust.replayed) == (None, 10)


def test_recording_again_and_again_leaves_no_memory_behind():
    llama, inputs = model(torch.bfloat16), on_gpu(INPUTS["one"])
    held = []
    with decantkv.attach(llama, budget=0.3, decode="own") as run:
        for _ in range(8):
            llama.generate(**inputs, max_new_tokens=12, **tiny.GREEDY)
            torch.cuda.empty_cache()
            held.append(torch.cuda.memory_stats()["requested_bytes.all.current"])
    assert (run.trust.broken, run.trust.replayed) == (None, 80)
    report = 6 * 8 * llama.config.num_hidden_layers * llama.config.num_key_value_heads  # counts of the last prompts
    assert held[-1] - held[1] <= report
