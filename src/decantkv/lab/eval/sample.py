"""One prompt of a suite, in the parts that the two regimes need apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sample:
    """One prompt with its answer.

    The model reads `context + question` as the user's turn and `answer_prefix` as the beginning of its own.

    Attributes:
        suite, task: where it comes from.
        length: tokens asked for, prompt and answer together; 0 where prompts have their natural length.
        index: its number within (suite, task, length).
        context: instruction and material; all that is prefilled before eviction in the question-agnostic regime.
        question: what is asked about it.
        answer_prefix: words put into the model's mouth, after the chat template's assistant turn.
        references: accepted answers, or all answers to be found, as the task's metric defines.
        max_new_tokens: where generation is cut.
        metric: the scoring function's name in `decantkv.lab.eval.metrics.METRICS`.
        chat: whether the suite wraps the prompt in the model's chat template.
        stop_at_newline: whether the suite ends the answer at the first newline.
        turns: (role, text) of a conversation of more than the one user's turn `context + question`; it contains the
            context word for word.
        protected: a passage of the prompt that policies with protection always keep.
        details: what the metric or a reader needs beside that: classes, sources, depths.
    """

    suite: str
    task: str
    length: int
    index: int
    context: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    max_new_tokens: int
    metric: str
    chat: bool = True
    stop_at_newline: bool = False
    turns: tuple[tuple[str, str], ...] = ()
    protected: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The prompt without a chat template: what RULER and LongBench publish as a sample's input."""
        return self.context + self.question + self.answer_prefix

    @property
    def key(self) -> str:
        """The prompt's name within a run: suite/task/length/index."""
        return f"{self.suite}/{self.task}/{self.length}/{self.index}"


Measure = Callable[[Sample], int]
"""Tokens of a sample as the model will read it, chat template and answer prefix included."""
