"""The command line as a person types it: output, one-line errors, exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import decantkv
from decantkv import cli
from decantkv.base.options import reason_of
from decantkv.cli import main
from decantkv.hf.loading import load
from tests.support import tiny


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
    (["--method", "DropKV"], "did you mean 'dropkv'"),
    (["--prefill-chunk", "0"], "prefill_chunk: expected"),
    (["--max-kv-tokens", "64"], "prefill_chunk: expected"),
    (["--every", "-1"], "every: expected"),
    (["--save", "no-such-folder/cache.safetensors"], "save: expected a file in an existing folder"),
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


def test_help_and_version(capsys):
    code, out, err = run(capsys, "--version")
    assert (code, out, err) == (0, f"decantkv {decantkv.__version__}\n", "")
    for arguments in (["-h"], ["eval", "-h"], ["generate", "-h"], ["bench", "-h"], ["eval"], []):
        code, out, err = run(capsys, *arguments)
        assert (code, err) == (0, ""), arguments
        assert "Usage: " in out


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model of 256 positions in a folder, with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("small")
    words = {f"w{i}": i for i in range(tiny.VOCABULARY - 1)}
    tokenizer = Tokenizer(WordLevel({**words, "[UNK]": len(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    tiny.llama(max_position_embeddings=256).save_pretrained(folder)
    return folder


def written(tmp_path, count):
    path = tmp_path / f"{count}.txt"
    path.write_text(" ".join(f"w{i * 7 % 90}" for i in range(count)))
    return path


def test_chunks_cap_every_compare_and_save(capsys, small, tmp_path):
    prompt, saved = written(tmp_path, 200), tmp_path / "cache.safetensors"
    given = ["generate", "--model", small, "--prompt-file", prompt, "--raw", "--budget", "0.2", "--max-new-tokens", 20]
    code, out, err = run(capsys, *given, "--json")
    assert code == 0, err
    whole = json.loads(out)
    code, out, err = run(capsys, *given, "--prefill-chunk", 64, "--compare", "--save", saved, "--json")
    assert code == 0, err
    chunked = json.loads(out)
    assert chunked["answer"] == whole["answer"]
    assert len(chunked["full_answer"].split()) == 20
    cache = decantkv.EvictingCache.load(saved, load(small)[0])
    assert cache.get_seq_length() == 219
    assert [layer.stored for layer in cache.layers] == [40 + 19] * 3
    code, out, err = run(capsys, *given, "--prefill-chunk", 64, "--max-kv-tokens", 80, "--every", 8, "--compare")
    assert code == 0, err
    assert "full cache, " in out


def test_an_answer_is_written_while_it_is_made(small, tmp_path):
    reader, writer = pty.openpty()
    given = ["generate", "--model", str(small), "--prompt-file", str(written(tmp_path, 60)), "--raw", "--budget", "0.5"]
    done = subprocess.run(
        [sys.executable, "-m", "decantkv", *given, "--max-new-tokens", "9"], stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    shown = os.read(reader, 4096).decode()
    os.close(reader)
    assert done.returncode == 0, done.stderr
    assert len(shown.split()) == 9
    assert b"tokens per head" in done.stderr


@pytest.mark.parametrize("command", ["generate", "show"])
def test_a_prompt_beyond_the_context_is_refused_before_the_weights(capsys, small, tmp_path, command, monkeypatch):
    given = [command, "--model", small, "--raw", "--max-new-tokens", 4]
    given += ["--out", tmp_path / "page.html"] if command == "show" else []
    code, _, err = run(capsys, *given, "--prompt-file", written(tmp_path, 253))
    assert code == 0, err
    code, _, err = run(capsys, *given, "--prompt-file", written(tmp_path, 254), "--beyond-context")
    assert code == 0, err
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    code, _, err = run(capsys, *given, "--prompt-file", written(tmp_path, 254))
    assert code == 2
    assert "expected at most the model's 256 tokens for prompt and answer, got 257" in err


def test_plan_refuses_the_same(capsys, small):
    given = ["plan", "--model", small, "--budget", "0.1", "--length"]
    assert run(capsys, *given, 256)[0] == 0
    code, _, err = run(capsys, *given, 257)
    assert (code, "length: expected at most the model's 256 tokens" in err) == (2, True)
    code, out, _ = run(capsys, *given, 257, "--beyond-context")
    assert code == 0
    assert " 0.00 " not in out


def test_transformers_bars_are_not_shown_and_stay_as_they_were(small):
    code = f"from decantkv.hf.loading import load; load({str(small)!r})\n"
    code += "from transformers.utils.logging import is_progress_bar_enabled; print(is_progress_bar_enabled())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_gguf_without_its_package_names_the_extra(capsys, text, monkeypatch):
    text.write_bytes(b"GGUF and so on")
    monkeypatch.setattr("decantkv.hf.loading.find_spec", lambda name: None)
    code, _, err = run(capsys, "generate", "--model", text, "--prompt-file", __file__)
    assert code == 2
    assert "[gguf]" in err
    assert err.count("\n") == 1


def test_other_packages_add_commands_by_an_entry_point(monkeypatch, capsys):
    def hello() -> None:
        print("hello")

    def added(entries):
        return lambda group: [EntryPoint(name, f"{__name__}:{name}", group) for name in entries]

    monkeypatch.setattr(sys.modules[__name__], "hello", hello, raising=False)
    monkeypatch.setattr(cli, "app", typer.Typer())
    monkeypatch.setattr(cli, "entry_points", added(["hello"]))
    commands = cli.build.__wrapped__().commands
    commands["hello"].callback()
    assert capsys.readouterr().out == "hello\n"
    assert {*cli.COMMANDS, "hello"} == {*commands}
    monkeypatch.setattr(cli, "entry_points", added(["eval"]))
    with pytest.raises(ValueError, match=r"decantkv.commands: expected names that are free, got eval"):
        cli.build.__wrapped__()
