"""From a sample to token ids, with the places where the regimes cut the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from decantkv.base.chat import USER_TEXT, chat_frame, chat_prompt
from decantkv.lab.eval.sample import Measure, Sample

Regime = Literal["aware", "aware-question", "agnostic"]
REGIMES: dict[Regime, str] = {
    "aware": "the whole prompt is read before eviction, question and answer prefix included (as SnapKV's code does)",
    "aware-question": "the prompt is evicted where the question ends; the end of the turn and the answer prefix follow",
    "agnostic": "the context is evicted before the question is known; the question follows with continuing positions",
}


@dataclass(frozen=True)
class Encoded:
    """A prompt as the model reads it.

    Attributes:
        ids: token ids, the same in every regime.
        cuts: per regime, how many of them are read before eviction.
        protect: span of the tokens that policies with protection always keep.
    """

    ids: tuple[int, ...]
    cuts: dict[Regime, int]
    protect: tuple[tuple[int, int], ...] = ()


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
        self._around = chat_frame(tokenizer, system=system)  # what stands before and after the user's text
        apart = f" {USER_TEXT} "
        self._strips = self._around is not None and apart not in chat_prompt(tokenizer, apart, system=system)[0]

    def encode(self, sample: Sample) -> Encoded:
        """Token ids of the prompt with its answer prefix, and where each regime cuts them.

        A token that straddles a cut belongs to what comes after.
        """
        templated = sample.chat and self._around is not None
        if sample.turns:
            text, end_of_context = self._conversation(sample)
            end_of_question = len(text) - len(sample.answer_prefix)
        else:
            context, question = sample.context, sample.question
            before, after = self._around if templated and self._around else ("", "")
            if templated and self._strips:
                context, question = context.lstrip(), question.rstrip()
            text = before + context + question + after + sample.answer_prefix
            end_of_context = len(before) + len(context)
            end_of_question = end_of_context + len(question)
        encoding = self.tokenizer(text, add_special_tokens=not templated, return_offsets_mapping=True)
        ends = [end for _, end in encoding["offset_mapping"]]
        ids = tuple(encoding["input_ids"])
        if getattr(self.tokenizer, "eos_token_id", None) is not None and not templated:
            ids = _without_final(ids, self.tokenizer.eos_token_id)
        cuts: dict[Regime, int] = {
            "aware": len(ids),
            "aware-question": _tokens_within(ends, end_of_question),
            "agnostic": _tokens_within(ends, end_of_context),
        }
        return Encoded(ids, cuts, _span(text, sample.protected, ends))

    def measure(self) -> Measure:
        """Return how many tokens a sample has, wrapped."""
        return lambda sample: len(self.encode(sample).ids)

    def count(self, text: str) -> int:
        """Tokens of a plain text."""
        return len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _conversation(self, sample: Sample) -> tuple[str, int]:
        """(text, where the context ends) of several turns; without a template, of a plain transcript."""
        if self._around is not None:
            turns = [{"role": role, "content": text} for role, text in sample.turns]
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        else:
            text = "".join(f"{role.capitalize()}: {said}\n" for role, said in sample.turns) + "Assistant:"
        context = sample.context.strip() if sample.context not in text else sample.context
        place = text.find(context)
        if place < 0:
            raise ValueError("tokenizer: expected a chat template that repeats the user's text word for word")
        return text + sample.answer_prefix, place + len(context)


def _tokens_within(ends: list[int], stop: int) -> int:
    """Return how many leading tokens end at or before character `stop`; at least one."""
    return max(1, next((i for i, end in enumerate(ends) if end > stop), len(ends)))


def _span(text: str, passage: str, ends: list[int]) -> tuple[tuple[int, int], ...]:
    """The tokens that hold any of the passage's letters."""
    place = text.find(passage) if passage else -1
    if place < 0:
        return ()
    first = next(i for i, end in enumerate(ends) if end > place)
    last = next(i for i, end in enumerate(ends) if end >= place + len(passage))
    return ((first, last + 1),)


def _without_final(ids: tuple[int, ...], eos: int) -> tuple[int, ...]:
    """Without an end-of-text token that some tokenizers append: the model is to go on."""
    return ids[:-1] if len(ids) > 1 and ids[-1] == eos else ids
