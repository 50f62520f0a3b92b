"""LongBench's samples from local files or the hub."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from decantkv.lab.eval import fingerprints
from decantkv.lab.eval.hub import load_rows
from decantkv.lab.eval.longbench.tasks import TASKS, LongBenchTask, check_task
from decantkv.lab.eval.sample import Sample

HUB = "Xnhyacinth/LongBench"


class Tokenizer(Protocol):
    """The part of a tokenizer that middle truncation needs."""

    def __call__(self, text: str) -> Any:
        """An object with `.input_ids`."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Token ids to text."""


@dataclass(frozen=True)
class Record:
    """One LongBench example as published: context, input (question), answers, class names."""

    context: str
    input: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...] = ()


def samples(
    task: str, records: Iterable[Record], *, tokenizer: Tokenizer, max_length: int, count: int | None = None
) -> Iterator[Sample]:
    """The task's samples, cut in the middle to `max_length` tokens before any chat template, as LongBench does."""
    form = TASKS[check_task(task)]
    for index, record in enumerate(records):
        if count is not None and index >= count:
            return
        question = form.tail.replace("{input}", record.input)
        text, cut = cut_middle(form.head + record.context + question, max_length, tokenizer)
        tail = question if text.endswith(question) else _common_end(text, question)
        yield Sample(
            suite="longbench",
            task=task,
            length=max_length,
            index=index,
            context=text[: len(text) - len(tail)],
            question=tail,
            answer_prefix="",
            references=record.answers,
            max_new_tokens=form.max_new_tokens,
            metric=form.metric,
            chat=form.chat,
            stop_at_newline=task == "samsum",
            details=_details(form, record, cut),
        )


def _details(form: LongBenchTask, record: Record, cut: bool) -> dict[str, Any]:
    details: dict[str, Any] = {"cut": cut}
    if form.few_shot:
        details["first_line_only"] = True
    if record.all_classes:
        details["all_classes"] = list(record.all_classes)
    return details


def cut_middle(text: str, max_length: int, tokenizer: Tokenizer) -> tuple[str, bool]:
    """A text over `max_length` tokens becomes its first and last max_length/2 tokens, decoded apart and joined."""
    ids = tokenizer(text).input_ids
    if len(ids) <= max_length:
        return text, False
    half = max_length // 2
    head, tail = (tokenizer.decode(part, skip_special_tokens=True) for part in (ids[:half], ids[-half:]))
    return head + tail, True


def _common_end(text: str, other: str) -> str:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(reversed(text), reversed(other), strict=False))
    return text[len(text) - sum(1 for _ in pairs) :]


def load_records(source: str | Path | None, task: str) -> list[Record]:
    """The published examples of a task.

    Args:
        source: a file, a folder holding TASK.jsonl (LongBench's own format) or *_TASK.json (whole prompts with their
            answers, as MiniLongBench's), or None for the hub.

    Raises:
        ValueError: no such data, or a broken file; the line or entry is named.
    """
    check_task(task)
    if source is None:
        return _from_hub(task)
    path = Path(source)
    file = path if path.is_file() else _find(path, task)
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":
        return [_published(record, f"{file.name} line {number}") for number, record in _lines(text, file.name)]
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise ValueError(f"longbench: {file.name}: expected JSON, got {error}") from error
    if not isinstance(entries, dict):
        raise ValueError(f"longbench: {file.name}: expected an object of entries, got a {type(entries).__name__}")
    return [_whole_prompt(task, entry, f"{file.name} entry {name}") for name, entry in entries.items()]


def describe(source: str | Path | None) -> dict[str, str]:
    """Name and fingerprint of a source of `load_records` that was read, for the rows of results."""
    if source is None:
        return {"hub": HUB, "commit": fingerprints.of_hub(HUB, "README.md", "dataset")}
    path = Path(source)
    files = [path] if path.is_file() else sorted({file for task in TASKS for file in _candidates(path, task)})
    return {"data": path.name, "sha256": fingerprints.of_files(files)}


def has_records(source: str | Path, task: str) -> bool:
    """Return whether a local source holds a file for the task."""
    path = Path(source)
    return path.is_file() or any(_candidates(path, task))


def _candidates(folder: Path, task: str) -> Iterator[Path]:
    for pattern in (f"{task}.jsonl", f"*_{task}.jsonl", f"{task}.json", f"*_{task}.json"):
        yield from sorted(folder.glob(pattern))


def _find(folder: Path, task: str) -> Path:
    file = next(_candidates(folder, task), None)
    if file is None:
        raise ValueError(f"longbench: expected {task}.jsonl or *_{task}.json in {str(folder)!r}, got no such file")
    return file


def _lines(text: str, name: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"longbench: {name} line {number}: expected JSON, got {error}") from error


def _published(record: Any, where: str) -> Record:
    try:
        return Record(
            record["context"], record["input"], tuple(record["answers"]), tuple(record.get("all_classes") or ())
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"longbench: {where}: expected context, input and answers, got {error!r}") from error


def _whole_prompt(task: str, entry: Any, where: str) -> Record:
    try:
        prompt, gold = entry["origin_prompt"], entry["gold"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"longbench: {where}: expected origin_prompt and gold, got {error!r}") from error
    answers = gold["answers"] if isinstance(gold, dict) else gold
    classes = gold.get("all_classes", ()) if isinstance(gold, dict) else ()
    context, question = unwrap(task, prompt, where)
    return Record(context, question, tuple(answers), tuple(classes))


def unwrap(task: str, prompt: str, where: str = "prompt") -> tuple[str, str]:
    """(context, input) out of a whole prompt, so that it can be wrapped in the task's own words again.

    Some files wrap a task in slightly other words: corrected spelling, or another question task's instruction.
    """
    form = TASKS[task]
    wrappings = [(form.head, form.tail)]
    corrected = [part.replace("asconcisely", "as concisely") for part in (form.head, form.tail)]
    wrappings += [(corrected[0], corrected[1])]
    if form.metric == "qa_f1":
        wrappings += [(TASKS["hotpotqa"].head, TASKS["hotpotqa"].tail)]
    for head, tail in wrappings:
        before, asks, after = tail.partition("{input}")
        end = after if asks else tail
        body = prompt if prompt.endswith(end) else prompt.rstrip("\n")  # some files add a newline
        if body.startswith(head) and body.endswith(end):
            return _split(task, body[len(head) :], before, after, asks=bool(asks))
    raise ValueError(f"longbench: {where}: expected {task}'s instruction around the context, got {prompt[:80]!r}…")


_INPUT_BEGINS = {"trec": "Question: ", "triviaqa": "Passage:\n", "samsum": "Dialogue: "}


def _split(task: str, body: str, before: str, after: str, *, asks: bool) -> tuple[str, str]:
    if not asks:
        return body[: len(body) - len(before)], ""
    body = body[: len(body) - len(after)]
    if task == "repobench-p":  # nothing marks where the file being completed begins
        return body, ""
    mark = before + _INPUT_BEGINS.get(task, "")
    place = body.rfind(mark)
    if place < 0:
        raise ValueError(f"longbench: expected {mark!r} before {task}'s question, got none")
    return body[:place], body[place + len(before) :]


def _from_hub(task: str) -> list[Record]:
    rows = load_rows("longbench", HUB, task, split="test", way_out="give local files with --longbench FOLDER")
    return [_published(row, f"{HUB}/{task} row {number}") for number, row in enumerate(rows)]
