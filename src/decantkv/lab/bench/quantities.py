"""What else the kernels compute, timed: the other methods' quantities, and DropKV's score and compaction in pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decantkv import kernels, scoring
from decantkv.lab.bench.gate import RedGateError
from decantkv.lab.bench.rows import Row, circumstances
from decantkv.lab.bench.score import LLAMA_8B, Geometry, timed
from decantkv.lab.bench.timing import gpu_time, scratch_bytes, wall_time
from decantkv.scoring.window import AttentionWindow, make_window

DEVICE = "cuda"
PAGE = 16  # tokens per block, vLLM's smallest
KEPT = 0.05
HIDDEN = 4096  # width behind W_O
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {  # window of the method's authors, quantity, options
    "AnDPro, tokens": (32, "alignment", {}),
    "AnDPro, chunks": (32, "chunk_alignment", {"row_pool": "max", "kernel_size": 7, "chunk": 4}),
    "DropKV by W_O": (8, "perturbation", {"weigh": "output"}),
    "DefensiveKV, pooled rows": (32, "attention_mass", {"reduce": "max", "row_pool": "avg", "kernel_size": 5}),
}


def inputs(geometry: Geometry, kv_len: int, *, seed: int) -> AttentionWindow:
    """A random bf16 window with a W_O."""
    rng = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=DEVICE).bfloat16()

    g = geometry
    k, v = (normal(g.batch, g.num_kv_heads, kv_len, g.head_dim) for _ in range(2))
    w_o = normal(g.num_heads, g.head_dim, HIDDEN) / HIDDEN**0.5
    return make_window(normal(g.batch, g.num_heads, g.window, g.head_dim), k, v, output_projection=w_o)


def check(scores: Tensor, again: Tensor, expected: Tensor) -> dict[str, float | bool]:
    """Judge scores by the tiled implementation's, itself judged against float64 in the tests.

    Raises:
        RedGateError: they differ by more than 1 % and a thousandth of the mean, or a repeat differs at all.
    """
    bound = 0.01 * expected.abs() + 1e-3 * expected.abs().mean()
    found: dict[str, float | bool] = {
        "repeats_bit_identical": torch.equal(scores, again),
        "worst_over_bound": float(((scores - expected).abs() / bound).nan_to_num(float("inf")).max()),
    }
    if not found["repeats_bit_identical"] or found["worst_over_bound"] > 1:
        raise RedGateError(f"no speed is reported: {found}")
    return found


def measure(lengths: Sequence[int], *, seed: int = 0, geometry: Geometry = LLAMA_8B) -> Iterator[Row]:
    """Rows of every quantity by the kernels and by tiled torch, then of paged storage beside dense.

    Raises:
        RedGateError: before any time of what is wrong is taken.
    """
    where = circumstances()
    for kv_len in lengths:
        for name, (window, quantity, options) in CASES.items():
            shape = dataclasses.replace(geometry, window=window)
            win = inputs(shape, kv_len, seed=seed)
            base = {**where, "geometry": dataclasses.asdict(shape), "kv_len": kv_len, "seed": seed, "step": name}

            def compute(impl: Any, win: Any = win, quantity: Any = quantity, options: Any = options) -> Tensor:
                return scoring.compute(quantity, win, impl=impl, **options)

            green = check(compute("triton"), compute("triton"), compute("torch"))
            for impl in ("triton", "torch"):
                yield {**base, "contender": impl, "gate": green, **figures(partial(compute, impl), impl)}
        win = inputs(geometry, kv_len, seed=seed)
        base = {**where, "geometry": dataclasses.asdict(geometry), "kv_len": kv_len, "seed": seed}
        yield from ({**base, **row} for row in paged(win))


def figures(call: Callable[[], object], impl: str) -> Row:
    """Times and scratch; tiled torch cannot be captured and is timed between events."""
    graph = impl == "triton"
    repeats = 50 if graph else 10
    return {
        "timed_by": "graph replay" if graph else "events",
        **timed(gpu_time(call, repeats=repeats, graph=graph), wall_time(call, repeats=repeats)),
        "scratch_bytes": scratch_bytes(call),
    }


def paged(win: AttentionWindow) -> Iterator[Row]:
    """DropKV's score and the compaction of one prompt in shuffled blocks, packed as vLLM packs them, beside dense."""
    from decantkv.kernels.paged import compact_paged, score_paged

    heads, kv_len, dim = win.k.shape[1:]
    blocks = -(-kv_len // PAGE)
    table = torch.randperm(blocks, device=win.k.device)[None].int()
    cache = torch.zeros(blocks, heads, PAGE, 2 * dim, dtype=win.k.dtype, device=win.k.device)
    k_cache, v_cache = cache.transpose(1, 2).split(dim, dim=-1)
    at = torch.arange(kv_len, device=win.k.device)
    for part, x in ((k_cache, win.k), (v_cache, win.v)):
        part[table[0].long()[at // PAGE], at % PAGE] = x[0].transpose(0, 1)
    lengths = torch.tensor([kv_len], device=win.k.device)

    def dense() -> Tensor:
        return kernels.window_scores(win.q, win.k, win.v, scale=win.scale)

    def in_pages() -> Tensor:
        return score_paged(win.q, k_cache, v_cache, table, lengths, scale=win.scale, max_len=kv_len)

    green = check(in_pages(), in_pages(), scoring.compute("perturbation", win, impl="torch"))
    for contender, call in (("triton, dense", dense), ("triton, paged", in_pages)):
        yield {"step": "score", "contender": contender, "gate": green, **figures(call, "triton")}
    kept = max(1, int(KEPT * kv_len) // PAGE)
    first = torch.tensor([kv_len // PAGE - kept], device=win.k.device)
    index = kernels.select_topk(in_pages()[..., : kv_len // PAGE * PAGE].contiguous(), kept * PAGE)
    wanted = kernels.gather_kv(win.k, win.v, index)

    def compact() -> None:
        compact_paged(k_cache, v_cache, table, index, first)

    compact()
    moved = table[0, kv_len // PAGE - kept : kv_len // PAGE].long()
    got = (x[moved].flatten(0, 1).transpose(0, 1)[None] for x in (k_cache, v_cache))
    if not all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True)):
        raise RedGateError("no speed is reported: compaction in pages moved other tokens than were chosen")
    for contender, work in (("dense gather", lambda: kernels.gather_kv(win.k, win.v, index)), ("in pages", compact)):
        yield {"step": "compact", "contender": contender, "gate": {"tokens_equal": True}, **figures(work, "triton")}
