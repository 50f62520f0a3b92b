"""Tables for documents of the theory's rows: the score's and attention's ratio to the best set, beside the pools' ε."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def ratio_table(root: Path, recipe: Mapping[str, Any]) -> list[list[str]]:
    """A line per folder and pool: median ε, then median, 95th percentile and worst ratio of the score and of attention.

    A recipe names `folders` as [title, folder under results/theory], `pools` as [title, pool] and the rows' `scope`.
    """
    lines = [["", "ε, median", "score: median, 95 %, worst", "attention: median, 95 %, worst"]]
    for title, name in recipe["folders"]:
        ratios = [row for row in _rows(root / "theory" / name) if row["kind"] == "ratio"]
        for words, pool in recipe["pools"]:
            here = [
                row for row in ratios if row["pool"] == pool and row["scope"] == recipe["scope"] and row["best"] > 0
            ]
            if not here:
                raise ValueError(f"expected searched pools {pool!r} in {name}, got none")
            epsilon = float(np.median([row["epsilon"] for row in here]))
            lines.append([f"{title}, {words}", f"{epsilon:.1e}", *(_spread(here, way) for way in ("raw", "attention"))])
    return lines


def _spread(rows: list[dict[str, Any]], way: str) -> str:
    ratios = np.array([row[way] / row["best"] for row in rows])
    return f"{np.median(ratios):.3f}, {np.percentile(ratios, 95):.2f}, {ratios.max():.2f}"


def _rows(folder: Path) -> list[dict[str, Any]]:
    found = []
    for file in sorted(folder.glob("rows*.jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            found += [json.loads(line) for line in lines if '"ratio"' in line]
    return found
