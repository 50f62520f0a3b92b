"""A needle at every depth of every length: the grid that shows where a method loses things."""

from __future__ import annotations

import random
from dataclasses import dataclass

from decantkv.lab.eval.ruler.fit import Fit
from decantkv.lab.eval.ruler.haystack import Haystack
from decantkv.lab.eval.ruler.lexicon import draw
from decantkv.lab.eval.ruler.niah import NOISE
from decantkv.lab.eval.sample import Measure, Sample

DEPTHS = (0, 25, 50, 75, 100)  # per cent


@dataclass(frozen=True)
class Grid:
    """Prompts with one needle each, at fixed depths.

    Attributes:
        length: tokens of prompt and answer.
        depth: where the needle stands, per cent of the haystack.
        measure: tokens of a sample as the model reads it.
        haystack: essay text, or None for repeated lines.
        digits: of the number to find.
        seed: of the draws.
    """

    length: int
    depth: int
    measure: Measure
    haystack: Haystack | None = None
    digits: int = 7
    seed: int = 42

    @property
    def task(self) -> str:
        """The grid column's name."""
        return f"depth_{self.depth}"

    def sample(self, index: int) -> Sample:
        """Sample number `index`.

        Raises:
            ValueError: the length cannot hold needle and question.
        """
        step = 1 if self.haystack is None else 20
        return Fit(self.length, step, step, what="niah").largest(lambda size: self._built(size, index))

    def _built(self, size: int, index: int) -> tuple[Sample, int]:
        rng = random.Random(f"{self.seed}/niah/{self.depth}/{index}")
        key, value = draw("words", rng), str(rng.randint(10 ** (self.digits - 1), 10**self.digits - 1))
        lines = [NOISE] * size if self.haystack is None else self.haystack.sentences(size, index)
        place = round(len(lines) * self.depth / 100)
        lines.insert(place, f"The special magic number for {key} is: {value}.")
        text = ("\n" if self.haystack is None else " ").join(lines)
        sample = Sample(
            suite="niah",
            task=self.task,
            length=self.length,
            index=index,
            context=f"A special magic number is hidden in the following text. Memorize it.\n{text}\n",
            question=f"What is the special magic number for {key} in the text?",
            answer_prefix=f" The special magic number for {key} is:",
            references=(value,),
            max_new_tokens=3 * self.digits,
            metric="string_match_all",
            details={"haystack": "noise" if self.haystack is None else self.haystack.name, "depth": self.depth},
        )
        return sample, self.measure(sample) + sample.max_new_tokens
