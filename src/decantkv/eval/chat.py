"""From a sample to token ids, with the places where the regimes cut the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from decantkv.eval.sample import Measure, Sample

Regime = Literal["aware", "aware-question", "agnostic"]
REGIMES: dict[Regime, str] = {
    "aware": "the whole prompt is read before eviction, question and answer prefix included (as SnapKV's code does)",
    "aware-question": "the prompt is evicted where the question ends; the end of the turn and the answer prefix follow",
    "agnostic": "the context is evicted before the question is known; the question follows with continuing positions",
}
_MARK = "\u241e\u241fthe user's text\u241f\u241e"


@dataclass(frozen=True)
class Encoded:
    """A prompt as the model reads it.

    Attributes:
        ids: token ids, the same in every regime.
        cuts: per regime, how many of them are read before eviction.
    """

    ids: tuple[int, ...]
    cuts: dict[Regime, int]


class ChatFormat:
    """Wraps prompts as a model's chat template does; a model without one gets the bare text.

    Attributes:
        tokenizer: a fast transformers tokenizer.
        system: text of a system turn, or None for what the template itself adds.
    """

    def __init__(self, tokenizer: Any, *, system: str | None = None) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ValueError(f"tokenizer: expected a fast tokenizer, got {type(tokenizer).__name__}")
        self.tokenizer = tokenizer
        self.system = system
        self._around: tuple[str, str] | None = None  # what the template puts before and after the user's text
        self._strips = False
        if getattr(tokenizer, "chat_template", None):
            before, mark, after = self._render(_MARK).partition(_MARK)
            if not mark or _MARK in after:
                raise ValueError("tokenizer: expected a chat template that repeats the user's text once")
            self._around = (before, after)
            self._strips = f" {_MARK} " not in self._render(f" {_MARK} ")

    def encode(self, sample: Sample) -> Encoded:
        """Token ids of the prompt with its answer prefix, and where each regime cuts them.

        A token that straddles a cut belongs to what comes after.
        """
        context, question = sample.context, sample.question
        templated = sample.chat and self._around is not None
        before, after = self._around if templated and self._around else ("", "")
        if templated and self._strips:
            context, question = context.lstrip(), question.rstrip()
        text = before + context + question + after + sample.answer_prefix
        encoding = self.tokenizer(text, add_special_tokens=not templated, return_offsets_mapping=True)
        ends = [end for _, end in encoding["offset_mapping"]]
        end_of_context = len(before) + len(context)
        ids = tuple(encoding["input_ids"])
        if getattr(self.tokenizer, "eos_token_id", None) is not None and not templated:
            ids = _without_final(ids, self.tokenizer.eos_token_id)
        cuts: dict[Regime, int] = {
            "aware": len(ids),
            "aware-question": _tokens_within(ends, end_of_context + len(question)),
            "agnostic": _tokens_within(ends, end_of_context),
        }
        return Encoded(ids, cuts)

    def measure(self) -> Measure:
        """How many tokens a sample has, wrapped."""
        return lambda sample: len(self.encode(sample).ids)

    def count(self, text: str) -> int:
        """Tokens of a plain text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _render(self, text: str) -> str:
        turns = [{"role": "user", "content": text}]
        if self.system is not None:
            turns.insert(0, {"role": "system", "content": self.system})
        rendered: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return rendered


def _tokens_within(ends: list[int], stop: int) -> int:
    """How many leading tokens end at or before character `stop`; at least one."""
    return max(1, next((i for i, end in enumerate(ends) if end > stop), len(ends)))


def _without_final(ids: tuple[int, ...], eos: int) -> tuple[int, ...]:
    """Without an end-of-text token that some tokenizers append: the model is to go on."""
    return ids[:-1] if len(ids) > 1 and ids[-1] == eos else ids
