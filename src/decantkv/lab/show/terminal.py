"""A view in a few lines for the terminal."""

from __future__ import annotations

import numpy as np
from rich.markup import escape

from decantkv.cli.console import Console
from decantkv.lab.show.collect import MethodView, View

_BLOCKS = " ▁▂▃▄▅▆▇█"
_WIDTH = 64
_NAMED = 8


def tell(view: View, console: Console) -> None:
    """Print what each method kept along the prompt, its answer, and the heaviest tokens it missed."""
    console.print(
        f"[bold]{escape(view.model)}[/]: {len(view.pieces):,} tokens, {view.n_keep:,} kept per head "
        f"(budget {view.budget}), {len(view.layers)} layers × {view.num_kv_heads} KV heads"
    )
    console.print(f"full cache answers: {escape(_one_line(view.full_answer))}")
    for method in view.methods:
        console.print(f"\n[bold]{escape(method.name)}[/]")
        console.print(f"kept  |{along(method)}| start to end, taller: more heads", markup=False)
        console.print(f"answers: {escape(_one_line(method.answer))}")
        for span in method.spans:
            lost = "" if span.lost is None else f", in place of tokens with {span.lost:.1%} of all score"
            console.print(
                f"{span.name} {span.start}–{span.stop - 1}: {span.bought:.1f} tokens per head stay only by "
                f"protection{lost}"
            )
        console.print(
            f"{method.missed_share:.1%} of the answer's weight on the prompt falls on dropped tokens; heaviest:"
        )
        for missed in method.missed[:_NAMED]:
            before = _one_line("".join(view.pieces[max(0, missed.token - 6) : missed.token]))
            after = _one_line("".join(view.pieces[missed.token + 1 : missed.token + 5]))
            piece = _one_line(view.pieces[missed.token])
            gap = " " if piece.startswith(" ") else ""
            console.print(
                f"  {missed.token:>7,}  {missed.there:6.1%} in layer {missed.layer} head {missed.head}  "
                f"…{escape(before)}{gap}[bold underline]{escape(piece.strip() or '·')}[/]{escape(after)}…"
            )


def along(method: MethodView) -> str:
    """The share of heads that keep each stretch of the prompt, as a line of blocks on a square-root scale."""
    share = np.stack(method.kept).mean((0, 1))  # [N]
    stretches = np.array_split(share, min(_WIDTH, len(share)))
    return "".join(_BLOCKS[int(np.ceil(np.sqrt(part.mean()) * (len(_BLOCKS) - 1)))] for part in stretches)


def _one_line(text: str) -> str:
    return text.replace("\n", " ")
