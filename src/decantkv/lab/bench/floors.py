"""Scores on the shapes of today's models beside the floor of memory and arithmetic, and other cuts of them."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from decantkv.kernels.blocks import Blocks, split_keys
from decantkv.kernels.launch import launch_scores
from decantkv.kernels.plan import Plan, device_of
from decantkv.lab.bench import gate, quantities
from decantkv.lab.bench.rows import Row, circumstances
from decantkv.lab.bench.score import LLAMA_8B, Geometry, inputs, timed
from decantkv.lab.bench.timing import gpu_time, kernel_times, scratch_bytes, wall_time
from decantkv.scoring.window import AttentionWindow

READING = 4.4e12  # bytes per second; keys and values are read twice
PRODUCTS = 700e12  # operations per second; queries with keys twice, weights and outputs with values


class Shape(NamedTuple):
    """A layer, a prompt's length, and whether costs are measured behind W_O."""

    geometry: Geometry
    kv_len: int
    projected: bool = False

    @property
    def name(self) -> str:
        """As tables show it."""
        return self.geometry.name + (" by W_O" if self.projected else "")

    @property
    def rows(self) -> int:
        """Rows of a KV head."""
        return self.geometry.num_heads // self.geometry.num_kv_heads * self.geometry.window

    @property
    def floor_us(self) -> float:
        """Microseconds below which no two-pass score of this shape is possible."""
        g = self.geometry
        size = g.batch * g.num_kv_heads * self.kv_len * g.head_dim
        return 1e6 * max(2 * 2 * 2 * size / READING, 4 * 2 * size * self.rows / PRODUCTS)


def _of(name: str, num_heads: int, num_kv_heads: int, window: int = 8, head_dim: int = 128) -> Geometry:
    return Geometry(name, num_heads, num_kv_heads, head_dim, window)


SHAPES = (
    Shape(LLAMA_8B, 131072),
    Shape(LLAMA_8B, 4096),
    Shape(_of("Qwen2.5-7B", 28, 4), 131072),
    Shape(_of("Qwen3-30B-A3B", 32, 4), 131072),
    Shape(_of("Llama-3.1-70B", 64, 8), 131072),
    Shape(_of("d 256", 16, 8, head_dim=256), 32768),
    Shape(_of("Llama-3.1-8B, w 32", 32, 8, 32), 131072),
    Shape(_of("Llama-3.1-8B, w 64", 32, 8, 64), 32768),
    Shape(_of("Qwen2.5-7B, w 32", 28, 4, 32), 32768),
    Shape(LLAMA_8B, 131072, projected=True),
)


class Cut(NamedTuple):
    """Blocks of kernels A and B, and how many programs share a multiprocessor."""

    attend: Blocks
    score: Blocks
    programs: int

    def __str__(self) -> str:
        return f"A {_text(self.attend)}, B {_text(self.score)}, {self.programs} per processor"


def _text(blocks: Blocks) -> str:
    form = "".join(", " + name for name in ("rows_first", "apart") if getattr(blocks, name))
    return f"{blocks.rows}×{blocks.keys} {blocks.warps}w {blocks.stages}s{form}"


def cuts(rows: int, head_dim: int) -> tuple[Cut, ...]:
    """Other cuts of the kernels that a sweep times."""
    if head_dim > 128:
        return (
            Cut(Blocks(16, 64, 4, 3), Blocks(16, 64, 4, 2), 1),
            Cut(Blocks(16, 64, 8, 2), Blocks(16, 64, 4, 3), 1),
        )
    if rows <= 32:
        return (
            Cut(Blocks(32, 64, 8, 3, rows_first=True), Blocks(32, 64, 4, 3), 1),
            Cut(Blocks(32, 64, 4, 2, rows_first=True), Blocks(32, 64, 4, 3), 2),
            Cut(Blocks(32, 32, 4, 3, rows_first=True), Blocks(32, 64, 4, 3), 2),
        )
    if rows <= 64:
        return (
            Cut(Blocks(64, 64, 4, 3, rows_first=True), Blocks(64, 64, 8, 2), 1),
            Cut(Blocks(64, 32, 4, 3, rows_first=True), Blocks(64, 64, 4, 2), 3),
            Cut(Blocks(64, 128, 8, 2, rows_first=True), Blocks(64, 128, 8, 2), 1),
        )
    return (
        Cut(Blocks(128, 64, 8, 3, rows_first=True), Blocks(128, 64, 8, 2, apart=True), 1),
        Cut(Blocks(128, 128, 8, 2, rows_first=True), Blocks(64, 128, 8, 2, apart=True), 1),
        Cut(Blocks(64, 32, 4, 3, rows_first=True), Blocks(64, 64, 4, 2, apart=True), 3),
    )


def planned(shape: Shape, cut: Cut) -> Plan:
    """The plan by which a cut of the kernels takes a shape."""
    held = max(cut.attend.rows, cut.score.rows)
    tiles = math.ceil(shape.rows / held) * held // cut.attend.rows
    groups = shape.geometry.batch * shape.geometry.num_kv_heads
    device = device_of(torch.device("cuda", torch.cuda.current_device()))
    block = max(cut.attend.keys, cut.score.keys)
    keys, splits = split_keys(shape.kv_len, groups * tiles, block, device, per_processor=cut.programs)
    return Plan(cut.attend, cut.score, keys, splits)


def window(shape: Shape, seed: int) -> AttentionWindow:
    """Random inputs with a sink, or with a W_O."""
    if shape.projected:
        return quantities.inputs(shape.geometry, shape.kv_len, seed=seed)
    return inputs(shape.geometry, shape.kv_len, seed=seed)[0]


def scores(win: AttentionWindow, plan: Plan | None) -> Tensor:
    """The kernels' scores; None: by the plan that users get."""
    return launch_scores(win.q, win.k, win.v, win.scale, plan_=plan, output_projection=win.output_projection)


def contenders(shape: Shape, sweep: bool) -> dict[str, Plan | None]:
    """Return the plans that are timed for a shape, by name."""
    others = cuts(shape.rows, shape.geometry.head_dim) if sweep else ()
    return {"as planned": None, **{str(cut): planned(shape, cut) for cut in others}}


def measure(names: Sequence[str] = (), *, sweep: bool = False, seed: int = 0, jobs: int = 1) -> Iterator[Row]:
    """A row per shape and contender, with the ratio of its time to the shape's floor.

    Args:
        names: parts of the names of the shapes to time; none: all.
        sweep: also other cuts. A cut whose scores break the contract is a row without times.
        jobs: processes that compile ahead.

    Raises:
        RedGateError: the scores that users get break the contract, before any of the shape's times are taken.
    """
    where = circumstances()
    wanted = [shape for shape in SHAPES if not names or any(name in shape.name for name in names)]
    if jobs > 1:
        warm(wanted, sweep, jobs)
    for shape in wanted:
        win = window(shape, seed)
        judge = gate.contract(win, weigh="output" if shape.projected else "value")
        base = {
            **where, "geometry": {**dataclasses.asdict(shape.geometry), "name": shape.name}, "kv_len": shape.kv_len,
            "seed": seed, "step": "score beside its floor", "floor_us": shape.floor_us,
        }  # fmt: skip
        for name, plan in contenders(shape, sweep).items():
            row = {**base, "contender": name}
            try:
                worst = judge.worst_error(scores(win, plan))
            except Exception as error:  # a cut that does not fit this device is a row as well
                if plan is None:
                    raise
                yield {**row, "left_out": type(error).__name__}
                continue
            if worst > 1:
                if plan is None:
                    raise gate.RedGateError(f"no speed is reported: {shape.name}, {worst:.3g} of the contract")
                yield {**row, "left_out": f"red, {worst:.3g} of the contract"}
                continue

            def call(win: AttentionWindow = win, plan: Plan | None = plan) -> Tensor:
                return scores(win, plan)

            times = gpu_time(call, repeats=30)
            yield {
                **row, "gate": {"worst_over_contract": worst}, "timed_by": "graph replay",
                **timed(times, wall_time(call, repeats=10)), "scratch_bytes": scratch_bytes(call),
                "times_floor": times.p50 / shape.floor_us, "kernels_us": kernel_times(call),
            }  # fmt: skip


def warm(shapes: Sequence[Shape], sweep: bool, jobs: int) -> None:
    """Compile everything into Triton's cache, several kernels at a time."""
    work = [(SHAPES.index(shape), name, sweep) for shape in shapes for name in contenders(shape, sweep)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, work))


def _compile(work: tuple[int, str, bool]) -> None:
    index, name, sweep = work
    shape = SHAPES[index]
    try:
        scores(window(shape, 0), contenders(shape, sweep)[name])
    except Exception as error:  # the process that times it says so in its row
        print(f"{shape.name}, {name}: {type(error).__name__}")
