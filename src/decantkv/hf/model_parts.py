"""Parts of a model that scoring needs besides the attention call: weights, output projection, rotation."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from decantkv.scoring.window import Rotate

_PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "proj")
_WAY_OUT = "use a method that does without, such as dropkv or snapkv"
_READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROWS = 1024  # unit vectors that a layer is run on at once
_LINEAR = 0.1  # share by which a quantised layer may miss the sum of its parts
MOVING = ("dynamic", "longrope")  # their frequencies change with the length of the prompt


def own_weights(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield each part of a model with its name; its own parameters can be read until the next part is yielded.

    Until then accelerate's hook holds offloaded parameters on their device.
    """
    with _loaded(module):
        yield prefix, module
        for name, part in module.named_children():
            yield from own_weights(part, f"{prefix}.{name}" if prefix else name)


@contextmanager
def _loaded(module: nn.Module) -> Iterator[None]:
    """Return a context in which a module's offloaded parameters are on its device."""
    hook: Any = getattr(module, "_hf_hook", None)
    reach = any(getattr(one, "place_submodules", False) for one in getattr(hook, "hooks", (hook,)))
    if hook is None or not any(x.is_meta for x in module.parameters(recurse=reach)):
        yield
        return
    hook.pre_forward(module)
    try:
        yield
    finally:
        hook.post_forward(module, None)


def device_of(module: nn.Module) -> torch.device | None:
    """Return the device on which a module runs, or None if it has no weights."""
    for part in module.modules():
        for weight in part._parameters.values():
            if weight is not None and not weight.is_meta:
                return weight.device
            hook = getattr(part, "_hf_hook", None)
            places = [getattr(one, "execution_device", None) for one in getattr(hook, "hooks", (hook,))]
            if weight is not None and any(place is not None for place in places):
                return torch.device(next(place for place in places if place is not None))
    return None


def output_projection(module: nn.Module, query: Tensor, value: Tensor) -> Tensor:
    """Return the output projection W_O of an attention module, [HQ, Dv, E].

    For a plain linear layer this is a view of its weight. Any other layer (with adapters, quantised, offloaded) is run
    on unit vectors, and its bias is subtracted.

    Args:
        query: [B, HQ, N, D]; value: [B, H, N, Dv], as the attention got them.

    Raises:
        ValueError: the module has none of the known names, or what it has takes other inputs or is not linear.
    """
    heads, width = query.shape[1], value.shape[3]
    found = {name: getattr(module, name) for name in _PROJECTIONS if isinstance(getattr(module, name, None), nn.Module)}
    for name, projection in found.items():
        weight = _plain_weight(projection)
        if weight is None and _inputs(projection) in (None, heads * width):
            weight = _weight_by_running(projection, heads * width, value, f"{type(module).__name__}.{name}")
        if weight is not None and weight.shape[0] == heads * width:
            return weight.view(heads, width, -1) if weight.is_contiguous() else weight.unflatten(0, (heads, width))
    raise ValueError(
        f"method: expected an attention module with an output projection of {heads}·{width} inputs, which this method "
        f"weighs values by, got {type(module).__name__} with {sorted(found) or 'none'}; {_WAY_OUT}"
    )


def _plain_weight(projection: nn.Module) -> Tensor | None:
    """Return [in, out] of a layer that applies only its weight and bias; None for any other."""
    conv = type(projection).__name__ == "Conv1D"  # GPT-2's holds [in, out], Linear [out, in]
    if not conv and type(projection).forward is not nn.Linear.forward:
        return None
    with _loaded(projection):
        weight: Any = projection.weight
    spread = hasattr(weight, "to_local")  # over processes, whose exchange transformers puts around the forward
    if "forward" in vars(projection) and not spread and not hasattr(projection, "_hf_hook"):
        return None  # somebody has put another forward on this very layer
    if spread:
        weight = weight.to_local()  # this process's heads
    readable = type(weight) in (nn.Parameter, Tensor) and not weight.is_meta and weight.dtype in _READABLE
    if not readable or weight.dim() != 2:
        return None
    plain: Tensor = weight.detach()
    return plain if conv else plain.T


def _inputs(projection: nn.Module) -> int | None:
    """Return the number of inputs in a layer's attributes, or None if it has no such attribute."""
    for name in ("in_features", "infeatures", "nx"):
        if isinstance(size := getattr(projection, name, None), int):
            return size
    return None


@torch.no_grad()
def _weight_by_running(projection: nn.Module, inputs: int, like: Tensor, name: str) -> Tensor:
    """Return [in, out] of a linear layer by running it: its outputs for unit vectors minus its output for zero.

    Raises:
        ValueError: it cannot be run on such vectors, or is not linear.
    """
    unit = torch.eye(inputs, dtype=like.dtype, device=like.device)
    mixed = torch.linspace(-1, 1, 2 * inputs, dtype=torch.float32, device=like.device).sin().view(2, -1)
    try:
        bias = projection(torch.zeros_like(unit[:1]))
        weight = torch.cat([projection(part) - bias for part in unit.split(_ROWS)])
        got = (projection(mixed.to(like.dtype)) - bias).float()
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError, AssertionError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"method: expected an output projection that can be run on its own, which this method weighs values by, "
            f"got {name}, a {type(projection).__name__}: {reason}; {_WAY_OUT}"
        ) from error
    right = mixed @ weight.float()
    if weight.is_meta or not bool((got - right).norm() <= _LINEAR * right.norm()):
        raise ValueError(
            f"method: expected an output projection that is linear, which this method weighs values by, got {name}, "
            f"a {type(projection).__name__}; {_WAY_OUT}"
        )
    return weight


def rotation(model: Any) -> Rotate:
    """Return a function that rotates RoPE vectors [B, H, T, D] of this model by [T] or [B, T] positions, also negative.

    It runs the model's own `rotary_emb` and `apply_rotary_pos_emb`. It is tested here: rotations must add up.

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
    if kinds & set(MOVING):
        raise ValueError(f"method: expected rotary frequencies that stay as they are, got {sorted(kinds)}; {way_out}")
    rotate = _rotation(embed, apply)
    if not _adds_up(rotate, model):
        raise ValueError(
            f"method: expected rotary positions that add up, got others in {type(model).__name__}; {way_out}"
        )
    return rotate


def layer_config(config: Any, layer_idx: int) -> Any:
    """Return the configuration of one layer: the model's own, unless layers have configurations of their own."""
    return config.per_layer_config[layer_idx] if getattr(config, "is_heterogeneous", False) else config


def decoder_of(model: Any) -> Any:
    """Return the innermost part of a model that reads tokens into a cache, or the model itself if it has no such part.

    transformers' `get_decoder` may return the whole model, a language model with its head, or the head alone.
    """
    for part in (model.get_decoder() if hasattr(model, "get_decoder") else None, model.base_model):
        if part is not None and part is not model and takes_a_cache(part):
            return decoder_of(part)
    return model


def cache_argument(module: nn.Module) -> str:
    """Return the name under which this model's forward takes its cache: `cache` from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(module.forward).parameters else "past_key_values"


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
    """Return whether R(3)R(−8)x = R(−5)x, R(0)x = x and R(7)x ≠ x for a vector of the model's head width."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ()
    config = layer_config(config, list(kinds).index("full_attention") if "full_attention" in kinds else 0)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    device = next((x.device for x in model.parameters() if not x.is_meta), torch.device("cpu"))
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
