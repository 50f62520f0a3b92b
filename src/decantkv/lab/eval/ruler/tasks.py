"""RULER's thirteen tasks and the samples made of them, at any length by the model's own tokenizer."""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable
from dataclasses import dataclass

from decantkv.lab.eval.ruler.draft import Maker
from decantkv.lab.eval.ruler.fit import Fit
from decantkv.lab.eval.ruler.haystack import Haystack
from decantkv.lab.eval.ruler.niah import Niah
from decantkv.lab.eval.ruler.qa import Documents, QuestionSet
from decantkv.lab.eval.ruler.tracing import Tracing
from decantkv.lab.eval.ruler.words import CommonWords, FrequentWords
from decantkv.lab.eval.sample import Measure, Sample

NEEDLES: dict[str, Niah] = {
    "niah_single_1": Niah("noise", "words", "numbers"),
    "niah_single_2": Niah("essay", "words", "numbers"),
    "niah_single_3": Niah("essay", "words", "uuids"),
    "niah_multikey_1": Niah("essay", "words", "numbers", keys=4),
    "niah_multikey_2": Niah("needle", "words", "numbers"),
    "niah_multikey_3": Niah("needle", "uuids", "uuids"),
    "niah_multivalue": Niah("essay", "words", "numbers", values=4),
    "niah_multiquery": Niah("essay", "words", "numbers", keys=4, queries=4),
}
NEW_TOKENS = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32, **dict.fromkeys(NEEDLES, 128)}
TASKS = (*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2")
NEEDS_ESSAY = tuple(name for name, task in NEEDLES.items() if task.kind == "essay")


@dataclass(frozen=True)
class Sources:
    """Texts that the tasks need and the generator does not make up itself.

    Attributes:
        haystack: essay text, for five of the needle tasks.
        qa_1, qa_2: questions with documents.
    """

    haystack: Haystack | None = None
    qa_1: QuestionSet | None = None
    qa_2: QuestionSet | None = None

    def missing(self, task: str) -> str | None:
        """Return what `task` lacks, as a hint for the user, or None."""
        if task in NEEDS_ESSAY and self.haystack is None:
            return "essay text (--haystack FILE_OR_FOLDER)"
        if task == "qa_1" and self.qa_1 is None:
            return "SQuAD's questions (--squad FILE)"
        if task == "qa_2" and self.qa_2 is None:
            return "HotpotQA's questions (--hotpot FILE)"
        return None

    def describe(self, task: str) -> dict[str, str]:
        """Name and hash of the text `task` uses, for the rows of results."""
        if task in NEEDS_ESSAY and self.haystack is not None:
            return self.haystack.describe()
        questions = {"qa_1": self.qa_1, "qa_2": self.qa_2}.get(task)
        return {"questions": questions.name, "sha256": questions.sha256} if questions is not None else {}


def check_task(name: str) -> str:
    """The name of a known task; raise ValueError listing them otherwise."""
    if name not in TASKS:
        close = difflib.get_close_matches(name, TASKS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"task: expected one of {', '.join(TASKS)}, got {name!r}{hint}")
    return name


def maker(task: str, length: int, sources: Sources, *, seed: int, count_tokens: Callable[[str], int]) -> Maker:
    """The generator of a task at a length.

    Raises:
        ValueError: an unknown task, or one whose text is missing from `sources`.
    """
    if hint := sources.missing(check_task(task)):
        raise ValueError(f"task: {task} needs {hint}")
    if task in NEEDLES:
        needle = NEEDLES[task]
        essay = sources.haystack if needle.kind == "essay" else None
        return Niah(needle.kind, needle.key_type, needle.value_type, needle.keys, needle.values, needle.queries, essay)
    if task == "vt":
        return Tracing(count_tokens)
    if task == "cwe":
        return CommonWords(length)
    if task == "fwe":
        return FrequentWords(length)
    questions = sources.qa_1 if task == "qa_1" else sources.qa_2
    if questions is None:
        raise ValueError(f"task: {task} needs questions")
    return Documents(questions, questions.in_order(seed))


class Series:
    """The samples of a task at a length; prompt and answer together fill `length` tokens.

    Every sample has random draws of its own, from (seed, task, length, index): a run that stops and starts again,
    or asks for more samples later, makes the same ones.
    """

    def __init__(
        self,
        task: str,
        length: int,
        sources: Sources,
        *,
        measure: Measure,
        count_tokens: Callable[[str], int],
        seed: int = 42,
    ) -> None:
        """Prepare the generator.

        Args:
            measure: tokens of a sample as the model reads it.
            count_tokens: tokens of a plain text.

        Raises:
            ValueError: an unknown task, or one whose text is missing.
        """
        self.task, self.length, self.seed, self._measure = task, length, seed, measure
        self._make = maker(task, length, sources, seed=seed, count_tokens=count_tokens)
        self._details = sources.describe(task)
        self._fit = Fit(length, self._make.least, self._make.step, what=task)

    def check(self) -> None:
        """Raise ValueError where the length cannot hold the task."""
        self._fit.check(lambda size: self._built(size, 0))

    def sample(self, index: int) -> Sample:
        """Sample number `index`.

        Raises:
            ValueError: the length cannot hold the task, or the questions have run out.
        """
        return self._fit.largest(lambda size: self._built(size, index))

    def _built(self, size: int, index: int) -> tuple[Sample, int]:
        rng = random.Random(f"{self.seed}/{self.task}/{self.length}/{index}")
        draft = self._make.draft(size, rng, index)
        sample = Sample(
            suite="ruler",
            task=self.task,
            length=self.length,
            index=index,
            context=draft.context,
            question=draft.question,
            answer_prefix=draft.answer_prefix,
            references=draft.references,
            max_new_tokens=NEW_TOKENS[self.task],
            metric="string_match_part" if self.task.startswith("qa_") else "string_match_all",
            details=self._details,
        )
        return sample, self._measure(sample) + sample.max_new_tokens
