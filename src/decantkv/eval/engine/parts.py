"""Parts of a model that some methods look at: the output projection per query head, and the rotation of RoPE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decantkv.scoring.window import Rotate


def output_projections(model: PreTrainedModel) -> dict[int, Tensor]:
    """Per layer [HQ, Dv, E]: the slice of W_O that each query head's output goes through.

    Raises:
        ValueError: the model's attention modules have no `o_proj`.
    """
    found: dict[int, Tensor] = {}
    for module in model.modules():
        projection = getattr(module, "o_proj", None)
        if isinstance(projection, nn.Linear) and isinstance(index := getattr(module, "layer_idx", None), int):
            weight = projection.weight.detach()  # [E, HQ·Dv]
            found[index] = weight.T.unflatten(0, (-1, int(getattr(module, "head_dim", 0)) or _head_dim(model)))
    if not found:
        raise ValueError(f"model: expected attention modules with o_proj, got {type(model).__name__}")
    return found


def rotation(model: PreTrainedModel) -> Rotate:
    """R(δ): turn vectors that carry this model's RoPE by δ positions, negative ones too.

    Raises:
        ValueError: the model has no rotary embedding over whole heads.
    """
    rotary: Any = next((m for name, m in model.named_modules() if name.endswith("rotary_emb")), None)
    if rotary is None:
        raise ValueError(f"model: expected a rotary embedding, got {type(model).__name__}")
    scaling = float(getattr(rotary, "attention_scaling", 1.0))  # YaRN's factor is no part of the rotation

    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        at = positions if positions.dim() == 2 else positions[None]
        cos, sin = rotary(x.float(), at.to(x.device))
        if cos.shape[-1] != x.shape[-1]:
            raise ValueError(f"model: expected RoPE over all {x.shape[-1]} dimensions, got {cos.shape[-1]}")
        first, second = x.chunk(2, dim=-1)
        turned = x * cos[:, None].to(x.dtype) + torch.cat([-second, first], -1) * sin[:, None].to(x.dtype)
        return turned / scaling

    return rotate


def _head_dim(model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
