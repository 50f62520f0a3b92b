"""Evicted caches in safetensors files: what was kept, by which settings, of which model and prompt.

A file carries a digest over all it says, so that a changed one is refused, and fingerprints of the model's weights
and, where it was given, of the prompt. Writing replaces an older file only when the new one is whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from decantkv.base.options import Span
from decantkv.base.writing import write_whole
from decantkv.cache.file_checks import check_keys, check_layers, understood
from decantkv.cache.files_of_format_1 import translated
from decantkv.cache.layer import EvictingLayer
from decantkv.cache.stores.store import check
from decantkv.methods import known_methods, resolve
from decantkv.scoring.rehearsal import Rehearsal
from decantkv.selection.allocation import known_allocations, resolve_allocation
from decantkv.selection.budget import Budget
from decantkv.settings import Settings

FORMAT = 2
HEADER = 100_000_000  # bytes, the most that safetensors takes


def settings_as_dict(settings: Settings) -> dict[str, Any]:
    """Return settings as JSON can hold them; `settings_from_dict` reads them.

    Raises:
        ValueError: a method or an allocation that is not registered.
    """
    method, rule, budget = settings.method, settings.allocation, settings.budget
    if known_methods().get(method.name) is not type(method):
        raise ValueError(
            f"method: expected one that is registered (decantkv.register_method) in a file, got {type(method).__name__}"
        )
    if type(known_allocations().get(rule.name)) is not type(rule):
        raise ValueError(
            "allocation: expected one that is registered (decantkv.register_allocation) in a file, got "
            f"{type(rule).__name__}"
        )
    return {
        "method": {"name": method.name, **dataclasses.asdict(method)},
        "allocation": {"name": rule.name, **dataclasses.asdict(rule)},
        "budget": budget.tokens if budget.share is None else str(budget.share),
        "sinks": settings.sinks,
        "protect": settings.protect,
        "impl": settings.impl,
        "rehearsal": None if settings.rehearsal is None else dataclasses.asdict(settings.rehearsal),
    }


def settings_from_dict(saved: Mapping[str, Any]) -> Settings:
    """Return the settings that `settings_as_dict` wrote."""
    method, rule = dict(saved["method"]), dict(saved["allocation"])
    kind = type(resolve_allocation(rule.pop("name")))
    budget, spans = saved["budget"], [(int(a), int(b)) for a, b in saved["protect"]]
    protect: Sequence[Span] = spans
    rehearsal = saved.get("rehearsal")
    return Settings.parse(
        resolve(method.pop("name"), **method),
        budget=Budget.of_share(budget) if isinstance(budget, str) else Budget(None, budget),
        allocation=kind(**rule),
        sinks=saved["sinks"],
        protect=protect,
        impl=saved["impl"],
        rehearsal=None if rehearsal is None else Rehearsal(**rehearsal),
    )


def prompt_fingerprint(prompt: Tensor | None) -> str | None:
    """Return a digest of token ids on any device and of any integer type, or None for None."""
    if prompt is None:
        return None
    ids = torch.as_tensor(prompt, device="cpu").to(torch.int64).contiguous()
    return hashlib.sha256(str(list(ids.shape)).encode() + _raw(ids)).hexdigest()


def write(path: str | os.PathLike[str], layers: Sequence[CacheLayerMixin], about: Mapping[str, Any]) -> None:
    """Write layers and a JSON-able description; an interrupted write leaves an older file as it was.

    Raises:
        ValueError: a layer still reads its prompt, or is of a kind that cannot be written.
    """
    tensors, kinds = {}, []
    for i, layer in enumerate(layers):
        kind, state = _state(layer, i)
        kinds.append(kind)
        tensors.update({f"{i}.{name}": x.detach().cpu().contiguous().clone() for name, x in state.items()})
    text = json.dumps({**about, "format": FORMAT, "layers": kinds}, sort_keys=True)
    write_whole(path, save(tensors, {"decantkv": text, "digest": _digest(text, tensors)}))


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the description and the tensors of a file, on the CPU; its mark is read before anything else.

    Raises:
        ValueError: no file of ours, or one that was changed since it was written.
    """
    with _opened(path) as file:  # once, so that a save at the same time changes nothing here
        marks = _marks(file)
        tensors = load(file.read())
    if marks.get("digest") != _digest(marks["decantkv"], tensors):
        raise ValueError(f"path: expected the file as it was written, got {path}, which was changed since")
    with understood(path):
        about: dict[str, Any] = json.loads(marks["decantkv"])
        if about["format"] == 1:
            about, tensors = translated(about, tensors)
        elif about["format"] != FORMAT:
            raise ValueError(f"path: expected a file of format {FORMAT} or 1, got {about['format']}")
    return about, tensors


def read_notes(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `EvictingCache.save` was given as notes, from the file's head alone: its digest is not checked.

    Raises:
        ValueError: no file of ours.
    """
    with _opened(path) as file:
        notes: dict[str, Any] = json.loads(_marks(file)["decantkv"]).get("notes") or {}
    return notes


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """While open, the file; what is wrong with it is said in one line.

    Raises:
        ValueError: no file of ours.
    """
    try:
        with open(path, "rb") as file:
            yield file
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"path: expected a cache that was saved, got {path}: {error}") from error


def _marks(file: BinaryIO) -> dict[str, str]:
    """Return the notes in a safetensors file's header, and put the file back to its start."""
    size = int.from_bytes(file.read(8), "little")
    if not 0 < size <= HEADER or size > os.fstat(file.fileno()).st_size - 8:
        raise ValueError("it has no header")
    marks: dict[str, str] = json.loads(file.read(size)).get("__metadata__") or {}
    if not isinstance(marks.get("decantkv"), str):
        raise ValueError("it is another safetensors file")
    file.seek(0)
    return marks


def restore(
    layers: Sequence[CacheLayerMixin],
    about: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    devices: Sequence[torch.device],
) -> None:
    """Fill empty layers from a file's contents, each on its device.

    Raises:
        ValueError: the model's layers are of other kinds than the file's.
    """
    check_layers(about["layers"], tensors, len(layers))
    rows = set()
    for i, (layer, numbers) in enumerate(zip(layers, about["layers"], strict=True)):
        if type(layer).__name__ != numbers["kind"]:
            raise ValueError(
                f"path: expected {numbers['kind']} as layer {i}, got a {type(layer).__name__} in the model"
            )
        state = {n.partition(".")[2]: x.to(devices[i]) for n, x in tensors.items() if n.partition(".")[0] == str(i)}
        if isinstance(layer, EvictingLayer):
            layer.load_state(numbers, state)
            rows.add(0 if layer.store is None else layer.store.batch)
            continue
        if state:
            check_keys(state["keys"], state["values"], numbers["logical"])
            layer.update(state["keys"], state["values"])
            rows.add(state["keys"].shape[0])
        layer.cumulative_length = numbers["logical"]
    check(len(rows - {0}) <= 1, "rows", "the same number in every layer")


def _state(layer: CacheLayerMixin, index: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a layer as numbers and tensors."""
    kind = type(layer).__name__
    if isinstance(layer, EvictingLayer):
        numbers, state = layer.state()
        return {"kind": kind, **numbers}, state
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    length = getattr(layer, "cumulative_length", 0)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor) or not isinstance(length, int):
        raise ValueError(f"cache: expected layers of keys and values that were used, got {kind} as layer {index}")
    return {"kind": kind, "logical": length}, {"keys": keys, "values": values}


def _digest(text: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}".encode())
        digest.update(_raw(tensors[name]))
    return digest.hexdigest()


def _raw(x: Tensor) -> bytes:
    flat = x.flatten().clone(memory_format=torch.contiguous_format)  # one element may have any stride
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
