"""`make sweep`: a row for every architecture and setting, into results/matrix/sweep.jsonl."""

from __future__ import annotations

import argparse
import json
import os
import warnings
from collections import Counter
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

from tests.sweep.architectures import names
from tests.sweep.rows import rows_of

OUT = Path("results/matrix/sweep.jsonl")


def main() -> None:
    """Judge the named architectures, or all, and put their rows in place of the older ones."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="class names; none: all")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    wanted = given.only or names()
    rows = {}
    if given.only and given.out.exists():
        rows = {(row["architecture"], row["setting"]): row for row in map(json.loads, given.out.open())}
    for name in wanted:
        rows = {key: row for key, row in rows.items() if key[0] != name}
        for row in rows_of(name):
            rows[name, row["setting"]] = row
        line = Counter(row["outcome"].split(":")[0] for row in rows.values() if row["architecture"] == name)
        print(name, ", ".join(f"{count} {what}" for what, count in line.items()), flush=True)
        given.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for _, row in sorted(rows.items())))
    print(Counter(row["outcome"].split(":")[0] for row in rows.values()))


main()
