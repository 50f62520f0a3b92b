"""Plant a four-digit fact in the middle of a long document, and ask for it with less and less of the cache.

Then condense a shorter document without a question, and ask two questions of the file. Run by `make demo`, which
fetches the model. Exits with an error unless the full cache and DropKV are right, and both later answers.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import DynamicCache
from transformers.utils.logging import disable_progress_bar

from decantkv import Document, EvictingCache, condense
from decantkv.cache.evicting_cache import cache_argument, cache_bytes
from decantkv.cache.report import format_bytes
from decantkv.hf.loading import chat_prompt, load

CODE = "7392"
FACT = f"The access code for the archive room is {CODE}."
QUESTION = "What is the access code for the archive room? Answer with the four digits."
PROMPT_TOKENS = 4_000  # the longest of 2,000 to 4,000 at which the full cache finds the fact wherever it is planted
NEW_TOKENS = 20
BUDGET = 0.1
LARGER = (0.2, 0.3, 0.5)  # tried only when BUDGET loses the fact
LATER = (  # planted in the second document; the questions come when it is condensed
    ("The access code for the archive room is 7392.", "What is the access code for the archive room?", "7392"),
    ("The phone number of the reading room is 5814.", "What is the phone number of the reading room?", "5814"),
)
LATER_TOKENS = 1_500
LATER_BUDGET = 0.3  # at 20 % this small model confuses digits
BLOCKS = " ▁▂▃▄▅▆▇█"


@dataclass
class Answer:
    """One way of asking: what the model said, from how large a cache, in what time."""

    name: str
    text: str
    bytes: int
    prefill: float
    decode: float
    cache: Any

    @property
    def right(self) -> bool:
        """Whether the planted digits are in the answer."""
        return CODE in self.text


def first_paragraphs(tokenizer: Any, document: str, tokens: int) -> list[str]:
    """The document's first paragraphs, of at most so many tokens."""
    taken, used = [], 0
    for paragraph in document.split("\n\n"):
        used += len(tokenizer(paragraph + "\n\n")["input_ids"])
        if used > tokens:
            break
        taken.append(paragraph)
    return taken


def build_prompt(tokenizer: Any, document: str) -> str:
    """The longest document that fits, the fact after half of its paragraphs, the question at the end."""
    room = PROMPT_TOKENS - len(tokenizer(FACT + QUESTION)["input_ids"]) - 40
    taken = first_paragraphs(tokenizer, document, room)
    taken.insert(len(taken) // 2, FACT)
    return chat_prompt(tokenizer, "\n\n".join([*taken, QUESTION]))[0]


@torch.no_grad()
def ask(model: Any, tokenizer: Any, inputs: Any, name: str, cache: Any, progress: Progress) -> Answer:
    """Generate with this cache, the bar moving with every layer of the prompt and every new token."""
    layers = model.config.num_hidden_layers
    task = progress.add_task(name, total=layers + NEW_TOKENS)
    moments = [time.perf_counter()]

    def step(module: Any, args: Any, output: Any) -> None:
        if progress.tasks[task].completed < layers or module is model:
            progress.advance(task)
        if module is model:
            moments.append(time.perf_counter())

    hooks = [layer.register_forward_hook(step) for layer in model.model.layers] + [model.register_forward_hook(step)]
    try:
        options = {cache_argument(model): cache}
        output = model.generate(**inputs, **options, max_new_tokens=NEW_TOKENS, do_sample=False)
    finally:
        for hook in hooks:
            hook.remove()
    progress.update(task, completed=layers + NEW_TOKENS)
    text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    return Answer(name, text, cache_bytes(cache), moments[1] - moments[0], moments[-1] - moments[1], cache)


def kept_by_position(cache: EvictingCache, length: int) -> torch.Tensor:
    """[N] the share of all layers and heads that keep each token."""
    return torch.stack([layer.kept.mask(length)[0].float() for layer in cache.layers]).mean((0, 1))


def show_dropped(console: Console, tokenizer: Any, inputs: Any, answers: list[Answer]) -> None:
    """Where the kept tokens lie, and what became of the planted sentence."""
    ids = inputs["input_ids"][0]
    pieces = [tokenizer.decode(i) for i in ids]
    start = "".join(pieces).index(FACT)
    ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0)
    fact = (ends > start) & (ends - torch.tensor([len(p) for p in pieces]) < start + len(FACT))
    console.print(f"\nWhat stayed, from the first of {len(ids):,} tokens to the last (taller = more heads keep it):")
    for answer in answers:
        kept = kept_by_position(answer.cache, len(ids))
        bars = torch.stack([chunk.mean() for chunk in kept.tensor_split(64)])
        line = "".join(BLOCKS[min(8, round(float(b) * 16))] for b in bars)
        console.print(
            f"[cyan]{answer.name:>12}[/] {line}\n{'':12} kept {float(kept.mean()):.0%} of all tokens and "
            f"{float(kept[fact].mean()):.0%} of the planted sentence's, mean over layers and heads"
        )


def ask_later(console: Console, model: Any, tokenizer: Any, text: str) -> bool:
    """Condense a document without a question, ask its file, and return whether both answers are right."""
    paragraphs = first_paragraphs(tokenizer, text, LATER_TOKENS)
    for i, (fact, _, _) in enumerate(LATER, 1):
        paragraphs.insert(i * len(paragraphs) // 3, fact)
    begin = time.perf_counter()
    with console.status("condensing: the document is read, replayed, and cut to what the replay needed"):
        book = condense(
            model, tokenizer, "\n\n".join(paragraphs), budget=LATER_BUDGET, method="dropkv", rehearsal="replay"
        )
    seconds = time.perf_counter() - begin
    window = EvictingCache(model, "dropkv", budget=LATER_BUDGET)
    with torch.no_grad():
        model.get_decoder()(book.ids, use_cache=True, **{cache_argument(model): window})
    by_window = dataclasses.replace(book, cache=window)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "book.kv"
        book.save(file)
        size, loaded = file.stat().st_size, Document.load(file, model, tokenizer)
    console.print(
        f"\n[bold]Evict once, ask anything.[/] {book.ids.shape[1]:,} tokens were condensed to {LATER_BUDGET:.0%} in "
        f"{seconds:.0f} s, without a question, and saved: {format_bytes(size)}. Both questions came afterwards:"
    )
    table = Table("question", "from the file", "right", "by the prompt's last queries")
    right = True
    for _, question, digits in LATER:
        asked = f"{question} Answer with the four digits."
        answer, other = (one.ask(asked, max_new_tokens=NEW_TOKENS) for one in (loaded, by_window))
        right = right and digits in answer
        table.add_row(question, answer, "[green]yes[/]" if digits in answer else "[red]no[/]", other)
    console.print(table)
    return right


def main(model_path: str) -> int:
    """Ask five times and twice more; 0 when the full cache, DropKV and the later answers are right."""
    disable_progress_bar()  # ours shows the work
    console = Console(highlight=False)
    with console.status("loading the model (the first time it is converted from GGUF, about half a minute)"):
        model, tokenizer = load(model_path)
    document = (Path(__file__).parent / "constitution.txt").read_text(encoding="utf-8")
    prompt = build_prompt(tokenizer, document)
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
    length = inputs["input_ids"].shape[1]
    console.print(f"The Constitution of the United States, {length:,} tokens, with one sentence planted in the middle:")
    console.print(f"  [italic]{FACT}[/]\n  [bold]{QUESTION}[/]\n")
    console.print("The model reads it five times: one to two minutes on two idle cores.\n")
    columns = (TextColumn("{task.description:>12}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        full = ask(model, tokenizer, inputs, "full cache", DynamicCache(config=model.config), progress)
        evicted = [
            ask(
                model,
                tokenizer,
                inputs,
                f"{method} {BUDGET:.0%}",
                EvictingCache(model, method, budget=BUDGET),
                progress,
            )
            for method in ("dropkv", "snapkv", "recent", "random")
        ]
        dropkv, random = evicted[0], evicted[-1]
        larger = []
        for budget in LARGER if not dropkv.right else ():
            cache = EvictingCache(model, "dropkv", budget=budget)
            larger.append(ask(model, tokenizer, inputs, f"dropkv {budget:.0%}", cache, progress))
            if larger[-1].right:
                break
    table = Table("cache", "answer", "right", "bytes", "prefill", "decode", caption_justify="left")
    table.caption = "bytes after the answer: what was kept, the answer, and an evicted cache's room for its next tokens"
    for answer in (full, *evicted, *larger):
        verdict = "[green]yes[/]" if answer.right else "[red]no[/]"
        times = (f"{answer.prefill:.1f} s", f"{answer.decode:.1f} s")
        table.add_row(answer.name, answer.text, verdict, format_bytes(answer.bytes), *times)
    console.print(table)
    show_dropped(console, tokenizer, inputs, evicted)
    console.print("\n" + str(dropkv.cache.report()))
    if random.right:
        console.print("[yellow]random was right as well: this prompt does not tell the methods apart[/]")
    if not dropkv.right:
        held = next((a.name for a in larger if a.right), None)
        console.print(f"[red]10 % lost the fact[/]; {held or 'no budget tried'} holds it")
    later = ask_later(console, model, tokenizer, document)
    console.print(
        f"\nNext: decantkv show --model {model_path} --prompt-file YOUR.txt --question '…' draws what is kept;\n"
        f"decantkv condense YOUR.txt --model {model_path} -o book.kv reads it once; decantkv ask book.kv '…' asks.\n"
        "docs/should-i-evict.md says what a budget costs, and when not to evict.",
        markup=False,
    )
    return 0 if full.right and dropkv.right and later else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
