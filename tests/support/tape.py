"""A stand-in for CUDA graphs where there is no GPU.

A tape records operations with the memory they used, and replays them on that memory. While it records, nothing happens.
"""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decantkv.cache.stores import ragged
from decantkv.decode import graphs
from tests.support import tiny


class Tape(TorchDispatchMode):
    """Records every operation with its very tensors; `replay` writes its results where they were written before."""

    def __init__(self):
        super().__init__()
        self.calls, self.written = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                into = args[place] if place < len(args) else (kwargs or {})[argument.name]
                self.written.append((into, into.clone()))
        out = func(*args, **(kwargs or {}))
        if "item" in str(func) or "_local_scalar" in str(func):
            raise RuntimeError("operation not permitted when stream is capturing")
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def undo(self):
        """Nothing happened while it was recorded."""
        for into, before in reversed(self.written):
            into.copy_(before)
        self.written = []

    def replay(self):
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)

            def put(old, new):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

            for old, new in zip(*(x if isinstance(x, tuple | list) else [x] for x in (out, again)), strict=True):
                put(old, new)


WAITS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "is_nonzero", "equal")


class NoWaiting(TorchDispatchMode):
    """Every operation for whose result the host would wait is an error, as under CUDA's own debug mode."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).removeprefix("aten.").split(".")[0] in WAITS:
            raise RuntimeError("called a synchronizing CUDA operation")
        return func(*args, **(kwargs or {}))


def capture_on_tapes(monkeypatch):
    """Let tapes stand in for CUDA's capture, and let attention over lanes keep their lengths on the device.

    Returns the list of tapes that were recorded since.
    """
    tapes = []

    def attend(self, q, *, scale, softcap=None, sink_logits=None):
        longest = self.keys.shape[0]
        place = torch.arange(longest)
        slots = (self.starts[:, None] + place).clamp_max(self.keys.shape[0] - 1)
        k, v = (x[slots].view(self.batch, self.heads, longest, -1) for x in (self.keys, self.values))
        seen = (place < self.lens[:, None]).view(self.batch, self.heads, 1, longest)
        k, v, seen = (x.repeat_interleave(q.shape[1] // self.heads, 1) for x in (k, v, seen))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)

    @contextmanager
    def capturing(device):
        recorded = Tape()
        try:
            with recorded:
                yield recorded
            tapes.append(recorded)
        finally:
            recorded.undo()

    @contextmanager
    def rehearsing(device):
        with NoWaiting():
            yield

    monkeypatch.setattr(ragged.RaggedStore, "attend", attend)
    monkeypatch.setattr(graphs, "capturing", capturing)
    monkeypatch.setattr(graphs, "_rehearsing", rehearsing)
    monkeypatch.setattr(graphs, "on_gpu", lambda x: True)
    return tapes


INPUTS = {
    "one": {"input_ids": tiny.prompt(100)},
    "padded": tiny.left_padded([tiny.prompt(100, seed=1), tiny.prompt(45, seed=2)]),
}
