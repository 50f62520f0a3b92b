"""Which queries judge a prompt beside its own: tokens that are run over it once it was read, and then forgotten."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from decantkv.base.options import expect_choice, expect_int

SOURCES = ("replay", "anchors", "window")
ANCHORS = 0.2  # share of a prompt's tokens, where none is given
NOWHERE = -(2**62)  # the place of a pad


@dataclass(frozen=True)
class Rehearsal:
    """Tokens to run over a prompt, so that their queries, and not the prompt's last ones, score what is kept.

    Several sources may be named at once: the mean costs over each source's queries are added, so that a source of few
    queries counts as much as one of many.

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
        """The rehearsal that a text names: "replay", "anchors" (a fifth), "anchors:0.05", or several joined by "+".

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
            found[name] = _share(share, given) if colon else (ANCHORS if name == "anchors" else True)
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

    def passages(
        self, prompt: Tensor, keys: Sequence[Tensor], hidden: Sequence[int] | None = None, *, mean: bool
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the tokens that each forward runs, and how much each of their queries counts.

        Every row of a padded batch gets the passages that it would get alone.

        Args:
            prompt: [B, N] token ids, pads on the left.
            keys: [B, H, N, D] of each layer that evicts.
            hidden: pads of each row; None for none.
            mean: several sources count alike, each by the mean over its queries.

        Yields:
            [B, m] token ids, and [B, m] float32 weights, 0 at pads on the left; None where all count 1.
        """
        for places, totals in self._places(prompt, keys, hidden):
            weights = None
            if mean and self._several():
                weights = (places > NOWHERE) / totals[:, None]
            elif hidden is not None:
                weights = (places > NOWHERE).float()
            yield _tokens_at(places, prompt), weights

    def _several(self) -> bool:
        return sum((self.replay, bool(self.anchors), bool(self.questions), self.window)) > 1

    def _places(
        self, prompt: Tensor, keys: Sequence[Tensor], hidden: Sequence[int] | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield [B, m] int64 places in the prompt, and [B] int64 how many tokens each row's source runs in all.

        A place is −1 − id for a token that is not the prompt's, and NOWHERE for a pad on the left.
        """
        batch, length = prompt.shape
        pads = [0] * batch if hidden is None else list(hidden)
        device = prompt.device
        if self.replay:
            lead = _outside(self.lead, device)
            spans = [self._spans(length - n) for n in pads]
            totals = [sum(len(self.lead) + stop - start for start, stop in row) for row in spans]
            for i in range(max(map(len, spans))):
                places = [
                    torch.cat([lead, torch.arange(row[i][0] + n, row[i][1] + n, device=device)])
                    if i < len(row)
                    else lead[:0]
                    for row, n in zip(spans, pads, strict=True)
                ]
                yield _rows(places), torch.tensor(totals, device=device)
        if self.anchors:
            found = _anchors(keys, self.anchors, pads)
            yield _rows(found), torch.tensor([len(places) for places in found], device=device)
        for ids in self.questions:
            total = sum(map(len, self.questions))
            yield _outside(ids, device).expand(batch, -1), torch.full((batch,), total, device=device)

    def _spans(self, length: int) -> list[tuple[int, int]]:
        """A replay's passages over a row of `length` tokens: each chunk with the tokens before it that are quoted."""
        return [(max(0, start - self.quote), min(start + self.chunk, length)) for start in range(0, length, self.chunk)]


def key_difference(keys: Tensor, real: Tensor, *, normalise: bool = False) -> Tensor:
    """Return 1 − cos(k, mean k) of every key, [B, H, N] from 0 to 2: KeyDiff's measure (arXiv 2504.15364).

    Args:
        keys: [B, H, N, D].
        real: [B or 1, N] bool, False at pads, which the mean leaves out.
        normalise: take the mean of the keys' directions, and not of the keys.
    """
    keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
    summed = (F.normalize(keys, dim=-1) if normalise else keys) * real[:, None, :, None]
    mean = summed.sum(2, keepdim=True)  # but for its length
    return (1 - F.cosine_similarity(keys, mean, dim=-1)).float()


def _anchors(keys: Sequence[Tensor], share: float, hidden: Sequence[int]) -> list[Tensor]:
    """Places, ascending, of the share of each row's tokens whose keys differ most, averaged over heads and layers.

    Args:
        keys: [B, H, N, D] of each layer.
        hidden: pads of each row, on the left, which are no anchors.
    """
    device, length = keys[0].device, keys[0].shape[2]
    real = torch.arange(length, device=device) >= torch.tensor(hidden, device=device)[:, None]
    differs = torch.stack([key_difference(x, real.to(x.device)).mean(1).to(device) for x in keys]).sum(0)
    found = []
    for row, pads in zip(differs, hidden, strict=True):
        most = row[pads:].argsort(dim=-1, descending=True, stable=True)[: max(1, round(share * (length - pads)))]
        found.append(pads + most.sort().values)
    return found


def _tokens_at(places: Tensor, prompt: Tensor) -> Tensor:
    """[B, m] token ids behind a passage's places; 0 at pads."""
    own = prompt.gather(1, places.clamp_min(0))
    return torch.where(places >= 0, own, (-1 - places).where(places > NOWHERE, 0))


def _rows(places: Sequence[Tensor]) -> Tensor:
    """[B, m] rows of unequal length, filled up on the left."""
    longest = max(map(len, places))
    return torch.stack([F.pad(row, (longest - len(row), 0), value=NOWHERE) for row in places])


def _outside(ids: Sequence[int], device: torch.device) -> Tensor:
    return -1 - torch.tensor(ids, dtype=torch.int64, device=device)


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
