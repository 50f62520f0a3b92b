"""`decantkv generate`: answer from a long prompt with a fraction of its cache."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from decantkv.cli import app
from decantkv.terminal import Console, write


@app.command()
def generate(
    model: Annotated[str, typer.Option(help="A model id, a model folder, or a .gguf file.")],
    prompt_file: Annotated[Path, typer.Option(help="UTF-8 text to read; - for standard input.")],
    question: Annotated[str, typer.Option(help="Asked after the text, inside the same prompt.")] = "",
    method: Annotated[str, typer.Option(help="A method, or method:preset; see `decantkv methods`.")] = "dropkv",
    budget: Annotated[str, typer.Option(help="What is kept: a fraction like 0.05, or a number of tokens.")] = "0.05",
    allocation: Annotated[str, typer.Option(help="How a layer's budget is spread over its heads.")] = "uniform",
    sinks: Annotated[int | None, typer.Option(help="First tokens always kept; default: the method's own.")] = None,
    protect: Annotated[list[str] | None, typer.Option(help="A span always kept, START:STOP; repeatable.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="A method's own option, NAME=VALUE; repeatable.")] = None,
    impl: Annotated[str, typer.Option(help="auto, reference, torch or triton.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate from a long prompt while keeping a fraction of its KV cache."""
    from decantkv.settings import Settings  # torch loads only for commands that need it

    text = read_prompt(prompt_file, question)
    spans = [parse_span(span) for span in protect or ()]
    options = dict(parse_option(pair) for pair in option or ())
    settings = Settings.parse(
        method,
        budget=parse_budget(budget),
        allocation=allocation,  # type: ignore[arg-type]  # checked by Settings.parse
        sinks=sinks,
        protect=spans,
        impl=impl,  # type: ignore[arg-type]  # checked by Settings.parse
        **options,
    )
    answer, report, seconds = run(model, text, settings, max_new_tokens=max_new_tokens, raw=raw)
    if as_json:
        print(json.dumps({"answer": answer, "seconds": seconds, "report": json.loads(report.to_json())}))
        return
    write(answer)
    Console(stderr=True, highlight=False).print(f"[dim]{escape(str(report))}\n{seconds:.1f} s in all[/]")


def run(model_name: str, text: str, settings: Any, *, max_new_tokens: int, raw: bool) -> tuple[str, Any, float]:
    """Load, generate, and return the answer, the report and the seconds that generation took."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    from decantkv.integration import attach
    from decantkv.models import chat_prompt, load

    disable_progress_bar()  # one of ours is enough
    console = Console(stderr=True)
    with console.status(f"loading {escape(model_name)}"):
        model, tokenizer = load(model_name)
    prompt, templated = (text, False) if raw else chat_prompt(tokenizer, text)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not templated).to(model.device)
    length = inputs["input_ids"].shape[1]
    if length == 0:
        raise ValueError("prompt-file: expected text, got nothing that makes a token")
    settings.n_keep([length])  # a span outside the prompt is refused before the work
    start = time.perf_counter()
    with (
        console.status(f"reading {length:,} tokens"),
        torch.no_grad(),
        attach(
            model,
            settings.method,
            budget=settings.budget,
            allocation=settings.allocation,
            sinks=settings.sinks,
            protect=settings.protect,
            impl=settings.impl,
        ) as attached,
    ):
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    answer = tokenizer.decode(output[0, length:], skip_special_tokens=True).strip()
    return answer, attached.report(), time.perf_counter() - start


def read_prompt(path: Path, question: str) -> str:
    """The prompt's text with the question after it.

    Raises:
        ValueError: no file, nothing in it, or bytes that are not UTF-8.
    """
    if str(path) == "-":
        data = typer.get_binary_stream("stdin").read()
    elif path.is_file():
        data = path.read_bytes()
    else:
        raise ValueError(f"prompt-file: expected a text file, got {path}")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"prompt-file: expected UTF-8 text, got byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from error
    if not text.strip():
        raise ValueError(f"prompt-file: expected text, got an empty file {path}")
    return f"{text.rstrip()}\n\n{question}" if question else text


def parse_budget(text: str) -> float | int:
    """A number of tokens when written as a whole number, else a fraction."""
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise ValueError(f"budget: expected a fraction like 0.05 or a number of tokens, got {text!r}") from None


def parse_span(text: str) -> tuple[int, int]:
    """START:STOP as two whole numbers."""
    start, colon, stop = text.partition(":")
    if not colon or not start.isdigit() or not stop.isdigit():
        raise ValueError(f"protect: expected START:STOP in tokens, got {text!r}")
    return int(start), int(stop)


def parse_option(text: str) -> tuple[str, Any]:
    """NAME=VALUE with the value as a number or a truth value where it is one."""
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"option: expected NAME=VALUE, got {text!r}")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value
