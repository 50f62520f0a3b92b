"""Score a finished prompt and choose what its blocks keep, by decantkv's own scores and selection."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decantkv.engines.blocks import BlockSettings
from decantkv.engines.vllm.plan import Plan
from decantkv.engines.vllm.steps import Queries
from decantkv.methods import DropKV
from decantkv.scoring.window import AttentionWindow, make_window
from decantkv.transfer import to_device


@dataclass(frozen=True)
class Heads:
    """How a layer attends, beside its queries, keys and values.

    Attributes:
        scale: factor of q·k.
        softcap: of the logits, or None.
        sink_logits: [HQ] or None.
    """

    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None

    @classmethod
    def of(cls, impl: object) -> Heads:
        """Read from a backend's implementation, which writes no softcap as 0 and no sinks as None."""
        softcap = getattr(impl, "logits_soft_cap", None) or None
        return cls(float(impl.scale), softcap, getattr(impl, "sinks", None))  # type: ignore[attr-defined]

    def window(self, queries: Tensor, keys: Tensor, values: Tensor) -> AttentionWindow:
        """One prompt as the methods see it.

        Args:
            queries: [w, HQ, D]. keys: [H, N, D]. values: [H, N, Dv].
        """
        q = queries.transpose(0, 1)[None]
        sinks = None if self.sink_logits is None else self.sink_logits.float()
        return make_window(q, keys[None], values[None], scale=self.scale, softcap=self.softcap, sink_logits=sinks)


@torch.no_grad()
def choose(win: AttentionWindow, settings: BlockSettings, made: Plan) -> Tensor:
    """[H, m·block_size] int64: the tokens of each KV head that go into the whole blocks, ascending."""
    kept = settings.choose(settings.score(win), win=win)
    return kept.indices[0, :, : made.chosen]  # the tail comes last and stays where it is


@torch.no_grad()
def evict_paged(
    finished: list[tuple[Queries, Tensor]],
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    heads: Heads,
    settings: BlockSettings,
) -> None:
    """Keep each prompt's chosen tokens, reading and writing through the block table.

    Only DropKV's published score is a paged kernel; for other methods a prompt's keys and values are gathered first,
    one prompt at a time.

    Args:
        finished: prompts, with their windows [w, HQ, D].
        k_cache, v_cache: [blocks, block_size, H, D], any strides.
        block_table: [rows, blocks] int32.
    """
    paged: Any = importlib.import_module("decantkv.kernels.paged")
    tables = block_table[to_device([run.row for run, _ in finished], block_table.device)]
    scores = _scores_paged(finished, k_cache, v_cache, tables, heads, settings)
    for i, (run, queries) in enumerate(finished):
        made, table = run.plan, tables[i : i + 1]
        if scores is None:
            blocks = table[0, : -(-made.prompt_len // made.block_size)].long()
            keys, values = (
                cache[blocks].flatten(0, 1)[: made.prompt_len].transpose(0, 1) for cache in (k_cache, v_cache)
            )
            index = choose(heads.window(queries, keys, values), settings, made)
        else:
            kept = settings.choose(scores[i : i + 1, :, : made.prompt_len].contiguous())
            index = kept.indices[0, :, : made.chosen]
        first = to_device([made.first_block], table.device)
        paged.compact_paged(k_cache, v_cache, table, index[None], first)


def _scores_paged(
    finished: Any, k_cache: Tensor, v_cache: Tensor, tables: Tensor, heads: Heads, settings: BlockSettings
) -> Tensor | None:
    """[R, H, longest prompt] float32, or None where no kernel scores by the method."""
    paged: Any = importlib.import_module("decantkv.kernels.paged")
    method = settings.method
    if (
        not isinstance(method, DropKV)
        or method.weigh != "value"
        or heads.softcap is not None
        or heads.sink_logits is not None
    ):
        return None
    queries = torch.stack([window for _, window in finished]).transpose(1, 2)
    lengths = to_device([run.plan.prompt_len for run, _ in finished], k_cache.device).int()
    scores: Tensor = paged.score_paged(
        queries, k_cache, v_cache, tables, lengths, scale=heads.scale, reduce=method.reduce
    )
    return scores
