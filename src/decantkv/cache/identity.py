"""The identity of a stored cache's model: weights, tables, configuration and active adapters.

`describe` says it as JSON can hold it, and `difference` names the first thing in which two descriptions differ.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from decantkv.hf.model_parts import MOVING, own_weights

Adapters = tuple[tuple[tuple[str, float], ...], ...]

_BLOCK = 1024  # words of 8 bytes that one row of a tensor's digest sums up
_PREFIX = 256  # first elements that are compared of a buffer that no checkpoint holds
_TOLERANCE = 1e-5  # between such elements, which each device computes with its own rounding

# what a configuration says of a checkpoint, of training, of outputs or of special tokens, and nothing of a forward
_IDLE = {
    "architectures", "auto_map", "bos_token_id", "decoder_start_token_id", "dtype", "eos_token_id",
    "finetuning_task", "gradient_checkpointing", "id2label", "label2id", "name_or_path", "num_labels",
    "pad_token_id", "padding_idx", "prefix", "problem_type", "return_dict", "router_aux_loss_coef", "sep_token_id",
    "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript", "training", "transformers_version",
    "use_cache",
}  # fmt: skip


def describe(model: nn.Module) -> dict[str, Any]:
    """Everything known of a transformers model that decides what its keys are and how a forward goes on from them.

    Weights are compared by sums over all of their bits, so that every change of one element is found, wherever the
    weights lie. What is no weight is compared by the configuration, by the numbers that modules hold, and by the
    first elements of buffers that are computed and not loaded.

    Raises:
        ValueError: a weight has no data, not even through an offloading hook of accelerate.
    """
    weights, tables = _tensors(model)
    return {
        "weights": weights,
        "tables": tables,
        "adapters": [[name, [list(pair) for pair in pairs]] for name, pairs in _named_adapters(model)],
        "configuration": _configuration(model),
        "modules": _numbers_of_modules(model),
        "transformers": transformers.__version__,
    }


def difference(there: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Return in what the model `here` differs from the one `there`, or None if nothing is known to differ."""
    if there["adapters"] != here["adapters"]:
        return (
            f"other active adapters or scales ({_adapters_text(here)}; the cache was made with {_adapters_text(there)})"
        )
    if there["weights"] != here["weights"]:
        return "other weights, shapes or dtypes"
    same_version = there["transformers"] == here["transformers"]
    was, now = there["configuration"], here["configuration"]
    names = sorted({*was, *now} if same_version else {*was} & {*now})
    if differ := [name for name in names if was.get(name) != now.get(name)]:
        return "another configuration: " + ", ".join(
            f"{name} {now.get(name)!r} (the cache was made with {was.get(name)!r})" for name in differ[:3]
        )
    for name in sorted({*there["tables"]} & {*here["tables"]}):
        if not _close(there["tables"][name], here["tables"][name]):
            return f"another buffer {name}"
    if same_version and there["modules"] != here["modules"]:
        return "other numbers in its modules, such as scales, epsilons or windows"
    return None


def active_adapters(model: nn.Module) -> Adapters:
    """Which adapters act in each of a model's adapted layers, by which scales; () where none acts.

    Cheap enough for every forward: a model that never had an adapter costs one look, others a look at each layer.
    """
    config = vars(model).get("peft_config")
    if not config:
        return ()
    found = _adapted.get(model)
    if found is None or not found.holds(config):
        found = _adapted[model] = _Adapted(model, config)
    return tuple(acting for layer in found.layers() if (acting := _acting(layer)))


class _Adapted:
    """The adapted layers of a model, looked up once."""

    def __init__(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        self._adapters = tuple(config)
        named = [(name, part) for name, part in model.named_modules() if _is_adapted(part)]
        self._layers = [weakref.ref(part) for _, part in named]
        self._first = None
        if named:
            parent, _, self._name = named[0][0].rpartition(".")
            self._first = weakref.ref(model.get_submodule(parent))

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Return whether the adapters are the same, and still in place."""
        parent = None if self._first is None else self._first()
        return parent is not None and (
            self._adapters == tuple(config) and getattr(parent, self._name, None) is self._layers[0]()
        )

    def layers(self) -> Iterator[nn.Module]:
        """Those that still exist."""
        return (layer for reference in self._layers if (layer := reference()) is not None)


_adapted: weakref.WeakKeyDictionary[nn.Module, _Adapted] = weakref.WeakKeyDictionary()


def _is_adapted(part: nn.Module) -> bool:
    return hasattr(part, "merged_adapters") and hasattr(part, "active_adapters")


def _acting(layer: nn.Module) -> tuple[tuple[str, float], ...]:
    """The adapters that act in an adapted layer, merged or not, each with its scale."""
    held = vars(layer)  # faster than PEFT's properties, which say the same
    if held.get("_disable_adapters"):
        return ()
    names, scaling = held.get("merged_adapters") or held.get("_active_adapter", ()), held.get("scaling") or {}
    return tuple([(name, scaling.get(name, 1.0)) for name in ((names,) if type(names) is str else names)])


def _named_adapters(model: nn.Module) -> list[tuple[str, tuple[tuple[str, float], ...]]]:
    found = [(name, _acting(part)) for name, part in model.named_modules() if _is_adapted(part)]
    return [(name.replace("_orig_mod.", ""), pairs) for name, pairs in found if pairs]


def _adapters_text(description: Mapping[str, Any]) -> str:
    found = sorted({f"{name} × {scale:g}" for _, pairs in description["adapters"] for name, scale in pairs})
    return ", ".join(found) or "none"


def _tensors(model: nn.Module) -> tuple[str, dict[str, list[float]]]:
    """A digest of parameters and persistent buffers; the first elements of the other buffers."""
    total, tables = hashlib.sha256(), dict[str, list[float]]()
    lasting = {id(x): b"" for x in model.parameters() if not x.is_meta}  # tied weights are read once
    for prefix, part in own_weights(model):
        idle = part._non_persistent_buffers_set
        for name, x in (*part._parameters.items(), *part._buffers.items()):
            if x is None:
                continue
            full = f"{prefix}.{name}".replace("_orig_mod.", "")
            if x.is_meta:
                raise ValueError(f"model: expected weights that can be read, got {full} on the meta device")
            if name in part._buffers and name in idle:
                if not (_turns_with_length(part) and name.endswith("inv_freq")) or "original" in name:
                    tables[full] = x.detach().flatten()[:_PREFIX].float().cpu().tolist()
                continue
            digest = lasting.get(id(x)) or _digest(x.detach())
            if id(x) in lasting:
                lasting[id(x)] = digest
            total.update(f"{full} {list(x.shape)} {x.dtype} ".encode() + digest)
    return total.hexdigest(), tables


def _turns_with_length(part: nn.Module) -> bool:
    """Return whether a module's rotary frequencies depend on the length of the last forward."""
    kind = getattr(part, "rope_type", "default")
    return bool({*(kind.values() if isinstance(kind, dict) else (kind,))} & {*MOVING})


def _digest(x: Tensor) -> bytes:
    """A digest of a tensor's bits, the same on every device: exact sums over its rows and columns of 8-byte words."""
    if hasattr(x, "to_local"):
        x = x.to_local()
    if hasattr(x, "__tensor_flatten__"):  # quantised: the tensors inside
        names, _ = x.__tensor_flatten__()
        return b"".join(_digest(getattr(x, name)) for name in names)
    x = x.flatten().clone(memory_format=torch.contiguous_format) if x.numel() == 1 else x  # it may have any stride
    raw = x.contiguous().flatten().view(torch.uint8) if x.numel() else x.new_zeros(0, dtype=torch.uint8)
    raw = raw.clone() if raw.storage_offset() % 8 else raw
    whole = raw.numel() // (8 * _BLOCK) * 8 * _BLOCK
    rest, digest = raw[whole:].cpu(), hashlib.sha256()
    if whole:
        words = raw[:whole].view(torch.int64).view(-1, _BLOCK)
        for sums in (words.sum(1), words.sum(0)):
            digest.update(sums.cpu().numpy().tobytes())
    digest.update(rest.numpy().tobytes())
    return digest.digest()


def _configuration(model: Any) -> dict[str, Any]:
    """Return the entries of the text decoder's configuration that a forward depends on."""
    said = model.config.get_text_config(decoder=True).to_dict()
    idle = _IDLE | {*transformers.GenerationConfig().to_dict()}
    rope = str(said.get("rope_parameters") or said.get("rope_scaling") or "")
    if not any(kind in rope for kind in MOVING):  # else frequencies follow from it
        idle = idle | {"max_position_embeddings"}
    return {
        name: _plain(value)
        for name, value in said.items()
        if name not in idle and not name.startswith(("_", "init", "output_")) and not _of_training(name)
    }


def _of_training(name: str) -> bool:
    return "drop" in name or name.endswith("pdrop")


def _plain(value: Any) -> Any:
    """A value as it comes back from JSON."""
    if isinstance(value, Mapping):
        return {str(name): _plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def _numbers_of_modules(model: nn.Module) -> str:
    """A digest of the plain numbers that modules keep beside their tensors: scales, epsilons, windows."""
    digest = hashlib.sha256()
    for name, part in model.named_modules():
        said = {
            key: value
            for key, value in vars(part).items()
            if isinstance(value, (bool, int, float))
            and not key.startswith("_")
            and key not in _IDLE
            and not _of_training(key)
            and "max_seq_len" not in key
            and key != "max_position_embeddings"
        }
        if said and not isinstance(part, nn.modules.dropout._DropoutNd):
            digest.update(f"{name.replace('_orig_mod.', '')} {sorted(said.items())}".encode())
    return digest.hexdigest()


def _close(there: list[float], here: list[float]) -> bool:
    """Return whether the elements that both have agree."""
    size = min(len(there), len(here))
    a, b = torch.tensor(there[:size], dtype=torch.float64), torch.tensor(here[:size], dtype=torch.float64)
    return bool(torch.allclose(a, b, rtol=_TOLERANCE, atol=0, equal_nan=True))
