"""The models that are fuzzed, each with a twin that judges it: the same weights, attention written out again here.

The twin attends over all tokens ever given, with a mask that hides what the cache under test dropped. It runs in a
thread of its own, where no cache layer can be waiting for an attention call.
"""

from __future__ import annotations

import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from decantkv.cache.evicting_cache import cache_argument
from tests.support.tiny import sharpen

VOCABULARY = 61
WINDOW = 12  # of sliding layers
TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
HYBRID = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "head_dim": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,  # no router, whose choice may flip with the last digit
}
THREE = {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "Llama": ("Llama", {}, ("sdpa", "eager")),
    "Gemma3": ("Gemma3", {**HYBRID, **THREE, "query_pre_attn_scalar": 64}, ("sdpa", "eager")),
    "GptOss": ("GptOss", {**HYBRID, "num_local_experts": 2, "num_experts_per_tok": 2}, ("eager",)),
    "DeepseekV3": ("DeepseekV3", LATENT, ("sdpa", "eager")),
}
CASES = [(name, backend) for name, (*_, backends) in FAMILIES.items() for backend in backends]
ORACLE = "written_out"


@dataclass
class Sight:
    """What the twin's next forward may look at: real keys [B, N], and by layer those that were kept [B, H, N]."""

    real: Tensor
    kept: dict[int, Tensor]


_sight: list[Sight] = []
_judge = ThreadPoolExecutor(1)


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **kw: Any) -> Any:
    """softmax(qk) v with scale, sliding window and learned sinks as the model gives them; [B, q, HQ, Dv]."""
    sight, (new, stored) = _sight[-1], (query.shape[2], key.shape[2])
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    behind = torch.arange(stored - new, stored)[:, None] - torch.arange(stored)
    seen = (behind >= 0) & sight.real[:, None, None]
    if kw.get("sliding_window"):
        seen = seen & (behind < kw["sliding_window"])
    kept = sight.kept.get(module.layer_idx)
    if kept is not None:
        seen = seen & kept.repeat_interleave(query.shape[1] // kept.shape[1], 1)[:, :, None]
    seen = seen | (behind == 0)  # a pad sees itself
    s = (query @ key.mT * kw["scaling"]).masked_fill(~seen, -torch.inf)
    if kw.get("s_aux") is not None:
        sink = kw["s_aux"].view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        return (torch.cat([s, sink], -1).softmax(-1)[..., :-1] @ value).transpose(1, 2), None
    return (s.softmax(-1) @ value).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ORACLE, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ORACLE, lambda *args, **kw: None)


class Subject:
    """A model under test and its twin."""

    def __init__(self, family: str, backend: str) -> None:
        name, options, _ = FAMILIES[family]
        config = f"{name}TextConfig" if name == "Gemma3" else f"{name}Config"
        torch.manual_seed(0)
        made = getattr(transformers, f"{name}ForCausalLM")(
            getattr(transformers, config)(**{**TINY, **options}, attn_implementation=backend)
        )
        self.name, self.backend = family, backend
        self.model: PreTrainedModel = sharpen(made, backend)
        self.model.generation_config.pad_token_id = 0
        self.twin = copy.deepcopy(self.model)
        self.twin.set_attn_implementation(ORACLE)
        self.cache_name = cache_argument(self.model)
        self.latent = name == "DeepseekV3"
        self.sliding = "sliding_window" in options

    def judge(self, ids: Tensor, real: Tensor, cache: DynamicCache | None, kept: dict[int, Tensor]) -> Tensor:
        """[B, q, V]: the twin's logits of new tokens, behind what `cache` holds in full.

        Args:
            real: [B, N] bool of all tokens, the new ones last; kept: [B, H, N] bool by layer.
        """
        return _judge.submit(self._judge, ids, real, cache, kept).result()

    @torch.no_grad()
    def _judge(self, ids: Tensor, real: Tensor, cache: DynamicCache | None, kept: dict[int, Tensor]) -> Tensor:
        position = (real.long().cumsum(-1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        _sight.append(Sight(real, kept))
        try:
            given = {"use_cache": False} if cache is None else {self.cache_name: cache}
            return self.twin(input_ids=ids, position_ids=position, **given).logits
        finally:
            _sight.clear()


@functools.cache
def subject(family: str, backend: str) -> Subject:
    return Subject(family, backend)
