"""Models inside what torch.compile, data parallelism and PEFT make of them evict like the model itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import decantkv
from decantkv.cache.evicting_cache import checked_model
from decantkv.cache.watching import ObservingCache
from tests.support import tiny

IDS = tiny.prompt(60)


def low_rank(model):
    peft = pytest.importorskip("peft", exc_type=ImportError, reason="this peft does not go with these transformers")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    return peft.get_peft_model(model, config).eval()


WRAPPERS = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data parallel": nn.DataParallel,
    "low rank": low_rank,
    "both": lambda model: torch.compile(low_rank(model), backend="eager"),
}


pytestmark = pytest.mark.filterwarnings("ignore:Dynamo")


@pytest.fixture(params=WRAPPERS)
def pair(request):
    """A wrapper and the model in it."""
    model = tiny.llama()
    return WRAPPERS[request.param](model), model


def test_attaching_to_a_wrapper_attaches_to_its_model(pair):
    wrapper, model = pair
    assert checked_model(wrapper) is model
    plain = model.generate(IDS, max_new_tokens=8, **tiny.GREEDY)
    with decantkv.attach(model, budget=0.3):
        wanted = model.generate(IDS, max_new_tokens=8, **tiny.GREEDY)
    call = model.generate if isinstance(wrapper, nn.DataParallel) else wrapper.generate  # it has none of its own
    with decantkv.attach(wrapper, budget=0.3) as run:
        answer = call(input_ids=IDS, max_new_tokens=8, **tiny.GREEDY)
    assert torch.equal(answer, wanted)
    assert run.report().layers[0]["kept"] == [[18, 18]]
    assert torch.equal(model.generate(IDS, max_new_tokens=8, **tiny.GREEDY), plain), "nothing is left behind"


def test_a_forward_of_the_wrapper_evicts(pair):
    wrapper, model = pair
    for batch, length in ((1, 60), (2, 45), (3, 71)):  # compiled, from the second on shapes are symbols
        ids = tiny.prompt(length, batch=batch)
        caches = [decantkv.EvictingCache(one, budget=0.3) for one in (wrapper, model)]
        with torch.no_grad():
            logits = [one(ids, past_key_values=cache).logits for one, cache in zip(pair, caches, strict=True)]
        assert torch.equal(*logits)
        assert caches[0].nbytes() == caches[1].nbytes() <= 0.31 * caches[0].report().bytes_before


def test_caches_are_saved_for_and_observed_in_the_model(pair, tmp_path):
    wrapper, model = pair
    cache = decantkv.EvictingCache(wrapper, budget=0.3)
    seen = []
    with torch.no_grad():
        model(IDS, past_key_values=cache)
        cache.save(tmp_path / "cache.safetensors", prompt=IDS)
        assert decantkv.EvictingCache.load(tmp_path / "cache.safetensors", wrapper, prompt=IDS).nbytes()
        model(IDS, past_key_values=ObservingCache(wrapper, lambda win: seen.append(win.layer_idx), rows=8))
    assert seen == list(range(model.config.num_hidden_layers))


def test_a_compiled_forward_generates_the_same():
    """As transformers compiles, and others are told to: the forward, which then breaks where layers decide."""
    model, found = tiny.llama(), []
    for forward in (model.forward, torch.compile(model.forward, backend="eager")):
        model.forward = forward
        for batch, length in ((1, 60), (2, 45), (3, 71)):  # from the second on shapes are symbols
            ids, mask = tiny.prompt(length, batch=batch), torch.ones(batch, length).long()
            mask[1:, :9] = 0
            with decantkv.attach(model, budget=20, every=8, decode="own") as run:
                answer = model.generate(ids, attention_mask=mask, max_new_tokens=20, **tiny.GREEDY)
            found.append((answer.tolist(), [layer["kept"] for layer in run.report().layers]))
    assert found[:3] == found[3:]


@pytest.mark.parametrize("given", [nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2)), "a model", None])
def test_what_holds_no_model_is_named(given):
    with pytest.raises(TypeError, match=f"model: expected a transformers PreTrainedModel, got {type(given).__name__}"):
        decantkv.attach(given, budget=0.3)
