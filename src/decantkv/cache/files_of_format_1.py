"""Files of format 1, in which a layer's tensors had other names: read as if they were of the format of today."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PARTS = {
    "keys": "store", "values": "store", "valid": "store", "starts": "store", "lens": "store", "numbers": "store",
    "real": "store", "indices": "kept", "counts": "kept", "frame": "answer", "recent": "answer",
}  # fmt: skip
KINDS = {"RaggedLayer", "EvictingLayer"}


def translated(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the tensors under today's names.

    Raises:
        KeyError: a tensor of another name.
    """
    layers, now = [], {name: x for name, x in tensors.items() if not name.partition(".")[0].isdecimal()}
    for i, numbers in enumerate(about["layers"]):
        state = {n.partition(".")[2]: x for n, x in tensors.items() if n.partition(".")[0] == str(i)}
        if numbers["kind"] not in KINDS:
            layers.append(numbers)
            now |= {f"{i}.{name}": x for name, x in state.items()}
            continue
        layers.append({"kind": "EvictingLayer", "logical": numbers["logical"], "rows": numbers["rows"]})
        now |= {f"{i}.{PARTS[name]}.{name}": x for name, x in state.items()}
        if "frame" in state:
            now[f"{i}.answer.renewed"] = torch.tensor([numbers["renewed"]], device="cpu")
        if "keys" in state and "lens" not in state:
            settled = next((state[name] for name in ("indices", "valid") if name in state), state["keys"]).shape[2]
            now[f"{i}.store.numbers"] = torch.tensor([settled, int("indices" not in state)], device="cpu")
    return {**about, "layers": layers}, now
