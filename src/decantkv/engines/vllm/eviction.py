"""Score a finished prompt and choose what its blocks keep, by decantkv's own scores and selection."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from decantkv.engines.blocks import BlockSettings
from decantkv.engines.vllm.plan import Plan
from decantkv.scoring.window import AttentionWindow, make_window


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
        return make_window(
            q, keys[None], values[None], scale=self.scale, softcap=self.softcap, sink_logits=sinks
        )


@torch.no_grad()
def choose(win: AttentionWindow, settings: BlockSettings, made: Plan) -> Tensor:
    """[H, m·block_size] int64: the tokens of each KV head that go into the whole blocks, ascending."""
    kept = settings.choose(settings.score(win), win=win)
    return kept.indices[0, :, : made.chosen]  # the tail comes last and stays where it is
