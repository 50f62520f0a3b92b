"""The answers behind every point, a length at a time, each text once however many methods gave it."""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

ANSWER_LETTERS, WANTED_LETTERS = 240, 200  # shown of each; the folder's rows hold all of it


def answers_by_length(rows: Sequence[Mapping[str, Any]], measure: str) -> dict[int, dict[str, list[Any]]]:
    """Per length, columns of P prompts and C cells.

    `cells` [C] are (regime, method, budget); `prompts`, `tasks` and `wanted` [P] are texts; `answers` and `values` [P]
    are lists of a prompt's different answers and what each is worth (None: not measured, or not finite); `given` [P][C]
    says which of them a cell gave, -1 for none.
    """
    prompts: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    answers: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["row"] == "prompt":
            prompts[row["length"]].append(row)
        else:
            answers[row["prompt"]].append(row)
    return {length: _columns(here, answers, measure) for length, here in prompts.items()}


def _columns(
    prompts: Sequence[Mapping[str, Any]], answers: Mapping[str, Sequence[Mapping[str, Any]]], measure: str
) -> dict[str, list[Any]]:
    cells = sorted({_cell(row) for prompt in prompts for row in answers.get(prompt["prompt"], ())})
    column = {cell: i for i, cell in enumerate(cells)}
    made: dict[str, list[Any]] = {
        "cells": cells,
        "prompts": [prompt["prompt"] for prompt in prompts],
        "tasks": [prompt["task"] for prompt in prompts],
        "wanted": [" | ".join(prompt.get("references", ()))[:WANTED_LETTERS] for prompt in prompts],
        "answers": [],
        "values": [],
        "given": [],
    }
    for prompt in prompts:
        different: dict[tuple[str, Any], int] = {}
        given = [-1] * len(cells)
        for row in answers.get(prompt["prompt"], ()):
            value = row.get(measure, math.nan)
            answer = (str(row.get("answer", ""))[:ANSWER_LETTERS], value if math.isfinite(value) else None)
            given[column[_cell(row)]] = different.setdefault(answer, len(different))
        made["answers"].append([text for text, _ in different])
        made["values"].append([value for _, value in different])
        made["given"].append(given)
    return made


def _cell(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["regime"], row["policy"], row["budget"]


def packed(content: Any) -> str:
    """JSON, compressed, as text that HTML leaves alone; a browser's DecompressionStream reads it."""
    data = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode(
        "utf-8", "backslashreplace"
    )
    return base64.b64encode(gzip.compress(data, 9, mtime=0)).decode()
