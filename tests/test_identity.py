"""What a saved or living cache depends on, and W_O as the map that a model applies."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

import decantkv
from decantkv.cache.evicting_cache import cache_argument, layer_devices
from decantkv.hf.model_parts import output_projection
from tests.support import tiny
from tests.support.families import build

peft = pytest.importorskip("peft")

IDS = tiny.prompt(60)


def read(model, ids=IDS, **options):
    cache = decantkv.EvictingCache(model, **{"budget": 0.3, **options})
    go_on(model, cache, ids)
    return cache


def go_on(model, cache, ids, **options):
    with torch.no_grad():
        return model(
            ids,
            **{cache_argument(decantkv.cache.evicting_cache.checked_model(model)): cache},
            use_cache=True,
            **options,
        ).logits


def kept(cache):
    return [layer.kept.indices for layer in cache.layers]


def lora(model, *names, targets=("q_proj", "k_proj", "v_proj")):
    for name in names:
        config = peft.LoraConfig(target_modules=list(targets), r=4, init_lora_weights=False)
        if isinstance(model, peft.PeftModel):
            model.add_adapter(name, config)
        else:
            model = peft.get_peft_model(model, config, adapter_name=name)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora" in name:
                weight.mul_(6)
    return model.eval()


def refused(path, model, reason):
    with pytest.raises(ValueError, match=f"model: expected the one whose cache .* holds, got one with .*{reason}"):
        decantkv.EvictingCache.load(path, model)


# -- files


@pytest.mark.parametrize(
    "option",
    [
        {"rms_norm_eps": 1e-3},
        {"head_dim": 8, "attention_bias": False},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
        {"hidden_act": "gelu"},
        {"pretraining_tp": 2},
    ],
    ids=str,
)
def test_a_file_of_another_configuration_is_refused_by_name(tmp_path, option):
    model = tiny.llama()
    read(model).save(tmp_path / "c")
    config = copy.deepcopy(model.config)
    for name, value in option.items():
        setattr(config, name, value)
    if not hasattr(model.config, "rope_parameters") and "rope_parameters" in option:
        pytest.skip("this transformers says it by other names")
    other = transformers.LlamaForCausalLM(config).eval()
    other.load_state_dict(model.state_dict())
    if option == {"head_dim": 8, "attention_bias": False}:  # what the model was made with
        decantkv.EvictingCache.load(tmp_path / "c", other)
    else:
        refused(tmp_path / "c", other, f"another configuration: {next(iter(option))}")


@pytest.mark.parametrize(
    ("family", "name", "value"),
    [
        ("mistral", "sliding_window", 16),
        ("gemma2", "attn_logit_softcapping", 7.0),
        ("gemma2", "query_pre_attn_scalar", 3),
    ],
)
def test_windows_caps_and_head_scales_are_part_of_a_file(tmp_path, family, name, value):
    model = build(family, "eager")
    read(model).save(tmp_path / "c")
    setattr(model.config, name, value)
    refused(tmp_path / "c", model, name)


@pytest.mark.parametrize("change", ["one element", "scale", "epsilon", "frequencies", "dtype of a layer"])
def test_a_file_of_a_model_changed_by_hand_is_refused(tmp_path, change):
    model = tiny.llama()
    read(model).save(tmp_path / "c")
    with torch.no_grad():
        if change == "one element":
            model.model.layers[1].mlp.up_proj.weight[5, 3] += 1e-3
        elif change == "scale":
            model.model.layers[2].self_attn.scaling *= 2
        elif change == "epsilon":
            model.model.norm.variance_epsilon = 1e-2
        elif change == "frequencies":
            model.model.rotary_emb.inv_freq *= 0.5
        else:
            model.model.layers[0].self_attn.double()
    reason = {"one element": "other weights", "dtype of a layer": "other weights", "frequencies": "another buffer"}
    refused(tmp_path / "c", model, reason.get(change, "other numbers in its modules"))


@pytest.mark.parametrize("values", [(3.0, 7.0), (1.0, -1.0)])
def test_elements_that_change_places_are_found(values):
    from decantkv.cache.identity import _digest

    weight = torch.arange(40000, dtype=torch.float32).view(100, 400)
    swapped = weight.clone()
    swapped[3, 7], swapped[90, 2] = weight[90, 2], weight[3, 7]
    assert _digest(weight) != _digest(swapped)
    turned = weight.clone()
    turned[0, 0], turned[0, 1] = values
    assert _digest(turned) != _digest(weight)
    assert _digest(weight.T.contiguous().T) == _digest(weight), "strides are no part of a weight"
    assert _digest(torch.cat([weight.flatten()[:1], weight.flatten()])[1:]) == _digest(weight)


def test_what_changes_no_forward_changes_no_file(tmp_path):
    model = tiny.llama()
    read(model).save(tmp_path / "c")
    config = copy.deepcopy(model.config)
    config.max_position_embeddings, config.use_cache, config.attention_dropout = 4096, False, 0.1
    config.pad_token_id, config.eos_token_id, config.initializer_range = 3, 5, 0.5
    other = transformers.LlamaForCausalLM(config)  # in training mode
    other.load_state_dict(model.state_dict())
    other.gradient_checkpointing_enable()
    other.set_attn_implementation("eager")
    other.generate(tiny.prompt(30), max_new_tokens=2, **tiny.GREEDY)
    decantkv.EvictingCache.load(tmp_path / "c", other)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_frequencies_that_follow_the_last_length_refuse_no_file(tmp_path, kind):
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
    options = {"max_position_embeddings": 32 if kind == "dynamic" else 128}
    legacy = "rope_parameters" not in transformers.LlamaConfig().to_dict()
    theta = {"rope_theta": rope.pop("rope_theta")} if legacy else {}
    model = tiny.llama(**options, **theta, **{"rope_scaling" if legacy else "rope_parameters": rope})
    read(model).save(tmp_path / "c")
    fresh = copy.deepcopy(model)
    go_on(fresh, None, tiny.prompt(10))
    decantkv.EvictingCache.load(tmp_path / "c", fresh)


def test_a_file_that_says_weights_alone_is_refused_with_the_way_out(tmp_path, monkeypatch):
    from decantkv.cache import identity

    model = tiny.llama()
    monkeypatch.setattr(identity, "describe", lambda model: "f" * 64)
    read(model).save(tmp_path / "c")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="of an older version, which does not; read the prompt again"):
        decantkv.EvictingCache.load(tmp_path / "c", model)


def test_a_file_knows_its_adapters(tmp_path):
    model = lora(tiny.llama(), "a", "b")
    model.set_adapter("a")
    read(model).save(tmp_path / "c")
    decantkv.EvictingCache.load(tmp_path / "c", model)
    with model.disable_adapter():
        refused(tmp_path / "c", model, "other active adapters or scales .none; the cache was made with a × 2")
    model.set_adapter("b")
    refused(tmp_path / "c", model, "other active adapters or scales")
    model.set_adapter("a")
    for part in model.modules():
        if isinstance(getattr(part, "scaling", None), dict):
            part.scaling["a"] *= 10
    refused(tmp_path / "c", model, "a × 20")


# -- living caches


@pytest.mark.parametrize("options", [{}, {"decode": "own"}, {"allocation": "ada"}, {"every": 4}], ids=str)
@pytest.mark.parametrize("change", ["set", "disable", "scale", "remove"])
def test_a_cache_is_not_continued_under_other_adapters(options, change):
    model = lora(tiny.llama(), "a", "b")
    model.set_adapter("a")
    base, token = model.get_base_model(), tiny.prompt(1, seed=3)
    cache, twin = read(base, **options), read(base, **options)
    before = [layer.get_seq_length() for layer in cache.layers]
    if change == "set":
        model.set_adapter("b")
    elif change == "disable":
        model.base_model.disable_adapter_layers()
    elif change == "scale":
        scaled = [part for part in model.modules() if isinstance(getattr(part, "scaling", None), dict)]
        scaled[-1].scaling["a"] = 1.0
    else:
        model.unload()
    with pytest.raises(ValueError, match="cache: expected the adapters and scales that were active"):
        go_on(base, cache, token)
    assert [layer.get_seq_length() for layer in cache.layers] == before
    if change in ("set", "disable"):
        model.base_model.enable_adapter_layers()
        model.set_adapter("a")
        assert torch.equal(go_on(base, cache, token), go_on(base, twin, token)), "refused without a trace"


def test_a_callers_cache_under_attach_is_not_continued_under_other_adapters():
    model = lora(tiny.llama(), "a", "b")
    model.set_adapter("a")
    with decantkv.attach(model, budget=0.3):
        cache = transformers.DynamicCache()
        go_on(model, cache, IDS)
        go_on(model, cache, tiny.prompt(1))
        model.set_adapter("b")
        with pytest.raises(ValueError, match="cache: expected the adapters"):
            go_on(model, cache, tiny.prompt(1))


def test_adapters_that_do_not_act_matter_to_no_living_cache():
    base = tiny.llama()
    cache = read(base)
    model = lora(base, "a")
    with pytest.raises(ValueError, match="cache: expected the adapters"):
        go_on(model, cache, tiny.prompt(1))
    with model.disable_adapter():
        go_on(model, cache, tiny.prompt(1))
    cache = read(model)
    model.add_adapter("b", peft.LoraConfig(target_modules=["q_proj"], r=2))
    go_on(model, cache, tiny.prompt(1))
    model.set_adapter("a")
    model.merge_adapter()
    go_on(model, cache, tiny.prompt(1))


def test_caches_of_different_adapters_are_not_joined():
    model = lora(tiny.llama(), "a", "b")
    caches = []
    for name in "ab":
        model.set_adapter(name)
        caches.append(read(model.get_base_model()))
    with pytest.raises(ValueError, match="caches: expected caches of the same active adapters"):
        decantkv.EvictingCache.cat(caches)
    joined = decantkv.EvictingCache.cat(caches[1:])
    model.set_adapter("a")
    with pytest.raises(ValueError, match="cache: expected the adapters"):
        go_on(model, joined, tiny.prompt(1))


# -- W_O, and weights that lie elsewhere


class Int8(nn.Linear):
    """A layer whose weight is floating-point by dtype and a scale away from the map it applies."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False)
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((plain.weight.detach() / scale).round())
        self.register_buffer("weight_scale_inv", scale)

    def forward(self, x):
        return nn.functional.linear(x, self.weight * self.weight_scale_inv)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / torch.arange(1, weight.shape[1] + 1)


def plain_twin(model):
    """The model with each o_proj as the plain layer that does the same."""
    twin = tiny.llama()
    for there, here in zip(twin.model.layers, model.model.layers, strict=True):
        size = here.self_attn.o_proj.in_features
        with torch.no_grad():
            there.self_attn.o_proj.weight.copy_(
                (here.self_attn.o_proj(torch.eye(size)) - here.self_attn.o_proj(torch.zeros(1, size))).T
            )
    return twin


@pytest.mark.parametrize("method", ["criticalkv", "defensivekv"])
@pytest.mark.parametrize("kind", ["lora", "int8", "parametrised", "biased", "overridden"])
def test_values_are_weighed_by_the_map_that_the_model_applies(kind, method):
    model = tiny.llama()
    for layer in model.model.layers:
        attention = layer.self_attn
        if kind == "int8":
            attention.o_proj = Int8(attention.o_proj)
        elif kind == "parametrised":
            nn.utils.parametrize.register_parametrization(attention.o_proj, "weight", Halved())
        elif kind == "biased":
            attention.o_proj.bias = nn.Parameter(torch.full((64,), 100.0))
        elif kind == "overridden":
            weight = attention.o_proj.weight / torch.arange(1, 65.0)
            attention.o_proj.forward = lambda x, weight=weight: nn.functional.linear(x, weight)
    if kind == "lora":
        model = lora(model, "a", targets=["o_proj"]).get_base_model()
    call = [torch.rand(1, heads, 5, 8) for heads in (8, 2)]
    for layer, twin in zip(model.model.layers, plain_twin(model).model.layers, strict=True):
        ours, right = (output_projection(part.self_attn, *call) for part in (layer, twin))
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-4)
    read(model, method=method)


def test_an_output_projection_that_is_no_linear_map_is_refused_by_name():
    class Gated(nn.Linear):
        def forward(self, x):
            return super().forward(x) ** 2

    class Broken(nn.Linear):
        def forward(self, x):
            raise RuntimeError("no kernel here\nsecond line")

    for kind, reason in ((Gated, "that is linear"), (Broken, "can be run on its own.*no kernel here; use a method")):
        model = tiny.llama()
        model.model.layers[0].self_attn.o_proj = kind(64, 64, bias=False)
        with pytest.raises(ValueError, match=f"{reason}") as error:
            output_projection(model.model.layers[0].self_attn, torch.rand(1, 8, 5, 8), torch.rand(1, 2, 5, 8))
        assert kind.__name__ in str(error.value)
        assert "\n" not in str(error.value)


def test_offloaded_models_keep_and_save_what_whole_ones_do(tmp_path):
    pytest.importorskip("accelerate")
    from accelerate import cpu_offload, disk_offload

    whole, ids = tiny.llama(), tiny.prompt(150)
    for i, offload in enumerate(
        (cpu_offload, lambda m: disk_offload(m, str(tmp_path / "weights"), execution_device="cpu"))
    ):
        model = tiny.llama()
        offload(model)
        assert next(model.parameters()).is_meta
        for method in ("dropkv", "criticalkv", "defensivekv", "expected-attention"):
            ours, theirs = read(model, ids, method=method), read(whole, ids, method=method)
            assert all(torch.equal(a, b) for a, b in zip(kept(ours), kept(theirs), strict=True)), method
        ours, path = read(model, ids), tmp_path / f"{i}.safetensors"
        ours.save(path)
        assert next(model.parameters()).is_meta, "loaded for as long as it takes"
        there = decantkv.EvictingCache.load(path, whole)
        read(whole, ids).save(path)
        here = decantkv.EvictingCache.load(path, model)
        token = tiny.prompt(1, seed=4)
        assert torch.equal(go_on(model, here, token), go_on(whole, there, token))
        assert layer_devices(model, 3) == [torch.device("cpu")] * 3
        with torch.no_grad():
            whole.model.layers[2].mlp.down_proj.weight[3, 5] += 1
        refused(path, whole, "other weights")
        whole = tiny.llama()
