"""`decantkv condense` and `decantkv ask`: a document is read once, and asked from its file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from decantkv.base.terminal import write
from decantkv.cli.console import Console
from decantkv.cli.generate import parse_option, read_prompt, streamer


def condense(
    document: Annotated[Path, typer.Argument(help="UTF-8 text to read; - for standard input.")],
    model: Annotated[str, typer.Option(help="A model id, a model folder, or a .gguf file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write, e.g. book.kv.")],
    budget: Annotated[str, typer.Option(help="What is kept: 0.1, 10% or a number of tokens.")] = "0.1",
    method: Annotated[
        str, typer.Option(help="A method, method:preset or file.py:Class; see `decantkv methods`.")
    ] = "dropkv",
    rehearsal: Annotated[
        str, typer.Option(help="Whose queries decide: replay, anchors, anchors:0.05, or several joined by +.")
    ] = "replay+anchors",
    question: Annotated[list[str] | None, typer.Option(help="A likely question to rehearse; repeatable.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="A method's own option, NAME=VALUE; repeatable.")] = None,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Tokens that are read in one forward.")] = 4096,
    beyond_context: Annotated[
        bool, typer.Option("--beyond-context", help="Allow documents beyond the model's context.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read a document once, keep a part of its KV cache without knowing the questions, and write it to a file."""
    from decantkv.cache.documents import condense as read_and_condense  # torch loads only for commands that need it
    from decantkv.cache.report import format_bytes
    from decantkv.hf.loading import load
    from decantkv.selection.budget import Budget
    from decantkv.settings import Settings

    text = read_prompt(document, "")
    if not out.parent.is_dir():
        raise ValueError(f"out: expected a file in an existing folder, got {out}")
    options = dict(parse_option(pair) for pair in option or ())
    Settings.parse(method, budget=Budget.parse(budget), rehearsal=rehearsal, **options)  # before a model is loaded
    console = Console(stderr=True)
    with console.status(f"loading {escape(model)}"):
        loaded, tokenizer = load(model)
    start = time.perf_counter()
    with console.status(f"reading {escape(str(document))}"):
        made = read_and_condense(
            loaded, tokenizer, text, budget=budget, method=method, rehearsal=rehearsal, questions=question or (),
            prefill_chunk=prefill_chunk, beyond_context=beyond_context, **options,
        )  # fmt: skip
    seconds = time.perf_counter() - start
    made.save(out, source=model)
    report, size = made.cache.report(), out.stat().st_size
    if as_json:
        print(
            json.dumps(
                {"tokens": made.ids.shape[1], "seconds": seconds, "bytes": size, "report": json.loads(report.to_json())}
            )
        )
        return
    console.print(
        f"{made.ids.shape[1]:,} tokens read in {seconds:.1f} s; {format_bytes(report.bytes_before)} of keys and "
        f"values, {format_bytes(size)} in {out}",
        markup=False,
    )


def ask(
    file: Annotated[Path, typer.Argument(help="A file that `decantkv condense` wrote.")],
    questions: Annotated[list[str], typer.Argument(help="Questions, each answered from the document alone.")],
    model: Annotated[
        str, typer.Option(help="The model that read the document; default: from where it was loaded then.")
    ] = "",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per question.")] = False,
) -> None:
    """Answer questions from a condensed document; the document is not read again."""
    from decantkv.cache.documents import Document, source_of
    from decantkv.hf.loading import load

    source = model or source_of(file)
    if not source:
        raise ValueError(f"model: expected the model that read {file}, which does not name it, got none")
    console = Console(stderr=True)
    with console.status(f"loading {escape(source)}"):
        loaded, tokenizer = load(source)
    document = Document.load(file, loaded, tokenizer)
    stream = not as_json and sys.stdout.isatty()
    for question in questions:
        start = time.perf_counter()
        options = {"streamer": streamer(tokenizer)} if stream else {}
        answer = document.ask(question, max_new_tokens=max_new_tokens, **options)
        seconds = time.perf_counter() - start
        if as_json:
            print(json.dumps({"question": question, "answer": answer, "seconds": seconds}))
        elif not stream:
            write(answer)
        console.print(f"[dim]{seconds:.1f} s, {document.cache.nbytes() / 1e6:,.1f} MB of keys and values[/]")
