"""A method of one's own: a class with a score, registered under a name that works wherever names do."""

import sys
from dataclasses import dataclass
from typing import ClassVar

import decantkv
from decantkv.hf.loading import load


@decantkv.register_method
@dataclass(frozen=True)
class Loudest(decantkv.Method):
    """Keep the tokens with the largest values, and the last four."""

    name: ClassVar[str] = "loudest"
    kind: ClassVar[str] = "heuristic"
    source: ClassVar[str] = "this file"
    formula: ClassVar[str] = "‖v‖"
    window: int = 4

    def score(self, win, *, impl="auto"):
        return win.v.norm(dim=-1).float()  # [B, H, N], higher = keep


model, tokenizer = load(sys.argv[1])
inputs = tokenizer("The number is 4417. " + "The sky is blue. " * 60, return_tensors="pt").to(model.device)
with decantkv.attach(model, method="loudest", budget="20%", allocation="ada") as run:
    model.generate(**inputs, max_new_tokens=4, do_sample=False)
print(run.report())
