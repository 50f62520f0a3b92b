"""How far a model's positions reach, however its RoPE is scaled."""

from __future__ import annotations

import pytest
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig

from decantkv.hf.context import check_context, context_limit

OWN = {"max_position_embeddings": 4096}
SCALED = [
    ({}, 4096),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}, 4096),
    ({"type": "yarn", "factor": 4.0}, 16384),
    ({"rope_type": "linear", "factor": 2.0}, 8192),
    ({"rope_type": "dynamic", "factor": 2.0}, None),
    ({"rope_type": "longrope", "factor": 32.0, "original_max_position_embeddings": 128}, 4096),
    ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}, 4096),
]


@pytest.mark.parametrize(("rope", "limit"), SCALED, ids=str)
def test_the_limit_with_scaled_rope(rope, limit):
    config = LlamaConfig(**OWN)
    config.rope_scaling = rope or None
    config.rope_parameters = rope or None
    assert context_limit(config) == limit


def test_other_configurations():
    assert context_limit(GPT2Config(n_positions=300)) == 300
    assert context_limit(Gemma3TextConfig(**OWN)) == 4096


def test_one_token_too_many():
    check_context(LlamaConfig(**OWN), 4096, "length", beyond=False)
    check_context(LlamaConfig(**OWN), 4097, "length", beyond=True)
    with pytest.raises(ValueError, match=r"length: expected at most the model's 4,096 tokens .* got 4,097"):
        check_context(LlamaConfig(**OWN), 4097, "length", beyond=False)
