"""Variable tracking (vt): follow a chain of assignments through noise, after one worked example."""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from decantkv.lab.eval.ruler.draft import Draft
from decantkv.lab.eval.ruler.niah import NOISE

HOPS = 4
EXAMPLE_TOKENS = 500


@dataclass(frozen=True)
class Tracing:
    """RULER's vt: one chain of four hops, five variables of five capitals.

    Attributes:
        count_tokens: tokens of a plain text, to size the worked example (at most 500 tokens).
    """

    count_tokens: Callable[[str], int]
    step: int = 10
    least: int = 1

    def draft(self, size: int, rng: random.Random, index: int) -> Draft:
        """A prompt with `size` lines of noise, behind a worked example with fresh names."""
        task = _chain(size, letters=5, rng=rng)
        example, names = self._example
        for name in names:
            example = example.replace(name, _name(3, rng))
        return Draft(example + "\n\n\n\n" + task.context, task.question, task.answer_prefix, task.references)

    @cached_property
    def _example(self) -> tuple[str, tuple[str, ...]]:
        """The largest worked example of at most 500 tokens, by steps of five lines, and its variables."""
        rng = random.Random("vt example")
        fitting = shown = None
        for lines in range(5, 10_000, 5):
            draft = _chain(lines, letters=3, rng=rng)
            shown = (
                f"{draft.context}{draft.question}{draft.answer_prefix} {' '.join(draft.references)}",
                draft.references,
            )
            if self.count_tokens(shown[0]) > EXAMPLE_TOKENS:
                break
            fitting = shown
        return fitting or shown or ("", ())


def _name(letters: int, rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_uppercase, k=letters))


def _chain(lines: int, *, letters: int, rng: random.Random) -> Draft:
    names: list[str] = []
    while len(names) < HOPS + 1:
        if (name := _name(letters, rng)) not in names:
            names.append(name)
    value = str(rng.randint(10000, 99999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {after} = VAR {before} " for before, after in pairwise(names)]
    sentences = [NOISE + "\n"] * lines
    if lines <= len(chain):  # too few lines to spread the chain over: spread it over their sentences
        pieces = [piece for line in sentences for piece in line.split(".")]
        sentences = [piece + "." if piece.strip() else piece for piece in pieces]
    for shift, place in enumerate(sorted(rng.sample(range(len(sentences)), len(chain)))):
        sentences.insert(place + shift, chain[shift])
    text = " ".join(sentences).replace(". \n", ".\n")
    return Draft(
        context="Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        + text
        + "\n",
        question=f"Question: Find all variables that are assigned the value {value} in the text above.",
        answer_prefix=f" Answer: According to the chain(s) of variable assignment in the text above, {HOPS + 1} "
        f"variables are assigned the value {value}, they are: ",
        references=tuple(names),
    )
