"""Question answering among distracting documents (qa_1, qa_2): SQuAD, HotpotQA, or questions with passages."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decantkv.lab.eval.hub import load_rows
from decantkv.lab.eval.ruler.draft import Draft

_ORDER = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


_Item = tuple[str, tuple[str, ...], list[str], list[str]]  # question, answers, gold documents, related documents


@dataclass(frozen=True)
class Question:
    """A question over documents, which are given by number."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """Questions and the documents they and their distractors come from.

    Attributes:
        name, sha256: the file they were read from.
    """

    name: str
    sha256: str
    documents: tuple[str, ...]
    questions: tuple[Question, ...]

    def in_order(self, seed: int) -> tuple[Question, ...]:
        """The questions in a seeded order: in a file's own, the first fifty are about one article."""
        order = list(self.questions)
        random.Random(f"questions {seed}").shuffle(order)
        return tuple(order)


@dataclass(frozen=True)
class Documents:
    """RULER's qa: the gold documents, then related ones, then others, shuffled.

    Attributes:
        source: the documents.
        questions: the questions in the order of the samples' indices.
    """

    source: QuestionSet
    questions: tuple[Question, ...]
    step: int = 10
    least: int = 1

    def draft(self, size: int, rng: random.Random, index: int) -> Draft:
        """A prompt with `size` documents; never fewer than the question's own."""
        if index >= len(self.questions):
            raise ValueError(f"samples: expected at most the file's {len(self.questions)} questions, got {index + 1}")
        question = self.questions[index]
        chosen = list(question.gold)
        missing = max(0, size - len(chosen))
        chosen += question.related if missing >= len(question.related) else rng.sample(question.related, missing)
        if (missing := size - len(chosen)) > 0:
            others = sorted(set(range(len(self.source.documents))).difference(chosen))
            whole, rest = divmod(missing, len(others)) if others else (0, 0)
            chosen += others * whole + rng.sample(others, rest)
        rng.shuffle(chosen)
        documents = (f"Document {i}:\n{self.source.documents[n]}" for i, n in enumerate(chosen, start=1))
        return Draft(
            context=f"{_ORDER}\n\nThe following are given documents.\n\n" + "\n\n".join(documents) + "\n\n",
            question=f"{_ORDER}\n\nQuestion: {question.text}",
            answer_prefix=" Answer:",
            references=question.answers,
        )


def load_questions(source: str | Path) -> QuestionSet:
    """Read SQuAD's JSON (v1 or v2; unanswerable questions are left out), HotpotQA's JSON, or JSON lines of
    {"question", "answers", "ctxs": [{"title", "text"}]} whose passages are all gold; .gz is understood.

    Raises:
        ValueError: no such file, or one in none of these forms; a broken line is named.
    """
    path = Path(source)
    if not path.is_file():
        raise ValueError(f"questions: expected a file, got {str(source)!r}")
    raw = path.read_bytes()
    text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    try:
        return _number(path.name, hashlib.sha256(raw).hexdigest(), _items(text))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(
            f"questions: expected SQuAD, HotpotQA or question-and-passages data in {str(source)!r}, "
            f"got {type(error).__name__}: {error}"
        ) from error


HUB = {"qa_1": ("rajpurkar/squad_v2", None), "qa_2": ("hotpotqa/hotpot_qa", "distractor")}


def hub_questions(task: str) -> QuestionSet:
    """RULER's own questions from the Hugging Face hub: SQuAD 2's and HotpotQA's development sets.

    Raises:
        ValueError: the package datasets is missing, or the hub is out of reach.
    """
    name, part = HUB[task]
    option = "--squad" if task == "qa_1" else "--hotpot"
    way_out = f"give a file of your own with {option} FILE"
    rows = list(load_rows("questions", name, part, split="validation", way_out=way_out))
    items = [_from_hotpot(row) for row in rows] if task == "qa_2" else _from_squad_rows(rows)
    digest = hashlib.sha256(json.dumps(items).encode()).hexdigest()
    return _number(name, digest, items)


def _from_squad_rows(rows: list[Any]) -> list[_Item]:
    """The hub's flat rows: one a question, with its paragraph and its article's title."""
    articles: dict[str, dict[str, None]] = {}
    for row in rows:
        articles.setdefault(row["title"], {})[row["context"]] = None
    return [
        (
            row["question"],
            tuple(row["answers"]["text"]),
            [row["context"]],
            [other for other in articles[row["title"]] if other != row["context"]],
        )
        for row in rows
        if row["answers"]["text"]
    ]


def _items(text: str) -> list[_Item]:
    try:
        data = json.loads(text)
    except ValueError:
        return [_from_passages(record) for record in _json_lines(text)]
    if isinstance(data, dict) and "data" in data:
        return list(_from_squad(data["data"]))
    if isinstance(data, list):
        return [_from_hotpot(record) for record in data]
    return [_from_passages(data)]


def _json_lines(text: str) -> Iterable[Any]:
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            yield json.loads(line)
        except ValueError as error:
            raise ValueError(f"questions: line {number}: expected JSON, got {error}") from error


def _from_squad(articles: Any) -> Iterable[_Item]:
    for article in articles:
        paragraphs = [paragraph["context"] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            related = [other for other in paragraphs if other != paragraph["context"]]
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible", False):
                    answers = tuple(answer["text"] for answer in qa["answers"])
                    yield qa["question"], answers, [paragraph["context"]], related


def _from_hotpot(record: Any) -> _Item:
    context = record["context"]
    pairs = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
    return record["question"], (record["answer"],), [f"{title}\n{''.join(lines)}" for title, lines in pairs], []


def _from_passages(record: Any) -> _Item:
    gold = [f"{passage['title']}\n{passage['text']}" for passage in record["ctxs"]]
    return record["question"], tuple(record["answers"]), gold, []


def _number(name: str, sha256: str, items: list[_Item]) -> QuestionSet:
    documents = sorted({document for _, _, gold, related in items for document in (*gold, *related)})
    number = {document: i for i, document in enumerate(documents)}
    questions = tuple(
        Question(text, answers, tuple(number[d] for d in gold), tuple(number[d] for d in dict.fromkeys(related)))
        for text, answers, gold, related in items
        if answers
    )
    if not questions:
        raise ValueError(f"questions: expected at least one answerable question in {name!r}, got none")
    return QuestionSet(name, sha256, tuple(documents), questions)
