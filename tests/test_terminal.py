"""Control characters of texts that are not ours reach no terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import struct

import pytest
from rich.markup import escape
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

from decantkv import cli
from decantkv.base.terminal import visible, write
from decantkv.cli.console import Console

TITLE, CLIPBOARD, COLOUR, CSI = "\x1b]0;PWNED\x07", "\x1b]52;c;cm0gLXJm\x07", "\x1b[31mred\x1b[0m", "\x9b31m"
HOSTILE = f"a{TITLE}b{CLIPBOARD}c{COLOUR}d{CSI}e\rf\x08g\x7fh\u202ei\x00"
OWN = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # what rich itself writes: colours, cursor


def test_every_control_character_is_shown():
    every = "".join(map(chr, (*range(0x20), *range(0x7F, 0xA0))))
    shown = visible(every)
    assert len(shown) == len(every)
    assert {c for c in shown if not c.isprintable()} == {"\n", "\t"}
    assert visible("naïve 日本語 🙂 ½ – ‖a−v‖") == "naïve 日本語 🙂 ½ – ‖a−v‖"


def status(console):
    with console.status(f"loading {escape(HOSTILE)}"):
        pass


def progress(console):
    with Progress(TextColumn("{task.description}"), console=console) as bar:
        bar.add_task(escape(HOSTILE), total=1)


def table(console):
    rows = Table(title=HOSTILE, caption=HOSTILE)
    rows.add_column(HOSTILE)
    rows.add_row(HOSTILE)
    console.print(rows)


PRINTED = {
    "text": lambda console: console.print(escape(HOSTILE)),
    "a Text": lambda console: console.print(Text(HOSTILE), style="bold"),
    "without markup": lambda console: console.print(HOSTILE, markup=False, soft_wrap=True),
    "table": table,
    "status": status,
    "progress": progress,
}


@pytest.mark.parametrize("printed", PRINTED.values(), ids=PRINTED)
@pytest.mark.parametrize("terminal", [True, False])
def test_a_console_writes_no_sequence_of_a_text(printed, terminal):
    out = io.StringIO()
    printed(Console(file=out, force_terminal=terminal, width=300))
    rest = OWN.sub("", out.getvalue())
    assert not {c for c in rest if not c.isprintable()} - set("\n\t\r"), ascii(rest)
    assert "\x1b[31m" not in out.getvalue()
    assert "\rf" not in rest
    assert ("PWNED" in rest) == (terminal or printed is not status)


@pytest.mark.parametrize("terminal", [True, False])
def test_an_answer_is_shown_on_a_terminal_and_whole_in_a_file(monkeypatch, terminal):
    reader, writer = pty.openpty() if terminal else os.pipe()
    with open(writer, "w", encoding="utf-8") as stdout:
        monkeypatch.setattr("sys.stdout", stdout)
        write(HOSTILE)
        got = os.read(reader, 4096).decode()
    os.close(reader)
    assert ("\x1b" in got) == (not terminal)
    assert got.replace("\r\n", "\n") == (visible(HOSTILE) if terminal else HOSTILE) + "\n"


@pytest.mark.parametrize("argument", ["--model", "--prompt-file", "--method", "--protect", "--option", "--no-such"])
def test_an_error_line_shows_what_was_typed(capsys, tmp_path, argument):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("text")
    given = {"--model": str(tmp_path / "none"), "--prompt-file": str(prompt), argument: HOSTILE.replace("\x00", "")}
    with pytest.raises(SystemExit) as stop:
        cli.main(["generate", *(part for pair in given.items() for part in pair)])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1
    assert {c for c in error if not c.isprintable()} == {"\n"}, ascii(error)


def test_an_error_called_error_says_whose_it_is(capsys, monkeypatch):
    def broken():
        struct.unpack("<I", b"")

    monkeypatch.setattr(cli, "build", broken)
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 1
    assert capsys.readouterr().err.startswith("error: struct.error: unpack")
