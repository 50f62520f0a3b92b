"""LongBench's metrics (THUDM/LongBench, MIT), from 0 to 1: the best over the references, as its eval does."""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

_PUNCTUATION = set(string.punctuation)
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"\d+")


def normalise(text: str) -> list[str]:
    """Lower-case words without punctuation and articles."""
    bare = "".join(letter for letter in text.lower() if letter not in _PUNCTUATION)
    return _ARTICLE.sub(" ", bare).split()


def qa_f1(prediction: str, reference: str, details: Mapping[str, Any]) -> float:
    """F1 of the words the answer shares with the reference, repeated words counted as often."""
    said, wanted = normalise(prediction), normalise(reference)
    shared = sum((Counter(said) & Counter(wanted)).values())
    if shared == 0:
        return 0.0
    precision, recall = shared / len(said), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def rouge_l(prediction: str, reference: str, details: Mapping[str, Any]) -> float:
    """ROUGE-L's F by the package `rouge`, which LongBench numbers mean; 0 where it can make nothing of a text."""
    try:
        scores = _rouge().get_scores([prediction], [reference], avg=True)
    except (ValueError, RecursionError):  # rouge raises ValueError on an empty text, recurses on very long ones
        return 0.0
    return float(scores["rouge-l"]["f"])


@cache
def _rouge() -> Any:
    if find_spec("rouge") is None:
        raise ModuleNotFoundError("LongBench's summaries need the package rouge: pip install 'decantkv[eval]'")
    from rouge import Rouge

    return Rouge(metrics=["rouge-l"])


def classification(prediction: str, reference: str, details: Mapping[str, Any]) -> float:
    """1/k when the right class is among the k class names found, names inside the right one's aside."""
    found = [name for name in details["all_classes"] if name in prediction]
    for name in found:  # the original removes while it walks, and so skips the name after each removed one
        if name in reference and name != reference:
            found.remove(name)
    return 1.0 / len(found) if reference in found else 0.0


def count(prediction: str, reference: str, details: Mapping[str, Any]) -> float:
    """The share of the answer's numbers that equal the reference."""
    numbers = _NUMBER.findall(prediction)
    return numbers.count(str(reference)) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, reference: str, details: Mapping[str, Any]) -> float:
    """`count` with the number of "Paragraph N"."""
    named = re.search(r"Paragraph (\d+)", reference)
    if named is None:
        raise ValueError(f"reference: expected 'Paragraph N', got {reference!r}")
    return count(prediction, named.group(1), details)


def code_similarity(prediction: str, reference: str, details: Mapping[str, Any]) -> float:
    """Edit similarity of the first line that is neither comment nor fence, in whole per cent.

    fuzzywuzzy's ratio, as it is without python-Levenshtein: difflib's, rounded.
    """
    lines = (line for line in prediction.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//")))
    line = next(lines, "")
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def _best(metric: Callable[[str, str, Mapping[str, Any]], float]) -> Callable[..., float]:
    def best(prediction: str, references: Sequence[str], details: Mapping[str, Any]) -> float:
        if details.get("first_line_only"):
            prediction = prediction.lstrip("\n").split("\n")[0]
        return max(metric(prediction, reference, details) for reference in references)

    return best


LONGBENCH_METRICS: dict[str, Callable[[str, Sequence[str], Mapping[str, Any]], float]] = {
    "qa_f1": _best(qa_f1),
    "rouge_l": _best(rouge_l),
    "classification": _best(classification),
    "count": _best(count),
    "retrieval": _best(retrieval),
    "code_similarity": _best(code_similarity),
}
