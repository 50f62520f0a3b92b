"""Greedy decoding of a batch of rows, one captured graph a step on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from decantkv.decode.fused_ops import in_place
from decantkv.decode.graphs import capture_stream, capturing

if TYPE_CHECKING:
    from decantkv.lab.eval.engine.rows import RowBatch

FEW = 3  # steps that are not worth a capture
CHECK_EVERY = 8  # steps between looks at whether all rows are done, where looking makes the host wait


class Decoder:
    """Greedy steps whose tensors stay in place, so that one step can be captured and replayed."""

    def __init__(self, batch: RowBatch, first: Tensor, limits: Tensor, stops: Tensor) -> None:
        self.batch, self.limits, self.stops = batch, limits, stops
        self.most = int(limits.max())
        self.tokens = first[:, None].clone()
        self.positions = batch.logical[:, None].clone()
        self.slot = torch.full((1,), batch.begin + batch.used, device=batch.device)
        self.count = torch.ones(1, dtype=torch.long, device=batch.device)
        self.out = torch.zeros(len(first), max(self.most, 1), dtype=torch.long, device=batch.device)
        self.out[:, 0] = first
        self.done = (first[:, None] == stops).any(-1) | (limits <= 1)
        self.whole = self.out.clone()  # of all rows, also those that were dropped when done
        self.at = torch.arange(len(first), device=batch.device)  # where the rows still going stand in it

    def run(self) -> Tensor:
        """[R, most] token ids; what follows a row's end is noise."""
        steps = self.most - 1
        if steps < 1 or bool(self.done.all()):
            return self.whole
        if self.batch.lanes:
            self.batch.close_gaps(steps + 1)  # a capture counts its token, though it writes none
        self.batch.place.slots = self.slot
        self.batch.masks = [shown[:, :, None] for shown in self.batch.shown]
        step = self._captured() if self.batch.graphs and steps > FEW else self._step
        steps -= int(self.count) - 1  # a capture has taken some
        waits = self.batch.device.type == "cuda"
        for i in range(steps):
            step()
            if not waits or i % CHECK_EVERY == CHECK_EVERY - 1:
                going = int((~self.done).sum())
                if going == 0:
                    break
                if not (self.batch.graphs or self.batch.lanes) and 2 * going <= len(self.tokens):
                    self._drop_done()
        self.whole[self.at] = self.out
        return self.whole

    def _drop_done(self) -> None:
        """Go on with the rows that are not done."""
        self.whole[self.at] = self.out
        left = (~self.done).nonzero().flatten()
        self.at = self.at[left]
        self.batch.take(left)
        self.batch.masks = [shown[:, :, None] for shown in self.batch.shown]
        for name in ("tokens", "positions", "out", "limits", "stops", "done"):
            setattr(self, name, getattr(self, name)[left])

    def _step(self) -> None:
        for shown in self.batch.shown:
            shown.index_fill_(2, self.slot, True)
        self.batch.forget(self.done)
        logits = self.batch.forward(self.tokens, self.positions, 1)
        token = logits[:, -1].argmax(-1, keepdim=True)
        self.out.index_copy_(1, self.count, token)
        self.tokens.copy_(token)
        self.positions.add_(1)
        self.slot.add_(1)
        self.count.add_(1)
        self.done.logical_or_((token == self.stops).any(-1)).logical_or_(self.count >= self.limits)

    def _captured(self) -> Any:
        """The step as a CUDA graph; a real step warms it up on the stream that captures."""
        device = self.batch.device
        side, current = capture_stream(device), torch.cuda.current_stream(device)
        side.wait_stream(current)
        with in_place(self.batch.standins):
            with torch.cuda.stream(side):
                self._step()
            current.wait_stream(side)
            with capturing(device) as graph:
                self._step()
        return graph.replay
