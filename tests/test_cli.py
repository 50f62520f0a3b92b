"""The command line as a person types it: output, one-line errors, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from decantkv.cli import main
from decantkv.options import reason_of


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return stop.value.code, captured.out, captured.err


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_text("The sky was grey. " * 30 + "The magic number is 4417. " + "The sea was calm. " * 30)
    return path


def test_methods_as_a_table_and_as_json(capsys):
    code, out, _ = run(capsys, "methods")
    assert code == 0
    assert "dropkv" in out
    assert "[p/(1" in out, "brackets are part of a formula, not markup"
    code, out, _ = run(capsys, "methods", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert {"dropkv", "snapkv", "knorm", "streaming", "sliding", "recent", "random"} <= rows.keys()
    assert (rows["dropkv"]["keeps"], rows["dropkv"]["pooling"]) == ("last 8", "max 11, all")
    assert rows["criticalkv"]["needs"] == "W_O"


def test_brackets_in_what_was_typed_are_no_markup(capsys):
    code, _, err = run(capsys, "generate", "--model", "m", "--prompt-file", "a[bold]b.txt", "--question", "why")
    assert code == 2
    assert "a[bold]b.txt" in err


def test_as_a_module():
    run = subprocess.run([sys.executable, "-m", "decantkv", "methods", "--json"], capture_output=True, check=True)
    assert "dropkv" in {row["name"] for row in json.loads(run.stdout)}


@pytest.mark.model
def test_generate_answers_from_a_fifth_of_the_cache(capsys, text, model_path):
    question = "What is the magic number? Answer with four digits."
    arguments = ["generate", "--model", model_path, "--prompt-file", text, "--question", question, "--budget", "0.2"]
    code, out, _ = run(capsys, *arguments, "--max-new-tokens", "16", "--option", "window=16", "--json")
    result = json.loads(out)
    assert code == 0
    assert "4417" in result["answer"]
    layers = result["report"]["layers"]
    assert len(layers) == 30
    assert all(layer["kept"] == [[layer["seen"][0] // 5] * 3] for layer in layers)
    code, out, err = run(capsys, *arguments, "--max-new-tokens", "2")
    assert code == 0
    assert "tokens per head" in err
    code, _, err = run(capsys, *arguments, "--protect", "0:100000")
    assert (code, "protect: expected spans inside" in err) == (2, True)


BAD = [
    (["--budget", "0"], "budget: expected"),
    (["--budget", "-1"], "budget: expected"),
    (["--budget", "1.5"], "budget: expected"),
    (["--budget", "x"], "budget: expected"),
    (["--budget", "nan"], "budget: expected"),
    (["--method", "dropvk"], "did you mean 'dropkv'"),
    (["--option", "window=0"], "window: expected"),
    (["--option", "window=eight"], "window: expected"),
    (["--option", "colour=red"], "colour: expected"),
    (["--option", "window"], "option: expected NAME=VALUE"),
    (["--protect", "9:2"], "protect: expected start below stop"),
    (["--protect", "9"], "protect: expected START:STOP"),
    (["--sinks", "-1"], "sinks: expected"),
    (["--impl", "cuda"], "impl: expected"),
    (["--budget", "4"], "budget: expected at least 8"),
    (["--model", "no-such-folder/model"], "model: expected"),
    (["--max-new-tokens", "0"], "max-new-tokens"),
    (["--colour", "red"], "No such option"),
]


@pytest.mark.parametrize(("extra", "says"), BAD, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_bad_input_is_one_line_and_exit_code_2(capsys, monkeypatch, text, extra, says):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["generate", "--prompt-file", text, *extra]
    if "--model" not in extra:
        arguments += ["--model", text]
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert says in err
    assert out == ""
    assert err.count("\n") == 1


def test_files_that_are_no_prompt_or_no_model(capsys, tmp_path, text):
    broken = tmp_path / "broken.txt"
    broken.write_bytes(b"fine until here \xff\xfe")
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for path, says in (
        (broken, "byte 0xff at offset 16"),
        (empty, "empty file"),
        (tmp_path / "none", "expected a text file"),
    ):
        code, _, err = run(capsys, "generate", "--model", text, "--prompt-file", path)
        assert (code, says in err) == (2, True), err
    folder = tmp_path / "folder"
    folder.mkdir()
    for model, says in ((text, "expected a .gguf file or a model folder"), (folder, "config.json")):
        code, _, err = run(capsys, "generate", "--model", model, "--prompt-file", text)
        assert (code, says in err) == (2, True), err


def test_a_reason_of_several_lines_is_not_cut_where_it_only_announces_them():
    listed = ValueError("Couldn't instantiate the backend tokenizer from one of: \n(1) a file,\n(2) an instance.\n")
    assert reason_of(listed) == "Couldn't instantiate the backend tokenizer from one of: (1) a file, (2) an instance."
    assert reason_of(OSError("No such model.\nMake sure that …")) == "No such model."
    assert reason_of(OSError()) == "OSError"
