"""Needles in a haystack: eight of RULER's thirteen tasks (arXiv 2404.06654; prompts and draws as NVIDIA/RULER's)."""

from __future__ import annotations

import random
from dataclasses import dataclass

from decantkv.lab.eval.ruler.draft import Draft
from decantkv.lab.eval.ruler.haystack import Haystack
from decantkv.lab.eval.ruler.lexicon import draw

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SHUFFLE_SEED = 42  # RULER shuffles needles with the run's seed anew for every sample
DEPTHS = tuple(round(100 * i / 39) for i in range(40))  # per cent


@dataclass(frozen=True)
class Niah:
    """One needle task.

    Attributes:
        kind: the haystack, "noise", "essay" or "needle" (distractor needles only).
        key_type, value_type: "words", "numbers" or "uuids".
        keys, values, queries: needles' keys, values per key, keys asked for.
        haystack: the text when `kind` is "essay".
    """

    kind: str
    key_type: str
    value_type: str
    keys: int = 1
    values: int = 1
    queries: int = 1
    haystack: Haystack | None = None

    @property
    def step(self) -> int:
        """Units (words, lines) by which a search for the size begins."""
        return 100 if self.kind == "essay" else 5

    @property
    def least(self) -> int:
        """The smallest haystack that holds all needles."""
        return max(self.step, self.keys * self.values)

    def draft(self, size: int, rng: random.Random, index: int) -> Draft:
        """A prompt with `size` words (essay) or lines (noise, needle) of haystack."""
        keys, values, needles = [], [], []
        for _ in range(self.keys):
            keys.append(draw(self.key_type, rng))
            values.append([draw(self.value_type, rng) for _ in range(self.values)])
            needles += [self._needle(keys[-1], value) for value in values[-1]]
        random.Random(SHUFFLE_SEED).shuffle(needles)
        text = self._in_essay(size, needles, rng, index) if self.kind == "essay" else self._in_lines(size, needles, rng)
        asked = rng.sample(range(self.keys), self.queries)
        names = [keys[i] for i in asked]
        query = names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]
        return self._prompt(text, query, tuple(value for i in asked for value in values[i]))

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.value_type} for {key} is: {value}."

    def _in_lines(self, size: int, needles: list[str], rng: random.Random) -> str:
        if self.kind == "noise":
            lines = [NOISE] * size
        else:
            lines = [self._needle(draw(self.key_type, rng), draw(self.value_type, rng)) for _ in range(size)]
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _in_essay(self, size: int, needles: list[str], rng: random.Random, index: int) -> str:
        if self.haystack is None:
            raise ValueError("haystack: expected essay text for this task, got none")
        sentences = self.haystack.sentences(size, index)
        places = sorted(int(len(sentences) * (depth / 100)) for depth in rng.sample(DEPTHS, len(needles)))
        parts, begin = [], 0
        for place, needle in zip(places, needles, strict=True):
            parts += [" ".join(sentences[begin:place]), needle]
            begin = place
        return " ".join([*parts, " ".join(sentences[begin:])])

    def _prompt(self, text: str, query: str, answers: tuple[str, ...]) -> Draft:
        if self.queries * self.values == 1:
            some, what, verb, ask = "A", self.value_type[:-1], "is", "What is"
        else:
            some, what, verb, ask = "Some", self.value_type, "are", "What are all"
        return Draft(
            context=f"{some} special magic {what} {verb} hidden within the following text. Make sure to memorize it. "
            f"I will quiz you about the {what} afterwards.\n{text}\n",
            question=f"{ask} the special magic {what} for {query} mentioned in the provided text?",
            answer_prefix=f" The special magic {what} for {query} mentioned in the provided text {verb}",
            references=answers,
        )
