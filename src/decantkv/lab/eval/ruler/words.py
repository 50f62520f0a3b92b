"""Aggregation tasks: the most common words of a list (cwe), the most frequent coded words of a text (fwe)."""

from __future__ import annotations

import math
import random
import string
from dataclasses import dataclass

from decantkv.lab.eval.ruler.draft import Draft
from decantkv.lab.eval.ruler.lexicon import pair, plain_words

COMMON = 10
SHUFFLE_SEED = 42  # RULER shuffles with the run's seed anew for every sample
CODED_LETTERS = 6
ZETA_OF_2 = math.pi**2 / 6


@dataclass(frozen=True)
class CommonWords:
    """RULER's cwe: ten words appear 30 times, the others 3 times (below 4096 tokens: 6 times and once).

    Attributes:
        length: tokens asked for, which decides how often words appear.
    """

    length: int
    step: int = 10
    least: int = COMMON + 1

    def draft(self, size: int, rng: random.Random, index: int) -> Draft:
        """A prompt over `size` distinct words, after one solved list."""
        short = self.length < 4096
        example, solution = _word_list(20 if short else 40, *((3, 1) if short else (10, 3)), rng)
        listed, answers = _word_list(size, *((6, 1) if short else (30, 3)), rng)
        head, question, prefix = _CWE
        solved = head + example + "\n" + question + prefix + _numbered(solution)
        return Draft(solved + "\n" + head + listed + "\n", question, prefix, tuple(answers))


_CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n",
    "Question: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)


def _word_list(count: int, often: int, seldom: int, rng: random.Random) -> tuple[str, list[str]]:
    words = list(plain_words())
    while len(words) < count:  # RULER falls back to another dictionary; pairs of the same words need no second one
        words = list(dict.fromkeys([*words, *(pair(rng) for _ in range(count - len(words)))]))
    chosen = rng.sample(words, count)
    listed = chosen[:COMMON] * often + chosen[COMMON:] * seldom
    random.Random(SHUFFLE_SEED).shuffle(listed)
    return _numbered(listed), chosen[:COMMON]


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


@dataclass(frozen=True)
class FrequentWords:
    """RULER's fwe: six-letter codes by a zeta distribution of exponent 2; the most frequent one is dots.

    Attributes:
        length: tokens asked for; the vocabulary has a fiftieth as many codes.
    """

    length: int
    least: int = 50

    @property
    def step(self) -> int:
        """RULER's: a 32nd of the length."""
        return max(1, self.length // 32)

    def draft(self, size: int, rng: random.Random, index: int) -> Draft:
        """A prompt of about `size` coded words."""
        vocabulary: set[str] = set()
        while len(vocabulary) < max(4, self.length // 50):
            vocabulary.add("".join(rng.choices(string.ascii_lowercase, k=CODED_LETTERS)))
        codes = sorted(vocabulary)
        random.Random(SHUFFLE_SEED).shuffle(codes)
        codes[0] = "..."
        text = [code for k, code in enumerate(codes, start=1) for _ in range(int(size * k**-2.0 / ZETA_OF_2))]
        random.Random(SHUFFLE_SEED).shuffle(text)
        return Draft(
            context="Read the following coded text and track the frequency of each coded word. Find the three most "
            f"frequently appeared coded words. {' '.join(text)}\n",
            question="Question: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text?",
            answer_prefix=" Answer: According to the coded text above, the three most frequently appeared words are:",
            references=tuple(codes[1:4]),
        )
