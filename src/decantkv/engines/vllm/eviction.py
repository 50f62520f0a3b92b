"""Score a finished prompt and choose what its blocks keep, by decantkv's own scores and selection."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from decantkv.base.transfer import to_device
from decantkv.engines.blocks import BlockSettings
from decantkv.engines.common.paged import gather_paged
from decantkv.engines.common.plan import Plan
from decantkv.engines.common.steps import Queries
from decantkv.methods import DropKV, Method, SnapKV
from decantkv.scoring.window import AttentionWindow, make_window

# what a method's score is called among the kernels
QUANTITIES: dict[type[Method], str] = {DropKV: "perturbation", SnapKV: "attention_mass"}


@dataclass(frozen=True)
class Heads:
    """The terms of a layer's attention besides queries, keys and values.

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
        """Return the attention window of one prompt.

        Args:
            queries: [w, HQ, D]. keys: [H, N, D]. values: [H, N, Dv].
        """
        q = queries.transpose(0, 1)[None]
        sinks = None if self.sink_logits is None else self.sink_logits.float()
        return make_window(q, keys[None], values[None], scale=self.scale, softcap=self.softcap, sink_logits=sinks)


@torch.no_grad()
def choose(win: AttentionWindow, settings: BlockSettings, made: Plan) -> Tensor:
    """Return [H, m·block_size] int64: the tokens of each KV head for the whole blocks, ascending."""
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

    Scores come from a kernel for the methods in `QUANTITIES`, unless `impl` names another implementation; for all
    others a prompt's keys and values are gathered first, one prompt at a time.

    Args:
        finished: prompts, with their windows [w, HQ, D].
        k_cache, v_cache: [blocks, block_size, H, D], the last dimension contiguous.
        block_table: [rows, blocks] int32.
    """
    tables = block_table[to_device([run.row for run, _ in finished], block_table.device)].contiguous()
    plans = [run.plan for run, _ in finished]
    most = max(made.chosen for made in plans)
    index = torch.zeros(len(plans), k_cache.shape[2], most, dtype=torch.int64, device=k_cache.device)
    scores = _scores_paged(finished, k_cache, v_cache, tables, heads, settings)
    for i, (made, (_, queries)) in enumerate(zip(plans, finished, strict=True)):
        if scores is not None:
            kept = settings.choose(scores[i : i + 1, :, : made.prompt_len].contiguous())
            index[i, :, most - made.chosen :] = kept.indices[0, :, : made.chosen]
            continue
        keys, values = (gather_paged(cache, tables[i], made.prompt_len) for cache in (k_cache, v_cache))
        index[i, :, most - made.chosen :] = choose(heads.window(queries, keys, values), settings, made)
    first, counts = ([made.first_block for made in plans], [made.chosen for made in plans])
    device = k_cache.device
    kernels_for(device).compact_paged(
        k_cache, v_cache, tables, index, to_device(first, device), counts=to_device(counts, device)
    )


def _scores_paged(
    finished: list[tuple[Queries, Tensor]],
    k_cache: Tensor,
    v_cache: Tensor,
    tables: Tensor,
    heads: Heads,
    settings: BlockSettings,
) -> Tensor | None:
    """Return [R, H, longest prompt] float32, or None if no kernel scores by the method."""
    method = settings.method
    covered = type(method) in QUANTITIES and not method.needs
    if not covered or settings.impl not in ("auto", "triton"):
        return None
    lengths = [run.plan.prompt_len for run, _ in finished]
    scores: Tensor = kernels_for(k_cache.device).score_paged(
        torch.stack([window for _, window in finished]).transpose(1, 2),
        k_cache,
        v_cache,
        tables,
        to_device(lengths, k_cache.device),
        scale=heads.scale,
        softcap=heads.softcap,
        sink_logits=None if heads.sink_logits is None else heads.sink_logits.float(),
        quantity=QUANTITIES[type(method)],
        reduce=getattr(method, "reduce", "sum"),
        max_len=max(lengths),
    )
    return scores


def kernels_for(device: torch.device) -> ModuleType:
    """Return the kernels on paged storage, or on a CPU the same functions in torch."""
    from decantkv.engines.common import paged

    if device.type != "cuda":
        return paged
    from decantkv.kernels import paged as kernels

    return kernels
