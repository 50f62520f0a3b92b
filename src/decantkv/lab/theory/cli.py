"""`decantkv verify`: the theory's assumptions, bounds and ratios on a model and a prompt."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from decantkv.base.terminal import write
from decantkv.cli.console import Console


def verify(
    out: Annotated[Path, typer.Option(help="Folder of rows*.jsonl, tables.txt and plots.png; a stopped run resumes.")],
    model: Annotated[str, typer.Option(help="A model id, a model folder, or a .gguf file.")] = "",
    prompt_file: Annotated[Path | None, typer.Option(help="UTF-8 text to read.")] = None,
    question: Annotated[str, typer.Option(help="Asked after the text, inside the same prompt.")] = "",
    tokens: Annotated[int, typer.Option(min=0, help="Cut the text so that the prompt has this many; 0: all.")] = 0,
    method: Annotated[str, typer.Option(help="dropkv, or dropkv:preset.")] = "dropkv",
    budget: Annotated[str, typer.Option(help="What is kept: a share like 5% or 0.05, or a number of tokens.")] = "0.05",
    pools: Annotated[
        str, typer.Option(help="Sizes of the lowest-attention pools whose cone is solved.")
    ] = "16,256,4096",
    search: Annotated[int, typer.Option(min=3, max=22, help="Size of the pools whose every subset is tried.")] = 20,
    ks: Annotated[str, typer.Option("--k", help="How many keys go from those.")] = "2,3,4,5,6,7,8",
    rows: Annotated[int, typer.Option(min=1, help="Rows of each query head that are searched.")] = 2,
    layers: Annotated[str, typer.Option(help="FIRST:STOP of the layers to measure, for runs side by side.")] = "",
    workers: Annotated[int, typer.Option(min=1, help="Processes that measure KV heads; each wants a core.")] = 1,
    seed: Annotated[int, typer.Option(help="Chooses the searched rows.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the model's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16; default: the model's on a GPU.")] = "",
    name: Annotated[str, typer.Option(help="What to call the model in the rows; default: --model.")] = "",
) -> None:
    """Check the theory on a model and a prompt: cone, ε, bounds, realised ratio. Without --model: tables from rows."""
    if importlib.util.find_spec("scipy") is None:
        raise ValueError("verify: expected scipy (pip install 'decantkv[theory]'), got none")
    if model:
        if prompt_file is None:
            raise ValueError("prompt-file: expected a text file beside --model, got none")
        suffix = f"-{layers.replace(':', '-')}" if layers else ""
        _measure(
            model,
            prompt_file,
            out / f"rows{suffix}.jsonl",
            question=question,
            tokens=tokens,
            method=method,
            budget=budget,
            layers=_span(layers),
            workers=workers,
            raw=raw,
            dtype=dtype,
            name=name or model,
            plan={
                "pool_sizes": _numbers("pools", pools),
                "search_size": search,
                "ks": _numbers("k", ks),
                "search_rows": rows,
                "seed": seed,
            },
        )
    _tell(out)


def _measure(model_name: str, prompt_file: Path, path: Path, **options: Any) -> None:
    from decantkv.hf.loading import load
    from decantkv.lab.theory.measure import Plan
    from decantkv.lab.theory.verify import run
    from decantkv.methods import resolve
    from decantkv.selection.budget import Budget

    if not prompt_file.is_file():
        raise ValueError(f"prompt-file: expected a text file, got {prompt_file}")
    chosen = resolve(options["method"])
    number = options["budget"]
    share = Budget.parse(number)
    console = Console(stderr=True, highlight=False)
    with console.status(f"loading {escape(model_name)}") as status:
        model, tokenizer = load(model_name, dtype=options["dtype"])
        text = prompt_file.read_text(encoding="utf-8")
        ids = prompt_ids(tokenizer, text, options["question"], tokens=options["tokens"], raw=options["raw"])
        n_keep = share.n_keep(ids.shape[1], chosen.window)
        run(
            model,
            ids.to(model.device),
            path,
            model_name=options["name"],
            method=chosen,
            budget=share,
            plan=Plan(n_keep=n_keep, **options["plan"]),
            layers=options["layers"],
            workers=options["workers"],
            progress=lambda what: status.update(f"{what} of {model.config.num_hidden_layers}"),
        )


def prompt_ids(tokenizer: Any, text: str, question: str, *, tokens: int, raw: bool) -> Any:
    """[1, N] int64: text and question as one prompt, the text's end cut so that N comes out near `tokens`.

    Raises:
        ValueError: no token, or the question alone needs `tokens`.
    """
    from decantkv.hf.loading import chat_prompt

    def encode(body: str) -> Any:
        whole = body + question
        prompt, templated = (whole, False) if raw else chat_prompt(tokenizer, whole)
        return tokenizer(prompt, return_tensors="pt", add_special_tokens=not templated)["input_ids"]

    if tokens:
        around = encode("").shape[1]
        if around >= tokens:
            raise ValueError(f"tokens: expected more than the {around} that the question needs, got {tokens}")
        text = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"][: tokens - around])
    ids = encode(text)
    if ids.shape[1] == 0:
        raise ValueError("prompt-file: expected text, got nothing that makes a token")
    return ids


def _tell(out: Path) -> None:
    from decantkv.lab.theory.plots import page
    from decantkv.lab.theory.results import files_of, read
    from decantkv.lab.theory.summary import summary

    paths = files_of(out)
    if not paths:
        raise ValueError(f"out: expected rows*.jsonl in {out} or a --model to measure, got neither")
    header, records = read(paths)
    text = summary(header, records)
    (out / "tables.txt").write_text(text, encoding="utf-8")
    write(text)
    try:
        page(header, records, out / "plots.png")
    except ModuleNotFoundError as missing:
        Console(stderr=True).print(f"no plots.png: {missing}", markup=False)


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option}: expected whole numbers like 16,256, got {text!r}") from None
    if min(numbers) < 1:
        raise ValueError(f"{option}: expected numbers of at least 1, got {text!r}")
    return numbers


def _span(text: str) -> range | None:
    if not text:
        return None
    start, _, stop = text.partition(":")
    if not (start.isdigit() and stop.isdigit() and int(start) < int(stop)):
        raise ValueError(f"layers: expected FIRST:STOP like 0:14, got {text!r}")
    return range(int(start), int(stop))
