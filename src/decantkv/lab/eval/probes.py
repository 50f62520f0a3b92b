"""Two things that question-aware tables hide: a fact asked for in the second turn, a rule of the system prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass

from decantkv.lab.eval.ruler.fit import Fit
from decantkv.lab.eval.ruler.haystack import Haystack
from decantkv.lab.eval.ruler.lexicon import draw
from decantkv.lab.eval.ruler.niah import NOISE
from decantkv.lab.eval.sample import Measure, Sample

TASKS = ("second_turn", "system_rule")
NEW_TOKENS = 24


@dataclass(frozen=True)
class Probe:
    """Conversations in which what matters later is unknown, or easily lost, when the cache is evicted.

    second_turn: a text hides two numbers. The first turn asks for one of them and is answered; the second turn asks
    for the other. In the regime "agnostic" eviction happens at the end of the first question, as in a chat.
    system_rule: a system turn says with which word to begin every answer; then come a text and a question about it.
    The passage that "+protect" keeps is the second number's sentence, or the rule.

    Attributes:
        name: one of `TASKS`.
        length: tokens of conversation and answer.
        measure: tokens of a sample as the model reads it.
        haystack: essay text, or None for repeated lines.
        seed: of the draws.
    """

    name: str
    length: int
    measure: Measure
    haystack: Haystack | None = None
    seed: int = 42

    def sample(self, index: int) -> Sample:
        """Sample number `index`.

        Raises:
            ValueError: the length cannot hold the conversation.
        """
        step = 2 if self.haystack is None else 20
        return Fit(self.length, step, step, what=self.name).largest(lambda size: self._built(size, index))

    def _built(self, size: int, index: int) -> tuple[Sample, int]:
        rng = random.Random(f"{self.seed}/{self.name}/{index}")
        sample = (self._second_turn if self.name == "second_turn" else self._system_rule)(size, index, rng)
        return sample, self.measure(sample) + sample.max_new_tokens

    def _text(self, size: int, facts: list[str], rng: random.Random, index: int) -> str:
        lines = [NOISE] * size if self.haystack is None else self.haystack.sentences(size, index)
        for fact in facts:
            lines.insert(rng.randrange(len(lines) + 1), fact)
        return ("\n" if self.haystack is None else " ").join(lines)

    def _second_turn(self, size: int, index: int, rng: random.Random) -> Sample:
        names, numbers = [draw("words", rng) for _ in range(2)], [str(rng.randint(1000, 9999)) for _ in range(2)]
        facts = [f"The number of {name} is {number}." for name, number in zip(names, numbers, strict=True)]
        first = f"Read this text.\n{self._text(size, facts, rng, index)}\nWhat is the number of {names[0]}?"
        second = f"And what is the number of {names[1]}?"
        return Sample(
            suite="probes",
            task="second_turn",
            length=self.length,
            index=index,
            context=first,
            question=second,
            answer_prefix=f"The number of {names[1]} is",
            references=(numbers[1],),
            max_new_tokens=NEW_TOKENS,
            metric="string_match_all",
            turns=(("user", first), ("assistant", facts[0]), ("user", second)),
            protected=facts[1],
        )

    def _system_rule(self, size: int, index: int, rng: random.Random) -> Sample:
        word, name, number = draw("words", rng).upper(), draw("words", rng), str(rng.randint(1000, 9999))
        rule = f"Begin every answer with the word {word}."
        text = self._text(size, [f"The number of {name} is {number}."], rng, index)
        context = f"Read this text.\n{text}\n"
        question = f"What is the number of {name}?"
        return Sample(
            suite="probes",
            task="system_rule",
            length=self.length,
            index=index,
            context=context,
            question=question,
            answer_prefix="",
            references=(word,),
            max_new_tokens=NEW_TOKENS,
            metric="string_match_all",
            turns=(("system", rule), ("user", context + question)),
            protected=rule,
        )
