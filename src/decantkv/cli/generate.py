"""`decantkv generate`: answer from a long prompt with a fraction of its cache."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from decantkv.base.chat import ROLES, Chat
from decantkv.base.options import Allocation
from decantkv.base.terminal import write
from decantkv.cli.console import Console
from decantkv.hf.context import check_context

if TYPE_CHECKING:
    from decantkv.selection.budget import Budget


def generate(
    model: Annotated[str, typer.Option(help="A model id, a model folder, or a .gguf file.")],
    prompt_file: Annotated[Path, typer.Option(help="UTF-8 text to read; - for standard input.")],
    question: Annotated[str, typer.Option(help="Asked after the text, inside the same prompt.")] = "",
    method: Annotated[
        str, typer.Option(help="A method, method:preset or file.py:Class; see `decantkv methods`.")
    ] = "dropkv",
    budget: Annotated[str, typer.Option(help="What is kept: a share like 5% or 0.05, or a number of tokens.")] = "0.05",
    allocation: Annotated[
        str | None,
        typer.Option(
            help=f"How the budget is spread over heads and layers: {', '.join(get_args(Allocation))}; default: the "
            "method's own."
        ),
    ] = None,
    sinks: Annotated[int | None, typer.Option(help="First tokens always kept; default: the method's own.")] = None,
    protect: Annotated[
        list[str] | None, typer.Option(help="What is always kept: START:STOP in tokens, system or tools; repeatable.")
    ] = None,
    system: Annotated[str, typer.Option(help="Text of a system message in front of the prompt.")] = "",
    tools: Annotated[Path | None, typer.Option(help="A JSON list of tools for the chat template.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="A method's own option, NAME=VALUE; repeatable.")] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option(help="Read the prompt this many tokens at a time; the same tokens are kept.")
    ] = None,
    max_kv_tokens: Annotated[
        int | None, typer.Option(help="Most tokens a head stores between chunks; needs --prefill-chunk.")
    ] = None,
    every: Annotated[int | None, typer.Option(help="Evict again after every so many tokens of the answer.")] = None,
    impl: Annotated[str, typer.Option(help="auto, reference, torch or triton.")] = "auto",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 64,
    compare: Annotated[bool, typer.Option("--compare", help="Answer with the full cache as well.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Write the evicted cache of prompt and answer, for EvictingCache.load.")
    ] = None,
    beyond_context: Annotated[
        bool, typer.Option("--beyond-context", help="Allow prompts beyond the model's context.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the model's chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate from a long prompt while keeping a fraction of its KV cache."""
    from decantkv.settings import Settings  # torch loads only for commands that need it

    text = read_prompt(prompt_file, question)
    if save is not None and not save.parent.is_dir():
        raise ValueError(f"save: expected a file in an existing folder, got {save}")
    roles = [name for name in protect or () if name in ROLES]
    spans = [parse_span(span) for span in protect or () if span not in ROLES]
    parts = Parts(system, read_tools(tools), tuple(roles))
    if raw and (parts.system or parts.tools or parts.roles):
        raise ValueError("raw: expected a prompt in the chat template beside system, tools or their protection")
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
    bounds = {"prefill_chunk": prefill_chunk, "max_kv_tokens": max_kv_tokens, "every": every}
    check_bounds(settings, bounds)
    loaded, settings = read(model, text, settings, parts, max_new_tokens=max_new_tokens, raw=raw, beyond=beyond_context)
    check_bounds(settings, bounds)
    stream = not as_json and sys.stdout.isatty()
    answer = run(loaded, settings, bounds, max_new_tokens=max_new_tokens, stream=stream, save=save)
    full = run(loaded, None, {}, max_new_tokens=max_new_tokens, stream=False) if compare else None
    if as_json:
        shown = {"answer": answer.text, "seconds": answer.seconds, "report": json.loads(answer.report.to_json())}
        print(json.dumps(shown | ({} if full is None else {"full_answer": full.text, "full_seconds": full.seconds})))
        return
    if not stream:
        write(answer.text)
    tell(answer, full, save)


@dataclass(frozen=True)
class Loaded:
    """A model and the prompt that it will read."""

    model: Any
    tokenizer: Any
    inputs: Any

    @property
    def length(self) -> int:
        """Number of tokens of the prompt."""
        return int(self.inputs["input_ids"].shape[1])


@dataclass(frozen=True)
class Parts:
    """The parts of a chat beside the user's message, and which of them are always kept."""

    system: str = ""
    tools: tuple[Any, ...] = ()
    roles: tuple[str, ...] = ()

    def chat(self, tokenizer: Any, text: str) -> Chat:
        """Return the chat with the user's text."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return Chat(tokenizer, [*first, {"role": "user", "content": text}], self.tools or None)


@dataclass(frozen=True)
class Answer:
    """A generated answer, its times, and its report; the report is None for a full cache."""

    text: str
    seconds: float
    report: Any


def check_bounds(settings: Any, bounds: dict[str, int | None]) -> None:
    """Raise if `attach` would refuse the bounds; called before a model is loaded."""
    from decantkv.cache.bounds import Bounds

    Bounds(**bounds).check(settings)  # type: ignore[arg-type]  # checked by it


def read(
    model_name: str, text: str, settings: Any, parts: Parts, *, max_new_tokens: int, raw: bool, beyond: bool = False
) -> tuple[Loaded, Any]:
    """Load a model, encode its prompt, and return both and the settings for it.

    The prompt is checked before the weights are read.

    Raises:
        ValueError: no model, no tokens, a span outside the prompt, a part of the chat that the template does not tell
            apart, or a prompt beyond the model's context.
    """
    from decantkv.hf.loading import load

    encoded: Any = None

    def check(config: Any, tokenizer: Any) -> None:
        nonlocal encoded, settings
        chat = parts.chat(tokenizer, text)
        if parts.roles:
            settings = settings.protecting(parts.roles, chat)
        templated = not raw and (parts != Parts() or bool(getattr(tokenizer, "chat_template", None)))
        prompt = chat.text if templated else text
        encoded = tokenizer(prompt, return_tensors="pt", add_special_tokens=not templated)
        length = encoded["input_ids"].shape[1]
        if length == 0:
            raise ValueError("prompt-file: expected text, got nothing that makes a token")
        settings.n_keep([length])
        check_context(config, length + max_new_tokens - 1, "prompt-file", beyond=beyond)

    with Console(stderr=True).status(f"loading {escape(model_name)}"):
        model, tokenizer = load(model_name, check=check)
    return Loaded(model, tokenizer, encoded.to(model.device)), settings


def run(
    loaded: Loaded,
    settings: Any,
    bounds: dict[str, int | None],
    *,
    max_new_tokens: int,
    stream: bool,
    save: Path | None = None,
) -> Answer:
    """Generate an answer; without settings, from a full cache."""
    import torch

    from decantkv.attachment import attach

    start = time.perf_counter()
    what = "full cache: reading" if settings is None else "reading"
    attached = settings and attach(loaded.model, settings=settings, **bounds)  # type: ignore[arg-type]  # whole numbers
    with torch.no_grad(), attached or nullcontext(), reading(loaded, what):
        output = loaded.model.generate(
            **loaded.inputs,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            streamer=streamer(loaded.tokenizer) if stream else None,
        )
    if save is not None:
        cache = output["cache"] if "cache" in output else output["past_key_values"]
        cache.save(save, prompt=loaded.inputs["input_ids"])
    text = loaded.tokenizer.decode(output.sequences[0, loaded.length :], skip_special_tokens=True).strip()
    return Answer(text, time.perf_counter() - start, attached and attached.report())


def streamer(tokenizer: Any) -> Any:
    """Return a streamer that writes the answer to standard output while it is made."""
    from transformers import TextStreamer

    class Writing(TextStreamer):  # type: ignore[misc]  # transformers' classes are untyped
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text, end="\n" if stream_end else "")

    return Writing(tokenizer, skip_prompt=True, skip_special_tokens=True)


@contextmanager
def reading(loaded: Loaded, what: str) -> Iterator[None]:
    """Show on the terminal how much of the prompt was read, until all of it was."""
    layers = stack(loaded.model)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"{what} {loaded.length:,} tokens", total=len(layers) * loaded.length or None)
        handles: list[Any] = []

        def ended() -> None:
            while handles:
                handles.pop().remove()  # steps with hooks are not recorded as graphs
            bar.stop()

        def step(module: Any, args: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            bar.advance(task, hidden.shape[1])
            if bar.tasks[task].finished:
                ended()

        handles += [layer.register_forward_hook(step) for layer in layers]
        try:
            yield
        finally:
            ended()


def stack(model: Any) -> list[Any]:
    """Return the decoder's layers, or an empty list if the model's layout is not the usual one."""
    from torch.nn import ModuleList

    count = model.config.get_text_config(decoder=True).num_hidden_layers
    found = [m for m in model.get_decoder().modules() if isinstance(m, ModuleList) and len(m) == count]
    return list(found[0]) if found else []


def tell(answer: Answer, full: Answer | None, save: Path | None) -> None:
    """Print what goes with the answer: the full cache's answer, the report, the saved file."""
    if full is not None:
        same = "the same answer" if full.text == answer.text else "another answer"
        write(f"\nfull cache, {same}:\n{full.text}")
    console = Console(stderr=True, highlight=False)
    times = f"{answer.seconds:.1f} s in all" + ("" if full is None else f", {full.seconds:.1f} s with the full cache")
    console.print(f"[dim]{escape(str(answer.report))}\n{times}[/]")
    if save is not None:
        size = save.stat().st_size / 1e6
        console.print(f"wrote {size:,.1f} MB to {save}; EvictingCache.load(path, model) reads it", markup=False)


def read_prompt(path: Path, question: str) -> str:
    """Return the prompt's text, followed by the question.

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


def parse_budget(text: str) -> Budget:
    """Return the budget that a text names; see `Budget.parse`."""
    from decantkv.selection.budget import Budget

    return Budget.parse(text)


def read_tools(path: Path | None) -> tuple[Any, ...]:
    """Return the tools of a JSON file; none without a file.

    Raises:
        ValueError: no such file, or no JSON list in it.
    """
    if path is None:
        return ()
    try:
        tools = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"tools: expected a file with a JSON list, got {path}: {error}") from error
    if not isinstance(tools, list):
        raise ValueError(f"tools: expected a JSON list of tools, got a {type(tools).__name__} in {path}")
    return tuple(tools)


def parse_span(text: str) -> tuple[int, int]:
    """Return START:STOP as two whole numbers."""
    start, colon, stop = text.partition(":")
    if not colon or not start.isdigit() or not stop.isdigit():
        raise ValueError(f"protect: expected START:STOP in tokens, got {text!r}")
    return int(start), int(stop)


def parse_option(text: str) -> tuple[str, Any]:
    """Return NAME=VALUE as a pair; a value that reads as a number or a truth value becomes one."""
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
