"""Which queries judge a prompt beside its own: tokens that are run over it once it was read, and then forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decantkv.base.options import expect_choice, expect_int

SOURCES = ("replay", "anchors", "window")


@dataclass(frozen=True)
class Rehearsal:
    """Tokens to run over a prompt, so that their queries, and not the prompt's last ones, score what is kept.

    Several sources may be named at once: their queries' costs are added.

    Attributes:
        replay: read the prompt again, `chunk` tokens at a time (KVzip, arXiv 2505.23416).
        anchors: share of the prompt's tokens to run in one piece, those whose keys differ most from the mean key
            (KV²); 0 for none.
        questions: token ids of texts to run, each alone: likely questions, a note on the task, earlier questions.
        window: the prompt's own last queries count as well.
        chunk: tokens of a replay in one forward.
        quote: how many tokens before a replay's chunk are repeated in front of it, to say which part comes.
        lead: token ids in front of each chunk of a replay, e.g. a request to repeat the text.
    """

    replay: bool = False
    anchors: float = 0.0
    questions: tuple[tuple[int, ...], ...] = ()
    window: bool = False
    chunk: int = 2048
    quote: int = 8
    lead: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        expect_int("rehearsal chunk", self.chunk, at_least=1)
        expect_int("rehearsal quote", self.quote, at_least=0)
        if isinstance(self.anchors, bool) or not isinstance(self.anchors, int | float) or not 0 <= self.anchors <= 1:
            raise ValueError(f"rehearsal anchors: expected a share of the prompt in (0, 1], got {self.anchors!r}")
        questions = tuple(_token_ids("rehearsal questions", ids) for ids in self.questions)
        if any(not ids for ids in questions):
            raise ValueError("rehearsal questions: expected texts of at least one token, got an empty one")
        object.__setattr__(self, "questions", questions)
        object.__setattr__(self, "lead", _token_ids("rehearsal lead", self.lead))
        if not (self.replay or self.anchors or self.questions):
            raise ValueError(f"rehearsal: expected a replay, anchors or questions, got {self!r}")

    @classmethod
    def parse(cls, given: str | Rehearsal | None) -> Rehearsal | None:
        """The rehearsal that a text names: "replay", "anchors" (a tenth), "anchors:0.05", or several joined by "+".

        Raises:
            TypeError, ValueError: neither such a text nor a `Rehearsal`.
        """
        if given is None or isinstance(given, Rehearsal):
            return given
        if not isinstance(given, str):
            raise TypeError(f"rehearsal: expected a text such as 'replay' or a Rehearsal, got {given!r}")
        found: dict[str, float | bool] = {}
        for part in given.split("+"):
            name, colon, share = part.strip().partition(":")
            expect_choice("rehearsal", name, SOURCES)
            if colon and name != "anchors":
                raise ValueError(f"rehearsal: expected a share with 'anchors' alone, got {part!r}")
            if name in found:
                raise ValueError(f"rehearsal: expected each source once, got {given!r}")
            found[name] = _share(share, given) if colon else (0.1 if name == "anchors" else True)
        if set(found) == {"window"}:
            raise ValueError("rehearsal: expected a source beside 'window', which is what counts without a rehearsal")
        return cls(**found)  # type: ignore[arg-type]  # "anchors" is a number, the others are truth values

    def __str__(self) -> str:
        names = [
            "replay" if self.replay else "",
            f"anchors:{self.anchors:g}" if self.anchors else "",
            f"{len(self.questions)} questions" if self.questions else "",
            "window" if self.window else "",
        ]
        return "+".join(name for name in names if name)

    def longest(self, length: int) -> int:
        """The most tokens that one passage over a prompt of `length` tokens may have."""
        replay = len(self.lead) + self.quote + min(self.chunk, length) if self.replay else 0
        anchors = max(1, round(self.anchors * length)) if self.anchors else 0
        return max(replay, anchors, *map(len, self.questions), 0)

    def passages(self, prompt: Tensor, keys: Sequence[Tensor], hidden: Sequence[int] | None = None) -> Iterator[Tensor]:
        """Yield which tokens each forward runs.

        Args:
            prompt: [B, N] token ids, pads on the left.
            keys: [B, H, N, D] of each layer that evicts.
            hidden: pads of each row; None for none.

        Yields:
            [B, m] int64: places in the prompt, or −1 − id for tokens that are not the prompt's.
        """
        batch, length = prompt.shape
        if self.replay:
            lead = _outside(self.lead, batch, prompt.device)
            for start in range(0, length, self.chunk):
                first = max(0, start - self.quote)
                place = torch.arange(first, min(start + self.chunk, length), device=prompt.device)
                yield torch.cat([lead, place.expand(batch, -1)], 1)
        if self.anchors:
            yield anchor_places(keys, self.anchors, hidden)
        for ids in self.questions:
            yield _outside(ids, batch, prompt.device)


def anchor_places(keys: Sequence[Tensor], share: float, hidden: Sequence[int] | None = None) -> Tensor:
    """[B, n] places, ascending, of the share of a prompt's tokens whose keys differ most from their head's mean key.

    1 − cos(k, mean k), averaged over heads and layers (KeyDiff's measure).

    Args:
        keys: [B, H, N, D] of each layer.
        hidden: pads of each row, on the left, which are no anchors.
    """
    batch, _, length, _ = keys[0].shape
    device = keys[0].device
    real = torch.ones(batch, length, dtype=torch.bool, device=device)
    for row, pads in enumerate(hidden or ()):
        real[row, :pads] = False
    weight = real[:, None, :, None].float()
    similar: Tensor = torch.zeros(batch, length, device=device)
    for layer in keys:
        mean = (layer.float() * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True)
        similar += torch.cosine_similarity(layer.float(), mean, dim=-1).mean(1).to(device)
    number = max(1, round(share * length))
    least: Tensor = similar.masked_fill(~real, torch.inf).argsort(dim=-1, stable=True)[:, :number]
    return least.sort(-1).values


def _outside(ids: Sequence[int], batch: int, device: torch.device) -> Tensor:
    return (-1 - torch.tensor(ids, dtype=torch.int64, device=device)).expand(batch, -1)


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if isinstance(ids, Tensor):
        ids = ids.flatten().tolist()
    if isinstance(ids, str) or not isinstance(ids, Sequence):
        raise TypeError(f"{name}: expected token ids, got {ids!r}")
    return tuple(expect_int(name, i, at_least=0) for i in ids)


def _share(text: str, given: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"rehearsal: expected a share of the prompt in (0, 1] behind 'anchors:', got {given!r}")
    return share
