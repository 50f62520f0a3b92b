"""Tables of a document, made from committed rows: each lies between two comments, of which the first is its recipe.

    <!-- rows
    of = "eval"                      # answers under results/eval; "halves", "ratios", "lines": see their functions
    …
    -->
    | the table |
    <!-- end -->

Numbers of a document that lie in such blocks cannot differ from the rows: `decantkv report --check` makes them anew.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from decantkv.lab.report.answer_tables import answer_table, halves_table
from decantkv.lab.report.ratio_tables import ratio_table

BLOCK = re.compile(r"(<!-- rows\n(?P<recipe>.*?)-->\n)(?P<table>.*?)(?=<!-- end -->)", re.DOTALL)


def differences(document: Path) -> list[str]:
    """Return what a document's blocks print otherwise than their recipes give; one line each."""
    text = _read(document)
    found = []
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start("table")) + 1
        made, printed = table(block["recipe"], document).splitlines(), block["table"].splitlines()
        differing = [(i, a, b) for i, (a, b) in enumerate(zip(printed, made, strict=False)) if a != b]
        if differing:
            i, there, expected = differing[0]
            found.append(f"{document}:{line + i}: expected {expected}, got {there}")
        elif len(made) != len(printed):
            found.append(f"{document}:{line}: expected {len(made)} lines of table, got {len(printed)}")
    return found


def count(document: Path) -> int:
    """Return how many blocks a document has."""
    return len(BLOCK.findall(_read(document)))


def rewrite(document: Path) -> bool:
    """Make a document's tables anew; whether anything changed."""
    text = _read(document)
    new = BLOCK.sub(lambda block: block[1] + table(block["recipe"], document), text)
    if new != text:
        document.write_text(new, encoding="utf-8")
    return new != text


def _read(document: Path) -> str:
    """A document whose blocks are whole.

    Raises:
        ValueError: a block without an end, or an end without a block; the line is named.
    """
    text = document.read_text(encoding="utf-8")
    marks = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line in ("<!-- rows", "<!-- end -->")]
    expected = [("<!-- rows", "<!-- end -->")[i % 2] for i in range(len(marks) + len(marks) % 2)]
    for (number, line), wanted in zip([*marks, (text.count("\n") + 1, "the end of the file")], expected, strict=False):
        if line != wanted:
            raise ValueError(f"report: {document}:{number}: expected {wanted}, got {line}")
    return text


def table(recipe: str, document: Path) -> str:
    """The table that a recipe gives, as lines of markdown.

    Raises:
        ValueError: the recipe is no TOML, or asks for rows that are not there; the document is named.
    """
    makers: dict[str, Callable[[Path, Mapping[str, Any]], list[list[str]]]] = {
        "eval": answer_table,
        "halves": halves_table,
        "ratios": ratio_table,
        "lines": line_table,
    }
    try:
        content = tomllib.loads(recipe)
        lines = makers[content["of"]](results(document), content)
    except (ValueError, KeyError) as error:
        raise ValueError(f"rows: a recipe in {document}: {error!r}:\n{recipe}") from error
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def results(document: Path) -> Path:
    """The folder `results` beside or above a document."""
    for folder in document.resolve().parents:
        if (folder / "results").is_dir():
            return folder / "results"
    raise ValueError(f"rows: expected a folder `results` at or above {document}, got none")


def line_table(root: Path, recipe: Mapping[str, Any]) -> list[list[str]]:
    """Numbers of JSON lines: a cell is one field of the one row that its column's and its line's conditions leave.

    The recipe's `columns` and `rows` are lists of [title, conditions]. Conditions are a table of field = value; dotted
    fields reach inside and "none" is null. What is no condition says what to print: `file`, `field` (or a list of
    fields, joined by a comma), `scale`, `digits`, `choose` (of several rows, that with the highest value of a field),
    `over` (conditions of a row to divide by).
    """
    shared = {key: value for key, value in recipe.items() if key not in ("of", "columns", "rows", "corner")}
    lines = [[recipe.get("corner", ""), *(title for title, _ in recipe["columns"])]]
    for title, row in recipe["rows"]:
        lines.append([title, *(_cell(root, {**shared, **column, **row}) for _, column in recipe["columns"])])
    return lines


PRINTED = ("file", "field", "scale", "digits", "over", "choose")


def _cell(root: Path, wanted: Mapping[str, Any]) -> str:
    if wanted.get("field") == "":
        return ""
    conditions = {key: value for key, value in wanted.items() if key not in PRINTED}
    row = _row(root, wanted["file"], conditions, wanted.get("choose"))
    fields = wanted["field"] if isinstance(wanted["field"], list) else [wanted["field"]]
    scale, digits = wanted.get("scale", 1.0), wanted.get("digits", 0)
    other = (
        _row(root, wanted["file"], {**conditions, **wanted["over"]}, wanted.get("choose")) if "over" in wanted else None
    )
    texts = []
    for field in fields:
        value = _field(row, field)
        if isinstance(value, str):
            texts.append(value)
        else:
            number = value * scale / (_field(other, field) if other else 1)
            texts.append(f"{number:,.{digits}f}".replace(",", " "))
    return ", ".join(texts)


def _row(root: Path, file: str, conditions: Mapping[str, Any], choose: str | None) -> Mapping[str, Any]:
    """The one row under the conditions; with `choose`, that with the highest value of this field."""
    lines: list[dict[str, Any]] = [json.loads(x) for x in (root / file).read_text(encoding="utf-8").splitlines()]
    found = [
        row
        for row in lines
        if all(_field(row, key) == (None if value == "none" else value) for key, value in conditions.items())
    ]
    if choose:
        found = sorted(found, key=lambda row: _field(row, choose) or 0.0)[-1:]
    if len(found) != 1:
        raise ValueError(f"{file}: expected one row with {conditions}, got {len(found)}")
    return found[0]


def _field(row: Mapping[str, Any] | None, name: str) -> Any:
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
