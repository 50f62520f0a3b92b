"""What some methods look at beyond an attention call: W_O and the model's own rotation, read from its modules."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from decantkv.scoring.window import Rotate

_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "proj")
_MOVING = ("dynamic", "longrope")  # their frequencies change with the length of the prompt


def output_projection(module: nn.Module, query: Tensor, value: Tensor) -> Tensor:
    """W_O of an attention module as [HQ, Dv, E], a view of its weight.

    Args:
        query: [B, HQ, N, D]; value: [B, H, N, Dv], as the attention got them.

    Raises:
        ValueError: the module has none of the known names, or its weight has another shape or is quantised.
    """
    heads, width = query.shape[1], value.shape[3]
    found = {name: getattr(module, name) for name in _PROJECTIONS if isinstance(getattr(module, name, None), nn.Module)}
    for projection in found.values():
        weight = getattr(projection, "weight", None)
        if isinstance(weight, Tensor) and hasattr(weight, "to_local"):  # spread over processes: this one's heads
            weight = weight.to_local()
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            continue
        # Linear holds [out, in]; GPT-2's Conv1D holds [in, out]
        weight = weight.detach() if type(projection).__name__ == "Conv1D" else weight.detach().T
        if weight.shape[0] == heads * width:
            return weight.view(heads, width, -1) if weight.is_contiguous() else weight.unflatten(0, (heads, width))
    raise ValueError(
        f"method: expected an attention module with a floating-point output projection of {heads}·{width} inputs, "
        f"which this method weighs values by, got {type(module).__name__} with {sorted(found) or 'none'}; "
        "use a method that does without, such as dropkv or snapkv"
    )


def rotation(model: Any) -> Rotate:
    """A function that turns RoPE vectors [B, H, T, D] of this model by [T] or [B, T] positions, negative ones too.

    It runs the model's own `rotary_emb` and `apply_rotary_pos_emb`, and is tried out here: turns must add up.

    Raises:
        ValueError: the model has no such pair, or its frequencies change with the prompt's length.
    """
    embed, apply = getattr(decoder_of(model), "rotary_emb", None), _apply_of(model)
    way_out = "use another method, or its options that do without rotation (renumber=False, future=0)"
    if embed is None or apply is None:
        raise ValueError(
            f"method: expected a model with rotary positions of its own, got {type(model).__name__}; {way_out}"
        )
    kind = getattr(embed, "rope_type", "default")
    kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
    if kinds & set(_MOVING):
        raise ValueError(f"method: expected rotary frequencies that stay as they are, got {sorted(kinds)}; {way_out}")
    rotate = _rotation(embed, apply)
    if not _adds_up(rotate, model):
        raise ValueError(
            f"method: expected rotary positions that add up, got others in {type(model).__name__}; {way_out}"
        )
    return rotate


def decoder_of(model: Any) -> Any:
    """Return the innermost part of a model that reads tokens into a cache; the model itself where no part is one.

    transformers' `get_decoder` may return the whole model, a language model with its head, or the head alone.
    """
    for part in (model.get_decoder() if hasattr(model, "get_decoder") else None, model.base_model):
        if part is not None and part is not model and takes_a_cache(part):
            return decoder_of(part)
    return model


def takes_a_cache(part: Any) -> bool:
    """Return whether a module is a model whose forward is given a cache."""
    names = inspect.signature(part.forward).parameters
    return hasattr(part, "config") and bool({"cache", "past_key_values"} & set(names))


def _apply_of(model: nn.Module) -> Callable[..., Any] | None:
    for name in sorted({type(part).__module__ for part in model.modules()}):
        apply: Callable[..., Any] | None = getattr(sys.modules.get(name), "apply_rotary_pos_emb", None)
        if apply is not None:
            return apply
    return None


def _rotation(embed: nn.Module, apply: Callable[..., Any]) -> Rotate:
    by_layer_type = "layer_type" in inspect.signature(embed.forward).parameters

    @torch.no_grad()
    def rotate(x: Tensor, positions: Tensor) -> Tensor:
        positions = positions.expand(x.shape[0], -1) if positions.dim() == 1 else positions
        wide = x.float()
        options = {"layer_type": "full_attention"} if by_layer_type else {}
        here, start = (embed(wide, p, **options) for p in (positions, torch.zeros_like(positions)))
        scale = start[0].abs().amax()  # YaRN and its like stretch cos and sin alike
        cos, sin = here[0].float() / scale, here[1].float() / scale
        turned = apply(wide[..., : cos.shape[-1]], wide[..., : cos.shape[-1]], cos, sin)[0]
        return torch.cat([turned, wide[..., cos.shape[-1] :]], dim=-1).to(x.dtype)

    return rotate


def _adds_up(rotate: Rotate, model: Any) -> bool:
    """Whether R(3)R(−8)x = R(−5)x, R(0)x = x and R(7)x ≠ x on a vector of the model's head width."""
    config = model.config.get_text_config(decoder=True)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    device = next(model.parameters()).device
    x = torch.linspace(-1, 1, width, device=device).expand(1, 1, 2, width)

    def by(number: int) -> Tensor:
        return torch.full((2,), number, device=device)

    try:
        there = rotate(rotate(x, by(-8)), by(3))
        return (
            torch.allclose(there, rotate(x, by(-5)), atol=1e-5)
            and torch.allclose(rotate(x, by(0)), x, atol=1e-6)
            and not torch.allclose(rotate(x, by(7)), x, atol=1e-3)
        )
    except (RuntimeError, TypeError, ValueError, IndexError):  # another way of calling: not a pair we know
        return False
