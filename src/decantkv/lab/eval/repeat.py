"""Answer committed rows again: whether today's code gives the answers that stand in a table."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from decantkv.lab.eval.chat import REGIMES
from decantkv.lab.eval.engine.policy import FULL, parse_policies
from decantkv.lab.eval.results import Cell, cell_of, read_folder
from decantkv.lab.eval.runner import Plan
from decantkv.lab.eval.session import Session, Sources


class Repeated(NamedTuple):
    """A committed answer and today's.

    Attributes:
        then, now: the rows.
    """

    cell: Cell
    then: Mapping[str, Any]
    now: Mapping[str, Any]

    @property
    def same(self) -> bool:
        """Return whether both answers are the same text."""
        return bool(self.then["answer"] == self.now["answer"])


@dataclass(frozen=True)
class Selected(Plan):
    """A plan of single cells.

    Attributes:
        chosen: prompt -> its cells.
    """

    chosen: Mapping[str, Sequence[Cell]] | None = None

    def cells(self, prompt: str) -> list[Cell]:
        """The chosen cells of a prompt."""
        return list((self.chosen or {}).get(prompt, ()))


def repeat(folder: Path, model: str, *, rows: int, length: int = 0, sources: Sources, **options: Any) -> list[Repeated]:
    """Answer about `rows` of a folder's answers again, evenly spread over its prompts.

    Args:
        length: prompts of this length alone; 0 takes all.
        sources: the texts that the folder's prompts were made of; options: `Runner`'s.

    Raises:
        ValueError: the folder has no answers of this length, or was measured with other weights or texts.
    """
    run, found = read_folder(folder)
    made = run["configuration"]
    prompts = {row["prompt"]: row for row in found if row["row"] == "prompt" and length in (0, row["length"])}
    answers = [row for row in found if row["row"] == "answer" and "answer" in row and row["prompt"] in prompts]
    if not answers:
        raise ValueError(f"folder: expected answers to prompts of {length or 'any'} tokens, got none in {folder}")
    picked = {cell_of(row): row for row in answers[:: max(1, len(answers) // rows)]}
    chosen: dict[str, list[Cell]] = {}
    for cell in picked:
        chosen.setdefault(cell.prompt, []).append(cell)
    labels = dict.fromkeys(cell.policy for cell in picked if cell.policy != FULL)
    plan = Selected(
        tuple(parse_policies(",".join(labels) or FULL)),
        tuple(dict.fromkeys(cell.budget for cell in picked)),
        tuple(REGIMES),
        likelihood=any("nll" in row for row in picked.values()),
        chosen=chosen,
    )
    _, tasks, lengths, indices = zip(*(prompt.split("/") for prompt in chosen), strict=True)
    session = Session(
        model, made["suite"], tuple(dict.fromkeys(tasks)), tuple(dict.fromkeys(map(int, lengths))),
        1 + max(map(int, indices)), sources, made["seed"], made["dtype"], made["yarn"], made["system"], made["note"],
        beyond_context=True,
    )  # fmt: skip
    texts = session.texts()
    loaded = session.load(texts)
    with tempfile.TemporaryDirectory() as scratch:
        opened = session.open(loaded, texts, plan, Path(scratch), command="repeat", begun=0.0, **options)
        now = opened.store.configuration
        if other := [name for name in ("weights", "chat_template", "sources") if now[name] != made[name]]:
            raise ValueError(
                f"{other[0]}: expected those that {folder} was measured with, {made[other[0]]}, got {now[other[0]]}"
            )
        opened.runner.run([(key, make) for key, make in opened.prompts if key in chosen], opened.store)
        opened.store.close()
        _, again = read_folder(Path(scratch))
    return [Repeated(cell_of(row), picked[cell_of(row)], row) for row in again if row["row"] == "answer"]
