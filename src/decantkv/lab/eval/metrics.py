"""How an answer is scored: RULER's string matching and LongBench's metrics, each for one answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from decantkv.lab.eval.longbench.metrics import LONGBENCH_METRICS
from decantkv.lab.eval.sample import Sample

Metric = Callable[[str, Sequence[str], Mapping[str, Any]], float]
"""(prediction, references, the sample's details) -> 0 to 1."""

_CONTROL = re.compile(r"[\x00-\x1f]")


def clean(prediction: str) -> str:
    """RULER's post-processing: control characters become newlines, the ends are stripped."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def string_match_all(prediction: str, references: Sequence[str], details: Mapping[str, Any]) -> float:
    """The share of references found in the answer, letter case aside."""
    text = clean(prediction).lower()
    return sum(reference.lower() in text for reference in references) / len(references)


def string_match_part(prediction: str, references: Sequence[str], details: Mapping[str, Any]) -> float:
    """1 if any reference is found in the answer, letter case aside, else 0."""
    text = clean(prediction).lower()
    return float(any(reference.lower() in text for reference in references))


METRICS: dict[str, Metric] = {
    "string_match_all": string_match_all,
    "string_match_part": string_match_part,
    **LONGBENCH_METRICS,
}


def score(sample: Sample, prediction: str) -> float:
    """The sample's metric of an answer, from 0 to 1."""
    return METRICS[sample.metric](prediction, sample.references, sample.details)
