"""What eviction cannot follow is refused by name at `attach` and `EvictingCache`, before a forward."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from transformers import DynamicCache

import decantkv
from decantkv.cache.evicting_cache import EvictingLayer, cache_argument, is_full
from decantkv.hf.attention_hook import UnsupportedModelError
from decantkv.hf.model_parts import decoder_of
from tests.support import tiny
from tests.support.families import at_least
from tests.support.judge import logits_with

STEPS = [torch.tensor([[7]]), torch.tensor([[3, 5, 9]]), torch.tensor([[2]])]
BART = {
    "vocab_size": tiny.VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "pad_token_id": 0,
}
T5 = {
    "vocab_size": tiny.VOCABULARY,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "pad_token_id": 0,
}
SMALL = {"vocab_size": tiny.VOCABULARY, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
GPT2 = {"vocab_size": tiny.VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2}


def made(name, **options):
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    return cls(cls.config_class(**options)).eval()


def encoder_decoder():
    bert = transformers.BertConfig(**SMALL, num_attention_heads=2)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(bert, transformers.GPT2Config(**GPT2))
    return transformers.EncoderDecoderModel(config)


def florence():
    vision = {"depths": [1], "embed_dim": [8], "num_heads": [1], "num_groups": [1], "patch_size": [7]}
    vision |= {"patch_stride": [4], "patch_padding": [3], "patch_prenorm": [False], "projection_dim": 32}
    config = transformers.Florence2Config(vision_config=vision, text_config={"model_type": "bart", **BART})
    return transformers.Florence2ForConditionalGeneration(config)


WITH_ENCODERS = {
    "t5": lambda: made("T5ForConditionalGeneration", **T5),
    "t5's decoder": lambda: made("T5ForConditionalGeneration", **T5).decoder,
    "umt5": lambda: made("UMT5ForConditionalGeneration", **T5),
    "bart": lambda: made("BartForConditionalGeneration", **BART),
    "mbart": lambda: made("MBartForConditionalGeneration", **BART),
    "marian": lambda: made("MarianMTModel", **BART),
    "pegasus": lambda: made("PegasusForConditionalGeneration", **BART),
    "whisper": lambda: made("WhisperForConditionalGeneration", **BART, num_mel_bins=8, max_source_positions=20),
    "bert and gpt2": encoder_decoder,
    "florence": florence,
    "gpt2 with cross-attention": lambda: made("GPT2LMHeadModel", **GPT2, add_cross_attention=True),
}


@pytest.mark.parametrize("name", WITH_ENCODERS)
def test_a_model_with_an_encoder_is_refused_by_name(name):
    if name == "florence" and not hasattr(transformers, "Florence2Config"):
        pytest.skip("not in this transformers")
    model = WITH_ENCODERS[name]()
    for enter in (decantkv.attach, decantkv.EvictingCache):
        with pytest.raises(UnsupportedModelError, match=f"model: expected .*, got {type(model).__name__}"):
            enter(model, budget=1.0)


def gemma3n():
    options = {**tiny.BASE, "vocab_size_per_layer_input": tiny.VOCABULARY, "hidden_size_per_layer_input": 8}
    options |= {"num_hidden_layers": 8, "intermediate_size": [96] * 8, "num_kv_shared_layers": 4, "head_dim": 16}
    options |= {"layer_types": ["full_attention", "sliding_attention"] * 4, "sliding_window": 32, "laurel_rank": 8}
    options |= {"altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 8}
    return made("Gemma3nForCausalLM", **options)


def gemma4():
    if not at_least("5.12"):
        pytest.skip("not in this transformers")
    options = {**tiny.BASE, "vocab_size_per_layer_input": tiny.VOCABULARY, "hidden_size_per_layer_input": 8}
    options |= {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "head_dim": 16, "global_head_dim": 16}
    options |= {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 32}
    return made("Gemma4ForCausalLM", **options)


SHARING = {"gemma3n": gemma3n, "gemma4": gemma4}


@pytest.mark.parametrize("make", SHARING.values(), ids=SHARING)
def test_layers_that_share_keys_get_the_untouched_models_logits_or_a_refusal(make):
    model, ids = make(), {"input_ids": tiny.prompt(100)}
    full = logits_with(model, DynamicCache(config=model.config), ids, STEPS)
    for settings in ({}, {"allocation": "shared"}, {"decode": "model"}, {"reuse_lse": True}):
        cache = decantkv.EvictingCache(model, budget=1.0, **settings)
        torch.testing.assert_close(logits_with(model, cache, ids, STEPS), full, rtol=0, atol=1e-5)
    for settings in ({"decode": "own"}, {"allocation": "ada"}, {"allocation": "heads"}, {"allocation": "pyramid"}):
        for enter in (decantkv.attach, decantkv.EvictingCache):
            with pytest.raises(ValueError, match=f"for {type(model).__name__}, whose later layers read an earlier"):
                enter(model, budget=1.0, **settings)


@pytest.mark.parametrize("make", SHARING.values(), ids=SHARING)
def test_filler_that_a_sharing_layer_would_read_is_refused(make):
    model, rows = make(), tiny.left_padded([tiny.prompt(100), tiny.prompt(40, seed=1)])
    with pytest.raises(ValueError, match="whose keys later layers read again, got rows of unequal length"):
        logits_with(model, decantkv.EvictingCache(model, budget=0.5), rows, [])
    full = logits_with(model, DynamicCache(config=model.config), rows, [STEPS[0].expand(2, -1)])
    cache = decantkv.EvictingCache(model, budget=1.0)
    torch.testing.assert_close(logits_with(model, cache, rows, [STEPS[0].expand(2, -1)]), full, rtol=0, atol=1e-5)


def test_keys_shared_in_a_way_that_is_not_known_are_refused(monkeypatch):
    from transformers.models.llama import modeling_llama

    model, forward = tiny.llama(), modeling_llama.LlamaAttention.forward

    def sharing(self, hidden_states, *args, shared_kv_states=None, **kwargs):
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", sharing)
    for enter in (decantkv.attach, decantkv.EvictingCache):
        with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM, whose layers read one another's keys"):
            enter(model, budget=0.5)


def mllama():
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_global_layers": 1}
    vision |= {"attention_heads": 2, "image_size": 16, "patch_size": 8, "max_num_tiles": 1}
    vision |= {"vision_output_dim": 64, "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]]}
    text = {**tiny.BASE, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "bos_token_id": 1}
    text["rope_parameters" if at_least("5.0") else "rope_scaling"] = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.MllamaConfig(vision_config=vision, text_config=text, image_token_index=190)
    torch.manual_seed(0)
    return transformers.MllamaForConditionalGeneration(config).eval()


def test_layers_that_hold_an_images_keys_are_left_alone():
    model = mllama()
    inputs = {
        "input_ids": tiny.prompt(60),
        "attention_mask": torch.ones(1, 60, dtype=torch.long),
        "pixel_values": torch.randn(1, 1, 1, 3, 16, 16),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, 1, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, 60, 1, 1, dtype=torch.long),
    }
    options = {**inputs, "max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True, **tiny.GREEDY}
    plain = model.generate(**options)
    with decantkv.attach(model, budget=1.0):
        assert torch.equal(torch.stack(model.generate(**options).logits), torch.stack(plain.logits))
    with decantkv.attach(model, budget=0.3) as run:
        cache = model.generate(**options)[cache_argument(model)]
    assert [isinstance(layer, EvictingLayer) for layer in cache.layers] == [True, False, True, False]
    assert {layer["layer"] for layer in run.report().layers} == {0, 2}
    assert cache.layers[1].keys.shape[2] == plain[cache_argument(model)].layers[1].keys.shape[2]


def test_attention_to_something_else_than_the_prompt_is_refused():
    model = tiny.llama()
    cache = decantkv.EvictingCache(model, budget=0.5)
    image, query = torch.zeros(1, 2, 50, 8), torch.zeros(1, 8, 30, 8)
    keys, values = cache.update(image, image, 2)
    function = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(UnsupportedModelError, match="LlamaAttention in layer 2 with 50 keys for 30 tokens"):
        function(model.model.layers[2].self_attn, query, keys, values, None, is_causal=False)
    assert cache.layers[2].stored == 0


def modernbert():
    options = {**SMALL, "num_attention_heads": 2, "local_attention": 32, "pad_token_id": 0, "eos_token_id": None}
    options |= {"bos_token_id": 1, "cls_token_id": 1, "sep_token_id": 2}
    return made("ModernBertDecoderForCausalLM", **options, layer_types=["full_attention", "sliding_attention"])


def test_a_decoder_that_the_model_names_wrongly_is_found():
    model, ids = modernbert(), tiny.prompt(80)
    assert decoder_of(model) is model.model
    cache = decantkv.EvictingCache(model, budget=0.3)
    alone = model.generate(ids, max_new_tokens=5, **{cache_argument(model): cache}, **tiny.GREEDY)
    with decantkv.attach(model, budget=0.3) as run:
        assert torch.equal(model.generate(ids, max_new_tokens=5, **tiny.GREEDY), alone)
    assert run.report().evictions == 1


def test_a_model_that_hands_its_prompt_to_a_part_is_refused(monkeypatch):
    class Outer(type(tiny.llama())):
        base_model_prefix = "nothing"

        def get_decoder(self):
            return self.lm_head

        def forward(self, input_ids):
            return self.model(input_ids)

    model = Outer(tiny.llama().config)
    for enter in (decantkv.attach, decantkv.EvictingCache):
        with pytest.raises(UnsupportedModelError, match="Outer, which hands its prompts to a part; give that part"):
            enter(model, budget=0.5)


def test_full_attention_inside_another_kind_of_layer_is_named():
    if not at_least("5.17"):
        pytest.skip("before, this model brought a cache of its own")
    model = made("FalconH1ForCausalLM", **tiny.BASE, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8)
    for enter in (decantkv.attach, decantkv.EvictingCache):
        with pytest.raises(ValueError, match="eviction does not know: LinearAttentionAndFullAttentionLayer"):
            enter(model, budget=0.5)


@pytest.mark.parametrize("layers", [1, 3])
def test_a_callers_cache_goes_on_after_the_run_as_within_it(layers):
    model, inputs = tiny.llama(num_hidden_layers=layers), tiny.left_padded([tiny.prompt(90), tiny.prompt(20, seed=1)])
    name, cache = cache_argument(model), DynamicCache(config=tiny.llama(num_hidden_layers=layers).config)
    later = torch.cat([inputs["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
    step = {"input_ids": torch.full((2, 1), 7), "attention_mask": later, "position_ids": (later.cumsum(-1) - 1)[:, -1:]}
    with torch.no_grad():
        with decantkv.attach(model, budget=0.5):
            logits_with(model, cache, inputs, [])
            within = model(**step, **{name: copy.deepcopy(cache)}).logits
            fork = copy.deepcopy(cache)
        for after in (cache, fork):
            assert torch.equal(model(**step, **{name: after}).logits, within)
    assert cache.layers[0].stored == 46


def test_caches_that_do_not_evict_are_counted():
    model, ids = tiny.llama(), tiny.prompt(60)
    name = cache_argument(model)
    before = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, **{name: before})
        with decantkv.attach(model, budget=0.5) as run:
            model(tiny.prompt(9), **{name: before})
            model(tiny.prompt(1), **{name: before})
            static = transformers.StaticCache(config=model.config, max_cache_len=200)
            model.generate(ids, max_new_tokens=3, **{name: static}, **tiny.GREEDY)
            assert run.report().passed_over == {"a DynamicCache that held tokens already": 1, "a StaticCache": 1}
            model(ids, use_cache=True)
    assert "1 prompts were not evicted: they went into a StaticCache" in str(run.report())


def test_a_cache_is_found_under_every_name_and_place():
    model, ids = tiny.llama(), tiny.prompt(60)
    with torch.no_grad(), decantkv.attach(model, budget=0.5) as run:
        model.model(ids, past_key_values=(named := DynamicCache(config=model.config)))
        model.model(ids, None, None, (placed := DynamicCache(config=model.config)))
    assert named.layers[0].stored == placed.layers[0].stored == 30
    assert len(run.report().layers) == 6


@pytest.mark.parametrize("first", [1, 3])
def test_an_answer_is_evicted_after_a_prompt_of_one_token(first):
    model = tiny.llama()
    with decantkv.attach(model, budget=8, every=16) as run:
        model.generate(tiny.prompt(first), max_new_tokens=40, **tiny.GREEDY)
    assert run.report().rounds == 3 * 2
    cache = decantkv.EvictingCache(model, budget=8, every=16, decode_budget=10)
    logits_with(model, cache, {"input_ids": tiny.prompt(1)}, list(tiny.prompt(40).split(1, 1)))
    assert cache.layers[0].stored < 10 + 16
    assert cache.report().rounds == 3 * 2


def test_drafts_by_the_attached_model_are_refused_before_a_forward():
    model, ids = tiny.llama(num_hidden_layers=4), tiny.prompt(60)
    forwards = []
    hook = model.model.register_forward_pre_hook(lambda *a: forwards.append(1))
    eos = {} if at_least("5.17") else {"eos_token_id": tiny.VOCABULARY + 1}
    with decantkv.attach(model, budget=0.3), decantkv.attach(drafter := tiny.llama(seed=1), budget=0.3):
        with pytest.raises(ValueError, match="assistant_early_exit: expected none beside attach"):
            model.generate(ids, assistant_early_exit=1, max_new_tokens=5, **eos, **tiny.GREEDY)
        for assistant in (model, drafter):
            with pytest.raises(ValueError, match="assistant_model: expected a model that is not attached"):
                model.generate(ids, assistant_model=assistant, max_new_tokens=5, **eos, **tiny.GREEDY)
    hook.remove()
    assert not forwards
    assert model.config.num_hidden_layers == 4


@pytest.mark.parametrize("settings", [{"decode": "own"}, {"allocation": "ada"}], ids=str)
def test_weights_that_own_attention_cannot_give_are_refused(settings):
    model, ids = tiny.llama(attention="eager"), tiny.prompt(60)
    options = {"max_new_tokens": 3, "output_attentions": True, "return_dict_in_generate": True, **tiny.GREEDY}
    with decantkv.attach(model, budget=0.3, decode="model"):
        assert [len(step) for step in model.generate(ids, **options).attentions] == [3, 3, 3]
    with decantkv.attach(model, budget=0.3, **settings):
        assert model.generate(ids, max_new_tokens=3, **tiny.GREEDY).shape == (1, 63)
        with pytest.raises(ValueError, match="output_attentions: expected False where cache layers attend"):
            model.generate(ids, **options)


def test_an_encoders_keys_given_to_a_lone_decoder_are_refused():
    model = made("BartForCausalLM", **BART)
    with torch.no_grad(), decantkv.attach(model, budget=1.0):
        model(tiny.prompt(20), use_cache=True)
        with pytest.raises(ValueError, match="encoder_hidden_states: expected none beside"):
            model(tiny.prompt(20), encoder_hidden_states=torch.zeros(1, 9, 32), use_cache=True)
    cache = decantkv.EvictingCache(model, budget=1.0)
    given = {cache_argument(model): cache, "encoder_hidden_states": torch.zeros(1, 9, 32)}
    with torch.no_grad(), pytest.raises(ValueError, match="encoder_hidden_states: expected none beside an evicting"):
        model(tiny.prompt(20), **given)
    assert cache.get_seq_length() == 0


@pytest.mark.skipif(not at_least("5.24"), reason="has no such layers")
def test_a_wide_window_beside_a_linear_layers_state_is_left_to_transformers():
    """Replaced by a layer of ours, the state that the model keeps in it would have no home."""
    kinds = {"layer_types": ["hybrid_sliding", "hybrid"], "num_hidden_layers": 2}
    config = transformers.InklingTextConfig(sliding_window_size=512, max_position_embeddings=512, **kinds)
    layers = DynamicCache(config=config).layers
    assert layers[0].sliding_window >= config.max_position_embeddings
    assert not any(is_full(layer, config) for layer in layers)
