"""Documents print what their rows say, and the check would see it if they did not."""

import json
import re
from pathlib import Path

import pytest

from decantkv.cli import main
from decantkv.lab.report import blocks
from decantkv.lab.report.answer_tables import answers

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / name
    for name in (
        "README.md",
        "docs/ask-anything.md",
        "docs/generation.md",
        "docs/results.md",
        "docs/should-i-evict.md",
        "docs/vllm.md",
        "results/eval/README.md",
        "results/theory/README.md",
    )
]


def answer(task, index, policy, score, length=4096):
    place = {"regime": "any", "budget": "1"} if policy == "full" else {"regime": "aware", "budget": "0.1"}
    return {"row": "answer", "prompt": f"r/{task}/{length}/{index}", "policy": policy, "score": score, **place}


def folder_of(root, rows):
    from decantkv.lab.eval.results import digest

    configuration = {"suite": "ruler"}
    run = {"configuration": configuration, "sessions": [{"command": "decantkv eval"}]}
    folder = root / "results" / "eval" / "run"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run))
    lines = [json.dumps({"config": digest(configuration), "session": 0, **row}) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def document(tmp_path):
    rows = []
    for task, full, mine, theirs in (("a", 1.0, 0.5, 0.25), ("vt", 1.0, 1.0, 0.0), ("hard", 0.2, 1.0, 0.0)):
        for i in range(4):
            rows.append({"row": "prompt", "prompt": f"r/{task}/4096/{i}", "task": task, "length": 4096})
            rows += [answer(task, i, "full", full), answer(task, i, "dropkv", mine)]
            rows += [answer(task, i, "snapkv", theirs)] if i < 3 else []
    folder_of(tmp_path, rows)
    text = """Before.

<!-- rows
of = "eval"
folders = ["run"]
lengths = [4096]
regimes = ["aware"]
budgets = ["0.1"]
tasks = ["all", "all - vt"]
columns = ["lengths"]
rows = [["full", "full"], ["mine", "dropkv"], ["less", "dropkv - snapkv"], ["share", "dropkv / full"],
  ["prompts", "prompts"]]
-->
<!-- end -->
After.
"""
    file = tmp_path / "page.md"
    file.write_text(text)
    blocks.rewrite(file)
    return file


def test_a_table_is_what_the_rows_give(document):
    lines = document.read_text().splitlines()
    assert lines[lines.index("-->") + 1 : -2] == [
        "|  | 4K |",
        "| --- | --- |",
        "| full | 100.0 / 100.0 |",
        "| mine | 75.0 / 50.0 |",
        "| less | **62.5** {6} / **25.0** {3} |",
        "| share | 75 % / 50 % |",
        "| prompts | 8 / 4 |",
    ]
    assert blocks.differences(document) == []
    assert not blocks.rewrite(document)


def test_a_changed_number_is_found_and_named(document, capsys):
    document.write_text(document.read_text().replace("75.0", "76.0"))
    (found,) = blocks.differences(document)
    assert "page.md:17: expected | mine | 75.0 / 50.0 |, got | mine | 76.0 / 50.0 |" in found
    with pytest.raises(SystemExit) as exit_of:
        main(["report", "--check", str(document)])
    assert exit_of.value.code == 1
    assert "| mine | 75.0 / 50.0 |" in capsys.readouterr().err


def test_documents_that_print_their_rows_pass(document, capsys):
    with pytest.raises(SystemExit) as exit_of:
        main(["report", "--check", str(document)])
    assert exit_of.value.code in (0, None)
    assert "1 tables" in capsys.readouterr().err


@pytest.mark.parametrize("mark", ["<!-- rows\n", "<!-- end -->\n"])
def test_a_block_that_is_not_whole_is_refused(document, mark):
    document.write_text(document.read_text().replace(mark, ""))
    with pytest.raises(ValueError, match="expected <!-- "):
        blocks.differences(document)


def test_changed_rows_are_found(document):
    rows = document.parent / "results" / "eval" / "run" / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"score": 0.5', '"score": 0.75'))
    answers.cache_clear()
    assert blocks.differences(document)


def test_a_recipe_that_asks_for_missing_rows_is_named(document):
    document.write_text(document.read_text().replace("[4096]", "[8192]"))
    with pytest.raises(ValueError, match="page"):
        blocks.differences(document)


def test_lines_of_other_files(tmp_path):
    (tmp_path / "results" / "gpu").mkdir(parents=True)
    rows = [{"kv": 4, "who": "we", "us": {"p50": 1234.56}}, {"kv": 4, "who": "they", "us": {"p50": 2469.12}}]
    (tmp_path / "results" / "gpu" / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = tmp_path / "page.md"
    file.write_text("""<!-- rows
of = "lines"
file = "gpu/x.jsonl"
field = "us.p50"
columns = [["4K", {kv = 4}]]
rows = [["we", {who = "we", digits = 1}], ["times", {who = "they", over = {who = "we"}, digits = 2}]]
-->
<!-- end -->
""")
    blocks.rewrite(file)
    assert "| we | 1 234.6 |\n| times | 2.00 |\n" in file.read_text()


def test_committed_documents_print_what_their_rows_say():
    assert [line for document in DOCUMENTS for line in blocks.differences(document)] == []


NAMES = re.compile(r"\b[01]\.5 ?[Bb]\b|[Qq]wen2\.5|SmolLM2-\w+|\.jsonl")


def test_decimals_of_the_evaluation_page_lie_in_tables_made_from_rows():
    text = (ROOT / "results" / "eval" / "README.md").read_text(encoding="utf-8")
    told = text[text.index("## How to read the tables") : text.index("## A late question is read by another path")]
    prose = NAMES.sub("", blocks.BLOCK.sub("", told))
    assert re.findall(r".*\d[.]\d.*", prose) == []


def test_the_evaluation_page_is_held_by_its_rows():
    assert blocks.count(ROOT / "results" / "eval" / "README.md") > 20
