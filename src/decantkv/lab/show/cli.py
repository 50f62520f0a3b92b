"""`decantkv show`: what a method kept of a prompt, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from decantkv.cli.console import Console
from decantkv.hf.context import check_context


def show(
    model: Annotated[str, typer.Option(help="A model id, a model folder, or a .gguf file.")],
    prompt_file: Annotated[Path, typer.Option(help="UTF-8 text to read; - for standard input.")],
    question: Annotated[str, typer.Option(help="Asked after the text, inside the same prompt.")] = "",
    method: Annotated[list[str] | None, typer.Option(help="A method, or method:preset; repeat to compare.")] = None,
    budget: Annotated[str, typer.Option(help="What is kept: a share like 5% or 0.05, or a number of tokens.")] = "0.05",
    allocation: Annotated[str | None, typer.Option(help="How the budget is spread; default: the method's own.")] = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens always kept; default: the method's own.")] = None,
    protect: Annotated[list[str] | None, typer.Option(help="A span always kept, START:STOP; repeatable.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 48,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the model's chat template.")] = False,
    out: Annotated[Path, typer.Option(help="The page.")] = Path("decantkv.html"),
    beyond_context: Annotated[
        bool, typer.Option("--beyond-context", help="Allow prompts beyond the model's context.")
    ] = False,
    name: Annotated[str, typer.Option(help="What to call the model; default: its id or its file's name.")] = "",
) -> None:
    """Write one self-contained page: the prompt inked by what was kept, and what the answer would have missed."""
    from decantkv.cli.generate import parse_budget, parse_span, read_prompt
    from decantkv.hf.loading import load, name_of
    from decantkv.lab.show.collect import collect
    from decantkv.lab.show.page import render
    from decantkv.lab.show.terminal import tell
    from decantkv.settings import Settings

    text = read_prompt(prompt_file, question)
    settings = [
        Settings.parse(
            chosen,
            budget=parse_budget(budget),
            allocation=allocation,  # type: ignore[arg-type]  # checked by Settings.parse
            sinks=sinks,
            protect=[parse_span(span) for span in protect or ()],
        )
        for chosen in method or ["dropkv"]
    ]
    if not out.parent.is_dir():
        raise ValueError(f"out: expected a file in an existing folder, got {out}")
    made: list[Any] = []

    def check(config: Any, tokenizer: Any) -> None:
        ids, pieces = prompt_pieces(tokenizer, text, raw=raw)
        for chosen in settings:
            chosen.n_keep([ids.shape[1]])
        check_context(config, ids.shape[1] + max_new_tokens - 1, "prompt-file", beyond=beyond_context)
        made.extend((ids, pieces))

    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {escape(model)}") as status:
        loaded, tokenizer = load(model, check=check)
        ids, pieces = made
        view = collect(
            loaded,
            tokenizer,
            ids.to(loaded.device),
            pieces,
            settings,
            model_name=name or name_of(model),
            max_new_tokens=max_new_tokens,
            progress=status.update,
        )
    out.write_text(render(view), encoding="utf-8", errors="replace")
    tell(view, Console(highlight=False))
    console.print(f"wrote {escape(str(out))} ({out.stat().st_size / 1e6:.1f} MB)")


def prompt_pieces(tokenizer: Any, text: str, *, raw: bool) -> tuple[Any, list[str]]:
    """([1, N] int64 token ids, the prompt's text by token: joined they are the prompt; "" for added specials).

    Raises:
        ValueError: a tokenizer that cannot say where its tokens stand in the text.
    """
    from decantkv.hf.loading import chat_prompt

    prompt, templated = (text, False) if raw else chat_prompt(tokenizer, text)
    if not tokenizer.is_fast:
        raise ValueError(f"model: expected a fast tokenizer, which knows offsets, got {type(tokenizer).__name__}")
    encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=not templated, return_offsets_mapping=True)
    spans = encoded["offset_mapping"][0].tolist()
    pieces, end = [], 0
    for _, stop in spans:  # what no token covers, a space say, goes to the token after it
        pieces.append(prompt[end:stop] if stop > end else "")
        end = max(end, stop)
    if pieces:
        pieces[-1] += prompt[end:]
    return encoded["input_ids"], pieces
