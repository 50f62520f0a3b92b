"""Evicted copies of prompts as rows of one cache: fed, scored and decoded together by the library's own steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decantkv.cache.chunked_reading import evicting_layers
from decantkv.cache.evicting_cache import EvictingCache, cache_argument, check_adapters, new_recorder
from decantkv.cache.phases import KEPT_WHOLE
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.decode.fused_ops import standins
from decantkv.decode.graphs import StepGraphs, Trust
from decantkv.lab.eval.engine.reading import EVERYTHING, OWN, Copy, Cut, Reading
from decantkv.selection.selector import FILLER
from decantkv.settings import Settings

FED, FED_TOGETHER = 128, 2**14  # tokens of a row, and of all rows, in one forward
CHECK_EVERY = 8  # steps between looks at whether all rows are done, where looking makes the host wait


@dataclass(frozen=True, eq=False)
class Row:
    """One copy of a prompt and what is to be done with it.

    Attributes:
        reading: the prompt.
        cut: what the copy stands for; positions go on from there.
        rest: the prompt's tokens after the cut, still to be fed.
        settings: what the copy is evicted by; None for all of the cut's tokens.
        bits: numbers of the copy go through this many bits; 0 leaves them alone.
        max_new_tokens: where generation is cut.
        stops: token ids that end the answer.
        answer_first: the first token may not be a stop.
    """

    reading: Reading
    cut: Cut
    rest: tuple[int, ...]
    settings: Settings | None = None
    bits: int = 0
    max_new_tokens: int = 0
    stops: tuple[int, ...] = ()
    answer_first: bool = False

    @cached_property
    def stored(self) -> int:
        """Tokens of the copy, per head on average."""
        return self.cut.length if self.settings is None else self.settings.n_keep([self.cut.length])[0]

    @property
    def asks(self) -> tuple[object, ...]:
        """Rows that agree in it begin with the same token once their prompt is wholly read."""
        return id(self.reading), self.stops if self.answer_first else ()

    def first_token(self) -> int:
        """Greedy token after a prompt that is wholly read."""
        return int(_forbid(self.reading.next_logits[None], [self]).argmax(-1)[0])

    def copy(self) -> Copy:
        """The copy itself."""
        return self.cut.copy(self.settings, self.bits)


class RowBatch:
    """Rows side by side in one cache, each with its own tokens and positions.

    Attributes:
        kept: [R] float32, the mean number of tokens that the heads of a row keep.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        *,
        room: int,
        graphs: bool = False,
        trust: Trust | None = None,
    ) -> None:
        """Evict every row's copy and join them.

        Args:
            room: new tokens that a row may get.
            graphs: replay a CUDA graph for each step.
            trust: what is known of the graphs of this model's steps.
        """
        self.model, self.rows, self.graphs = model, list(rows), graphs
        self._trust = Trust() if trust is None else trust
        self.device = rows[0].reading.next_logits.device
        self._name = cache_argument(model)
        copies = [row.copy() for row in rows]
        self.kept = torch.stack([copy.kept.to(self.device) for copy in copies])
        self._length = max(row.cut.length for row in rows)
        self.cache = self._joined(copies)
        self.cache.expect_length(self._length + room)
        self._steps = self._new_steps()
        self.logical = torch.tensor([row.cut.length for row in rows], device=self.device)  # tokens ever given, per row

    def _joined(self, copies: Sequence[Copy]) -> EvictingCache:
        """The copies' rows in one cache; each layer of the copies is let go of as soon as it is joined."""
        joined = EvictingCache.of(self.model, EVERYTHING, new_recorder(EVERYTHING, OWN), OWN)
        check_adapters(joined)
        for layer in reversed(evicting_layers(joined)):
            layer.hold(_side_by_side([copy.stores.pop() for copy in copies]), KEPT_WHOLE, None)
            layer.logical = self._length
        return joined

    def _new_steps(self) -> StepGraphs:
        refused = None if self.graphs else "graphs are off"
        return StepGraphs(self.cache.layers, self._trust, refused, partial(standins, self.model, one_token=False))

    @torch.no_grad()
    def feed(self, tokens: Sequence[Sequence[int]], *, keep: int = 1) -> Tensor:
        """Feed each row its tokens (at least one); returns logits [R, keep, V] of the last `keep` of each.

        Shorter rows are padded on the left. Many tokens go in several forwards, of which every row takes part in each.
        """
        lengths = [len(row) for row in tokens]
        piece = max(1, min(FED, FED_TOGETHER // len(tokens)))
        pieces = max(0, min(min(lengths) - keep, (max(lengths) - 1) // piece))
        for i in range(pieces):
            cuts = [((n - keep) * i // pieces, (n - keep) * (i + 1) // pieces) for n in lengths]
            self._feed([row[start:stop] for row, (start, stop) in zip(tokens, cuts, strict=True)], 1)
        return self._feed([row[-keep:] for row in tokens] if pieces else tokens, keep)

    def _feed(self, tokens: Sequence[Sequence[int]], keep: int) -> Tensor:
        width = max(len(row) for row in tokens)
        padded = torch.tensor([[0] * (width - len(row)) + list(row) for row in tokens], device=self.device)
        lengths = torch.tensor([len(row) for row in tokens], device=self.device)
        real = torch.arange(width, device=self.device) >= (width - lengths)[:, None]
        positions = (self.logical[:, None] + torch.cumsum(real, 1) - 1).clamp_min(0)
        mask = torch.cat([real.new_ones(len(tokens), self.cache.get_seq_length()), real], 1)
        self.logical = self.logical + lengths
        return self._forward(self.model, padded, positions, mask, keep)

    def _forward(self, forward: Any, tokens: Tensor, positions: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        out = forward(
            input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=True, logits_to_keep=keep,
            **{self._name: self.cache},
        )  # fmt: skip
        logits: Tensor = out.logits
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Logits [R, V] after one more token [R] of every row."""
        logits = self._forward(self._step, tokens[:, None], self.logical[:, None], None, 1)
        self.logical = self.logical + 1
        return logits[:, -1]

    def _step(self, **kwargs: Any) -> Any:
        return self._steps.forward(self.model, kwargs)

    def rewind(self) -> None:
        """Forget all new tokens."""
        self.cache.crop(self._length - self.cache.get_seq_length())
        self.logical = torch.tensor([row.cut.length for row in self.rows], device=self.device)

    def select(self, left: Tensor) -> None:
        """Go on with these rows alone; their numbers change."""
        self.cache.batch_select_indices(left)
        self._steps = self._new_steps()
        self.logical = self.logical[left]

    def forget(self, done: Tensor) -> None:
        """Let rows [R] bool hold nothing any more, inside a recorded step too: a step costs what the others hold."""
        for layer in evicting_layers(self.cache):
            if isinstance(layer.store, RaggedStore):
                layer.store.lens.view(len(done), -1).masked_fill_(done[:, None], 0)

    def forced_logits(self, continuations: Sequence[Sequence[int]]) -> list[Tensor]:
        """Per row [C, V] float32: logits that predict each token of its continuation, given all before it.

        The row's rest is fed first. Where nothing is left to feed, the first token's logits are the prompt's own,
        which no eviction can change.
        """
        keep = max(len(c) for c in continuations)
        fed = [(*row.rest, *c[:-1]) for row, c in zip(self.rows, continuations, strict=True)]
        if not any(fed):
            return [row.reading.next_logits[None] for row in self.rows]
        logits = self.feed([f or (0,) for f in fed], keep=keep)
        self.rewind()
        out = []
        for r, (row, wanted) in enumerate(zip(self.rows, continuations, strict=True)):
            predicted = len(wanted) if row.rest else len(wanted) - 1  # the others are the prompt's own prediction
            own = logits[r, logits.shape[1] - predicted :].float()
            out.append(own if row.rest else torch.cat([row.reading.next_logits[None], own]))
        return out

    @torch.no_grad()
    def generate(self) -> list[list[int]]:
        """Greedy answers of all rows, each ending with its stop token or at its limit."""
        begun = _first_tokens(self.rows)
        first = self.feed([row.rest or b for row, b in zip(self.rows, begun, strict=True)])[:, -1]
        limits = torch.tensor(
            [row.max_new_tokens - len(b) for row, b in zip(self.rows, begun, strict=True)], device=self.device
        )
        tokens = _forbid(first, [None if b else row for row, b in zip(self.rows, begun, strict=True)]).argmax(-1)
        produced = self._decode(tokens, limits)
        return [_until_stop([*b, *new], row) for b, new, row in zip(begun, produced.tolist(), self.rows, strict=True)]

    def _decode(self, tokens: Tensor, limits: Tensor) -> Tensor:
        """[R, most] greedy token ids, of which `tokens` [R] are the first; what follows a row's end is noise."""
        stops, most = _stop_table(self.rows, self.device), max(1, int(limits.max()))
        out = tokens[:, None].repeat(1, most)
        left = torch.arange(len(tokens), device=self.device)  # the rows that go on
        done = (tokens[:, None] == stops).any(-1) | (limits <= 1)
        for count in range(1, most):
            if self.device.type != "cuda" or count % CHECK_EVERY == 1:
                going = int((~done).sum())
                if going == 0:
                    break
                if self.graphs:
                    self.forget(done)
                elif 2 * going <= len(tokens):
                    rows = (~done).nonzero().flatten()
                    self.select(rows)
                    left, tokens, done, stops, limits = (x[rows] for x in (left, tokens, done, stops, limits))
            tokens = self.step(tokens).argmax(-1)
            out[left, count] = tokens
            done = done | (tokens[:, None] == stops).any(-1) | (limits <= count + 1)
        return out


def _first_tokens(rows: Sequence[Row]) -> list[list[int]]:
    """Per row the greedy token after a prompt that is wholly read, or nothing where some of it is left to feed."""
    first: dict[object, int] = {}
    for row in rows:
        if not row.rest and row.asks not in first:
            first[row.asks] = row.first_token()
    return [[] if row.rest else [first[row.asks]] for row in rows]


def _side_by_side(packed: Sequence[RaggedStore]) -> RaggedStore:
    """The rows of packed stores as one, of which the host need not know how much they hold."""
    keys, values = torch.cat([store.keys for store in packed]), torch.cat([store.values for store in packed])
    lens = torch.cat([store.lens for store in packed])
    return RaggedStore(keys, values, lens.cumsum(0) - lens, lens, batch=len(packed))


def _stop_table(rows: Sequence[Row], device: torch.device) -> Tensor:
    """[R, E] stop ids, −1 where a row has fewer."""
    width = max(1, *(len(row.stops) for row in rows))
    return torch.tensor([[*row.stops, *[FILLER] * (width - len(row.stops))] for row in rows], device=device)


def _forbid(logits: Tensor, rows: Sequence[Row | None]) -> Tensor:
    """Logits [R, V] with the stops at −inf for rows that must answer something first."""
    bound = [(r, row.stops) for r, row in enumerate(rows) if row is not None and row.answer_first and row.stops]
    if bound:
        at = [(r, stop) for r, stops in bound for stop in stops]
        logits = logits.clone()
        logits[tuple(torch.tensor(at, device=logits.device).T)] = -torch.inf
    return logits


def _until_stop(tokens: list[int], row: Row) -> list[int]:
    answer = tokens[: row.max_new_tokens]
    for i, token in enumerate(answer):
        if token in row.stops:
            return answer[: i + 1]
    return answer
