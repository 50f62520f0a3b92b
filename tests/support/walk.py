"""How far one goes through the package to follow one layer that reads one prompt, on a CPU, by a profiler's hook.

`python -m tests.support.walk` prints the numbers; `python -m tests.support.walk --calls` the calls as well.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import decantkv
from tests.support import tiny

PACKAGE = str(Path(decantkv.__file__).parent)


def calls(layers: int) -> list[tuple[str, str]]:
    """(file, function) of every call inside the package while `generate` reads a prompt; comprehensions left out."""
    model, ids, found = tiny.llama(num_hidden_layers=layers), tiny.prompt(300), []

    def note(frame: FrameType, event: str, arg: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and file.startswith(PACKAGE) and not name.endswith(("comp>", "<genexpr>")):
            found.append((file[len(PACKAGE) + 1 :], name))

    with decantkv.attach(model, method="dropkv", budget=0.2), torch.no_grad():
        model.generate(ids, max_new_tokens=1, **tiny.GREEDY)
        sys.setprofile(note)
        try:
            model.generate(ids, max_new_tokens=1, **tiny.GREEDY)
        finally:
            sys.setprofile(None)
    return found


def of_a_layer() -> list[tuple[str, str]]:
    """The calls of one layer: the second of three, from its `update` on."""
    found = calls(3)
    begins = [i for i, (_, name) in enumerate(found) if name == "EvictingCache.update"]
    return found[begins[1] : begins[2]]


def jumps(walk: list[tuple[str, str]]) -> int:
    """How often a call lies in another file than the one before it."""
    return sum(before[0] != here[0] for before, here in itertools.pairwise(walk))


if __name__ == "__main__":
    walk = of_a_layer()
    rooms = [(file.split("/")[0], name) for file, name in walk]
    if "--calls" in sys.argv:
        for file, name in walk:
            print(f"{file:40} {name}")
    print(f"{jumps(walk)} jumps between files, {jumps(rooms)} between rooms, {len(set(walk))} named functions, "
          f"{len({file for file, _ in walk})} files")  # fmt: skip
