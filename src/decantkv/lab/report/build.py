"""Fill the page's template."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from decantkv.base.json_lines import read
from decantkv.lab.eval.chat import REGIMES
from decantkv.lab.report.answers import packed
from decantkv.lab.report.pages import find_folders, section

# told apart by hue and lightness, also with the common kinds of colour blindness; marks differ beside
PALETTE = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
    "#8c564b", "#7f7f7f", "#6a3d9a", "#b2a300", "#e31a1c", "#17becf",
)  # fmt: skip
BENCH_LINES = 60


def build(folders: Sequence[Path], bench: Sequence[Path] = ()) -> str:
    """The page of all results under some folders.

    Args:
        bench: JSON-lines files of measured times, shown as tables.

    Raises:
        ValueError: no results, or a broken file; the line is named.
        ModuleNotFoundError: jinja2 is not installed.
    """
    if find_spec("jinja2") is None:
        raise ModuleNotFoundError("the report needs the package jinja2: pip install 'decantkv[eval]'")
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    sections: list[dict[str, Any]] = []
    answers: dict[str, str] = {}
    for number, folder in enumerate(find_folders(folders)):
        made = asdict(section(folder, number))
        answers |= {f"answers-{made['id']}-{length}": text for length, text in made.pop("answers").items()}
        sections.append(made)
    return environment.from_string(_file("page.html")).render(
        sections=packed(sections),
        answers=answers,
        regimes=REGIMES,
        palette=PALETTE,
        scripts=[_file("chart.js"), _file("page.js")],
        latency=[bench_table(file) for file in bench],
    )


def _file(name: str) -> str:
    return (resources.files("decantkv.lab.report") / name).read_text(encoding="utf-8")


def _flat(row: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            yield prefix + key, round(value, 3) if isinstance(value, float) else value


def bench_table(file: Path) -> dict[str, Any]:
    """A JSON-lines file of flat rows as a table.

    Raises:
        ValueError: no such file, or a broken line; it is named.
    """
    if not file.is_file():
        raise ValueError(f"bench: expected a file of JSON lines, got {str(file)!r}")
    rows = [dict(_flat(row)) for row in read(file)]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return {
        "title": file.name,
        "columns": columns,
        "lines": [[row.get(column, "") for column in columns] for row in rows[:BENCH_LINES]],
    }
