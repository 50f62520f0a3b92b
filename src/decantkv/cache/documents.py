"""Documents that are read once, condensed without a question, and asked any number of questions afterwards."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decantkv.base.chat import chat_frame
from decantkv.cache import files
from decantkv.cache.chunked_reading import deferred
from decantkv.cache.evicting_cache import EvictingCache
from decantkv.hf.context import check_context
from decantkv.hf.model_parts import cache_argument, decoder_of
from decantkv.methods import Method
from decantkv.scoring.rehearsal import Rehearsal
from decantkv.selection.budget import Budget

_GAP = "\n\n"  # between document and question
_CHUNK = 4096  # tokens of a forward, where nothing else is given


@dataclasses.dataclass(frozen=True)
class Document:
    """A document's condensed cache, with what is needed to ask about it. `condense` and `load` make one.

    Attributes:
        cache: of the document, without a question; `ask` leaves it as it is.
        ids: [1, N] token ids of the document and what the chat template puts in front of it.
        after: text that the chat template puts behind a question.
        beyond_context: whether questions may exceed the model's context.
    """

    model: PreTrainedModel
    tokenizer: Any
    cache: EvictingCache
    ids: Tensor
    after: str
    beyond_context: bool = False

    def ask(self, question: str, *, max_new_tokens: int = 256, **options: Any) -> str:
        """Return the model's answer to a question about the document.

        Args:
            options: of the model's `generate`, such as `streamer`; answers are greedy unless they say otherwise.

        Raises:
            ValueError: an empty question, or one that does not fit the model's context behind the document.
        """
        if not question.strip():
            raise ValueError("question: expected text, got none")
        text = f"{_GAP}{question.strip()}{self.after}"
        new = self.tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids.to(self.ids.device)
        ids = torch.cat([self.ids, new], 1)
        check_context(self.model.config, ids.shape[1] + max_new_tokens - 1, "question", beyond=self.beyond_context)
        options = {"do_sample": False, **options, cache_argument(self.model): copy.deepcopy(self.cache)}
        with torch.no_grad():
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **options
            )
        answer: str = self.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        return answer.strip()

    def save(self, path: str | os.PathLike[str], *, source: str = "") -> None:
        """Write the document to a safetensors file.

        Args:
            source: from where the model was loaded, for the command line, which loads it again.
        """
        notes = {"ids": self.ids[0].tolist(), "after": self.after, "source": source}
        self.cache.save(path, prompt=self.ids, notes=notes)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: PreTrainedModel, tokenizer: Any) -> Self:
        """Return the document that `save` wrote.

        Raises:
            ValueError: no such file, one that was changed, or one of another model.
        """
        cache = EvictingCache.load(path, model)
        notes = _checked(cache.notes, path)
        return cls(model, tokenizer, cache, torch.tensor([notes["ids"]], device=model.device), notes["after"])


def source_of(path: str | os.PathLike[str]) -> str:
    """Return from where the model of a document's file was loaded, "" if the file does not say; only its head is read.

    Raises:
        ValueError: the file holds no document.
    """
    source: str = _checked(files.read_notes(path), path)["source"]
    return source


def _checked(notes: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """The notes of `Document.save`: `ids`, `after`, `source`."""
    if not {"ids", "after", "source"} <= set(notes):
        raise ValueError(f"path: expected a document that `decantkv condense` wrote, got another cache in {path}")
    return notes


@torch.no_grad()
def condense(
    model: PreTrainedModel,
    tokenizer: Any,
    document: str,
    *,
    budget: float | int | str | Budget = 0.1,
    method: str | Method = "dropkv",
    rehearsal: str | Rehearsal = "replay+anchors",
    questions: Sequence[str] = (),
    prefill_chunk: int = _CHUNK,
    beyond_context: bool = False,
    **options: Any,
) -> Document:
    """Read a document, keep what any later question may need, and return it, to be asked or saved.

    ```python
    book = decantkv.condense(model, tokenizer, text, budget=0.1)
    print(book.ask("Who is the narrator?"))
    book.save("book.kv")
    ```

    Args:
        document: read as the beginning of a user's message, by the model's chat template where it has one.
        budget: what is kept: a fraction, or a number of tokens per head.
        rehearsal: which queries decide; see `attach`.
        questions: texts to rehearse as well, such as questions that are likely to come.
        prefill_chunk: tokens of one forward.
        beyond_context: allow a document and its rehearsal to exceed the model's context.
        options: of `EvictingCache`.

    Raises:
        TypeError, ValueError: an argument out of its range, an empty document, or one longer than the context.
    """
    if not document.strip():
        raise ValueError("document: expected text, got none")
    rehearsed = Rehearsal.parse(rehearsal)
    if rehearsed is None:
        raise ValueError("rehearsal: expected which queries decide, such as 'replay', got None")
    if questions:
        asked = tuple(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in questions)
        rehearsed = dataclasses.replace(rehearsed, questions=(*rehearsed.questions, *asked))
    frame = chat_frame(tokenizer)
    before, after = frame or ("", _GAP)
    ids = tokenizer(before + document.rstrip(), return_tensors="pt", add_special_tokens=frame is None).input_ids
    length = ids.shape[1]
    way_out = " for the document and the passages that are run behind it"
    check_context(model.config, length + rehearsed.longest(length), "document", beyond=beyond_context, way_out=way_out)
    cache = EvictingCache(model, method, budget=budget, rehearsal=rehearsed, **options)
    decoder, ids = decoder_of(model), ids.to(model.device)
    with deferred(cache):
        for part in ids.split(prefill_chunk, 1):
            decoder(part, use_cache=True, **{cache_argument(decoder): cache})
    return Document(model, tokenizer, cache, ids, after, beyond_context)
