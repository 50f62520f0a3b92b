"""One engine step: which rows read a compacted cache, which still read their prompt, which finish it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from decantkv.engines.blocks import BlockSettings
from decantkv.engines.common.plan import Plan, Plans
from decantkv.engines.vllm.batch import Batch

Ints = npt.NDArray[np.int64]


class Queries(NamedTuple):
    """The queries of a prompt's window that one step computes.

    Attributes:
        row: number of the batch row.
        request_id: the request of that row.
        start: first of the step's tokens that holds them.
        stop: the token after the last one.
        place: position of the first query among the window's w rows.
        plan: layout of the prompt.
        last: whether the prompt ends with them, so that its blocks are compacted after this step's attention.
    """

    row: int
    request_id: str
    start: int
    stop: int
    place: int
    plan: Plan
    last: bool


@dataclass(frozen=True)
class Step:
    """What one step does besides attention.

    Attributes:
        first_blocks: [rows] int32, number of blocks that a row's table skips: those freed after its prompt was read.
        queries: window queries of the prompts that will be evicted, at most one run per prompt.
        alive: requests whose stored queries are still needed.
        settings: how prompts are evicted.
    """

    first_blocks: npt.NDArray[np.int32]
    queries: tuple[Queries, ...]
    alive: Container[str]
    settings: BlockSettings

    @property
    def shifts(self) -> bool:
        """Whether any row reads a compacted cache."""
        return bool(self.first_blocks.any())

    @property
    def finishing(self) -> tuple[Queries, ...]:
        """Return the prompts that end in this step."""
        return tuple(run for run in self.queries if run.last)


def read_step(batch: Batch, plans: Plans, starts: Ints, seq_lens: Ints) -> Step:
    """Sort the rows of a step.

    Args:
        plans: layouts of the requests' prompts.
        starts: [rows + 1] where each row's tokens begin in the step.
        seq_lens: [rows] tokens of each request with this step's.

    Raises:
        RuntimeError: a row reads past the end of a prompt that it has not finished, which the scheduler prevents.
    """
    number = min(len(batch.request_ids), len(seq_lens))
    first_blocks = np.zeros(len(seq_lens), dtype=np.int32)
    prompts, scheduled = batch.prompt_lens[:number], np.diff(starts[: number + 1])
    computed = seq_lens[:number] - scheduled
    decoding = (computed >= prompts) & (scheduled > 0)
    if decoding.any():
        first_blocks[:number] = [plans[length].first_block for length in prompts.tolist()]
        first_blocks[:number] *= decoding
    reading = np.flatnonzero((computed < prompts) & (scheduled > 0)).tolist()
    runs = (_queries(batch, plans, row, starts, int(computed[row]), int(seq_lens[row])) for row in reading)
    return Step(first_blocks, tuple(run for run in runs if run is not None), batch.alive, plans.settings)


def _queries(batch: Batch, plans: Plans, row: int, starts: Ints, computed: int, seen: int) -> Queries | None:
    """Return the window's queries among a row's tokens, or None if there are none or the prompt is not evicted."""
    made, window = plans[int(batch.prompt_lens[row])], plans.settings.rows
    if not made.evicts:
        return None
    if seen > made.prompt_len:
        raise RuntimeError(
            f"request {batch.request_ids[row]}: expected a step that ends with the prompt's {made.prompt_len} tokens, "
            f"got one up to {seen}; the scheduler does not follow decantkv"
        )
    lowest = max(made.prompt_len - window, computed)
    if not made.chosen or lowest >= seen:
        return None
    start, stop = int(starts[row]) + lowest - computed, int(starts[row + 1])
    place, last = lowest - (made.prompt_len - window), seen == made.prompt_len
    return Queries(row, batch.request_ids[row], start, stop, place, made, last)


def end_of_chunk(computed: int, wanted: int, made: Plan, *, window: int, graphs: bool) -> int:
    """Return how many of `wanted` tokens a step may read of a request that has `computed`.

    A chunk never goes past the prompt's end: a preempted request reads its answer again only after its prompt was
    evicted, as the first time. If steps of one token per row are replayed as CUDA graphs, in which the plug-in's code
    does not run, the window's queries come in chunks of two or more.

    Args:
        made: layout of the request's prompt.
        window: number w of window rows.
        graphs: whether steps of one token per row are replayed as CUDA graphs.

    Returns:
        At most `wanted`; 0: not in this step.
    """
    left = made.prompt_len - computed
    if not made.evicts or left <= 0:
        return wanted
    allowed = min(wanted, left)
    if not graphs or not made.chosen:
        return allowed
    if left - allowed == 1:
        allowed -= 1  # the prompt's last token would come alone
    inside = computed + 1 > made.prompt_len - window
    return 0 if allowed == 1 and inside else allowed
