"""KV heads measured side by side: one process reads the prompt, others are each handed a head at a time.

A head's window travels as bytes through the pool's pipe, not in shared memory, which containers keep small.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from decantkv.lab.processes import Workers
from decantkv.lab.theory.measure import Head, Plan, Record, measure
from decantkv.lab.theory.rows import rows_of
from decantkv.methods import Method
from decantkv.scoring.window import AttentionWindow

# A worker measures on one thread of the CPU: thousands of small products, which more threads or a GPU only wait for
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Place:
    """Which KV head of which layer, and how many the layer has."""

    layer: int
    kv_head: int
    kv_heads: int


@dataclass(frozen=True)
class Task:
    """One KV head to measure.

    Attributes:
        place: where it is.
        win: that head's window alone, B = H = 1, on the CPU.
        scores: [N] float32, the method's scores of the head.
    """

    place: Place
    win: AttentionWindow
    scores: Tensor

    def pack(self) -> bytes:
        """The task without its place as bytes; views are cut out of what they are views of."""
        held: dict[str, Any] = {f.name: getattr(self.win, f.name) for f in fields(self.win)} | {"scores": self.scores}
        buffer = io.BytesIO()
        torch.save({name: x.clone() if isinstance(x, Tensor) else x for name, x in held.items()}, buffer)
        return buffer.getvalue()

    @classmethod
    def unpack(cls, place: Place, data: bytes) -> Task:
        """The task that `pack` packed."""
        held = torch.load(io.BytesIO(data), weights_only=True)
        scores = held.pop("scores")
        return cls(place, AttentionWindow(**held), scores)


def tasks_of(win: AttentionWindow, method: Method) -> Iterator[Task]:
    """A layer's KV heads, scored where the window is, then taken to the CPU one by one."""
    scores = method.score(win).cpu()
    for kv_head in range(win.num_kv_heads):
        group = slice(kv_head * win.group_size, (kv_head + 1) * win.group_size)
        alone = AttentionWindow(
            win.q[:, group].cpu(),
            win.k[:, kv_head : kv_head + 1].cpu(),
            win.v[:, kv_head : kv_head + 1].cpu(),
            win.scale,
            lengths=None if win.lengths is None else win.lengths.cpu(),
            softcap=win.softcap,
            sink_logits=None if win.sink_logits is None else win.sink_logits[group].cpu(),
            mask=None if win.mask is None else win.mask.cpu(),
            layer_idx=win.layer_idx,
        )
        yield Task(Place(win.layer_idx, kv_head, win.num_kv_heads), alone, scores[0, kv_head])


def records_of(task: Task, method: Method, plan: Plan) -> list[Record]:
    """Every record of a task's head, measured on one thread."""
    win, place = task.win, task.place
    pads = 0 if win.lengths is None else win.kv_len - int(win.lengths[0])
    with _one_thread():
        head = Head(rows_of(win, 0, 0), task.scores, method, win.window, pads, place.layer, place.kv_head)
        return list(measure(head, plan))


def hand_over(pool: Workers, task: Task, method: Method, plan: Plan) -> None:
    """Have a task's head measured by one of the pool's processes; the pool collects its place and records."""
    pool.take(task.place, _work, task.place, task.pack(), method, plan)


def _work(place: Place, data: bytes, method: Method, plan: Plan) -> list[Record]:
    return records_of(Task.unpack(place, data), method, plan)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
