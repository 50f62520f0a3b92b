"""The evict step, timed: scoring by every contender, and selection with compaction."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from decantkv import kernels, scoring
from decantkv.lab.bench import gate
from decantkv.lab.bench.contenders import contenders, dense_bytes
from decantkv.lab.bench.rows import Row, circumstances
from decantkv.lab.bench.timing import Quantiles, gpu_time, scratch_bytes, wall_time
from decantkv.scoring.window import AttentionWindow, make_window

DENSE_LIMIT = 60 * 2**30  # bytes beyond which the dense reference is left out, and the row says so


@dataclass(frozen=True)
class Geometry:
    """One attention layer as the evict step sees it."""

    name: str
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    window: int = 8
    batch: int = 1


LLAMA_8B = Geometry("Llama-3.1-8B")
VARIANTS = (
    dataclasses.replace(LLAMA_8B, name="w 32", window=32),
    dataclasses.replace(LLAMA_8B, name="w 64", window=64),
    dataclasses.replace(LLAMA_8B, name="g 1", num_heads=8),
    dataclasses.replace(LLAMA_8B, name="g 7", num_heads=56),
    dataclasses.replace(LLAMA_8B, name="d 64", head_dim=64),
    dataclasses.replace(LLAMA_8B, name="d 256", head_dim=256),
    dataclasses.replace(LLAMA_8B, name="batch 8", batch=8),
)


def inputs(geometry: Geometry, kv_len: int, *, seed: int) -> tuple[AttentionWindow, AttentionWindow]:
    """A random bf16 window with an attention sink of about 1−p = 1e-3 at key 0, without and with the model's hints."""
    rng = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng, device="cuda").bfloat16()

    g = geometry
    q = normal(g.batch, g.num_heads, g.window, g.head_dim)
    k, v = (normal(g.batch, g.num_kv_heads, kv_len, g.head_dim) for _ in range(2))
    sink = torch.tensor(kv_len).log().item() + 7
    direction = q.float().unflatten(1, (g.num_kv_heads, -1)).mean((2, 3))
    direction = direction / direction.norm(dim=-1, keepdim=True)
    size = (sink * g.head_dim**0.5) ** 0.5
    q = (q.float() + size * direction.repeat_interleave(g.num_heads // g.num_kv_heads, 1)[:, :, None]).bfloat16()
    k[:, :, 0] = (size * direction).bfloat16()
    v[:, :, 0] *= 0.1
    win = make_window(q, k, v)
    s = q.float().unflatten(1, (g.num_kv_heads, -1)).flatten(2, 3) @ k.float().mT * win.scale
    row = torch.arange(s.shape[2], device="cuda") % g.window + kv_len - g.window
    s = s.masked_fill(torch.arange(kv_len, device="cuda") > row[:, None], -torch.inf)
    shape = (g.batch, g.num_heads, g.window)
    out = (s.softmax(-1) @ v.float()).bfloat16().view(*shape, g.head_dim)
    return win, dataclasses.replace(win, out=out, lse=s.logsumexp(-1).view(shape))


def traffic(geometry: Geometry, kv_len: int, passes: int) -> int:
    """The fewest bytes: K and V once a pass, scores once."""
    per_key = geometry.batch * geometry.num_kv_heads * (passes * 2 * geometry.head_dim * 2 + 4)
    return per_key * kv_len


def read_bandwidth() -> float:
    """Bytes/s of reading 1 GiB once, the roofline of these rows."""
    x = torch.ones(2**28, dtype=torch.int32, device="cuda")
    return x.numel() * 4 / (gpu_time(lambda: x.max(), repeats=20).p50 * 1e-6)


def measure(
    geometry: Geometry, lengths: Sequence[int], *, seed: int = 0, all_contenders: bool = True, budget: float = 0.05
) -> Iterator[Row]:
    """Rows for one geometry, shortest prompt first.

    Raises:
        gate.RedGateError: before any time of that length is taken.
    """
    where = circumstances()
    roof = read_bandwidth()
    for kv_len in lengths:
        win, hinted = inputs(geometry, kv_len, seed=seed)
        n_keep = max(geometry.window, int(kv_len * budget))
        green = gate.check(win, hinted, n_keep=n_keep)
        base = {
            **where, "geometry": dataclasses.asdict(geometry), "kv_len": kv_len, "seed": seed, "gate": green,
            "n_keep": n_keep, "roof_bytes_per_s": roof,
        }  # fmt: skip
        for name, (call, capturable) in contenders(win, hinted).items():
            if not all_contenders and not name.startswith("triton"):
                continue
            if isinstance(call, str) or (name == "torch dense reference" and dense_bytes(win) > DENSE_LIMIT):
                why = call if isinstance(call, str) else "memory"
                yield {**base, "step": "score", "contender": name, "left_out": why}
                continue
            slow = not capturable
            passes = 2 if name == "triton" else 1
            times = gpu_time(call, repeats=10 if slow else 50, graph=capturable)
            yield {
                **base, "step": "score", "contender": name, "timed_by": "graph replay" if capturable else "events",
                **timed(times, wall_time(call, repeats=10 if slow else 50)), "scratch_bytes": scratch_bytes(call),
                "share_of_roof": traffic(geometry, kv_len, passes) / roof / (times.p50 * 1e-6),
            }  # fmt: skip
        scores = scoring.compute("perturbation", win, impl="triton")

        def compact(scores: torch.Tensor = scores, win: AttentionWindow = win, n_keep: int = n_keep) -> object:
            index = kernels.select_topk(scores, n_keep, pool="max", kernel_size=11, window=win.window)
            return kernels.gather_kv(win.k, win.v, index)

        def evict(win: AttentionWindow = win, n_keep: int = n_keep) -> object:
            scores = kernels.window_scores(win.q, win.k, win.v, scale=win.scale)
            index = kernels.select_topk(scores, n_keep, pool="max", kernel_size=11, window=win.window)
            return kernels.gather_kv(win.k, win.v, index)

        for step, work in (("pool + select + gather", compact), ("evict", evict)):
            yield {
                **base, "step": step, "contender": "triton", "timed_by": "graph replay",
                **timed(gpu_time(work), wall_time(work)), "scratch_bytes": scratch_bytes(work),
            }  # fmt: skip


def timed(gpu: Quantiles, wall: Quantiles) -> Row:
    """Both figures of a call, in microseconds."""
    return {"gpu_us": dict(gpu._asdict()), "wall_us": dict(wall._asdict())}
