"""Decode attention over heads of unequal length, timed against what else could serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from decantkv.cache.stores.ragged import RaggedStore
from decantkv.lab.bench.gate import RedGateError
from decantkv.lab.bench.rows import Row, circumstances
from decantkv.lab.bench.score import read_bandwidth, timed
from decantkv.lab.bench.timing import gpu_time, scratch_bytes, wall_time

TOLERANCE = 2**-7  # of the largest output: bf16's own rounding of weights and output


@dataclass(frozen=True)
class Lanes:
    """One layer's kept tokens: `average` a head, the longest head `spread` times the shortest."""

    name: str
    batch: int
    spread: int
    average: int = 6553  # 5 % of 128K
    num_kv_heads: int = 8
    group_size: int = 4
    head_dim: int = 128


def build(lanes: Lanes, seed: int) -> tuple[RaggedStore, Tensor]:
    """A store of random bf16 tokens and the newest token's queries [B, HQ, 1, D]."""
    rng = torch.Generator("cuda").manual_seed(seed)
    number = lanes.batch * lanes.num_kv_heads
    weights = torch.logspace(0, torch.tensor(float(lanes.spread)).log10().item(), number, dtype=torch.float64)
    lens = (weights / weights.mean() * lanes.average).long()[torch.randperm(number)].cuda()
    slots = int(lens.sum())

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device="cuda").bfloat16()

    store = RaggedStore(
        normal(slots, lanes.head_dim), normal(slots, lanes.head_dim), lens.cumsum(0) - lens, lens, batch=lanes.batch
    )
    return store, normal(lanes.batch, lanes.num_kv_heads * lanes.group_size, 1, lanes.head_dim)


def contenders(store: RaggedStore, q: Tensor, scale: float) -> dict[str, Callable[[], Tensor]]:
    """Name → call; each returns [B, HQ, 1, D]."""
    keys, values, held = store.padded()
    mask = held.repeat_interleave(q.shape[1] // store.heads, 1)[:, :, None]
    starts = torch.cat([store.starts, (store.starts + store.lens)[-1:]]).int()
    ones = torch.arange(store.lens.shape[0] + 1, dtype=torch.int32, device=q.device)
    lens, longest = store.lens.int(), int(store.lens.max())

    def ours() -> Tensor:
        return store.attend(q, scale=scale)

    def padded() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )

    def varlen() -> Tensor:
        rows = q.view(store.lens.shape[0], -1, q.shape[3])
        out = torch.ops.aten._flash_attention_forward(
            rows, store.keys[:, None], store.values[:, None], ones, starts, 1, longest, 0.0, False, False,
            scale=scale, seqused_k=lens,
        )  # fmt: skip
        result: Tensor = out[0].view_as(q)
        return result

    return {"ragged kernel": ours, "padded SDPA": padded, "varlen attention": varlen}


def check(store: RaggedStore, q: Tensor, out: Tensor, scale: float) -> float:
    """The largest error against float64, in parts of the largest output.

    Raises:
        RedGateError: it exceeds bf16's rounding.
    """
    group, worst, largest = q.shape[1] // store.heads, 0.0, 0.0
    rows, got = q.view(-1, group, q.shape[3]).double(), out.view(-1, group, q.shape[3]).double()
    for lane, (start, length) in enumerate(zip(store.starts.tolist(), store.lens.tolist(), strict=True)):
        k, v = store.keys[start : start + length].double(), store.values[start : start + length].double()
        want = torch.softmax(scale * rows[lane] @ k.T, -1) @ v
        worst, largest = max(worst, float((got[lane] - want).abs().max())), max(largest, float(want.abs().max()))
    if not worst <= TOLERANCE * largest:  # NaN included
        raise RedGateError(
            f"decode: expected an error below {TOLERANCE:.1e} of the largest output, got {worst / largest:.1e}"
        )
    return worst / largest


def measure(batches: Sequence[int] = (1, 8, 32), spreads: Sequence[int] = (1, 10), *, seed: int = 0) -> Iterator[Row]:
    """A row per contender, batch and spread.

    Raises:
        RedGateError: before any time of that case is taken.
    """
    where, roof = circumstances(), read_bandwidth()
    for batch in batches:
        for spread in spreads:
            lanes = Lanes("Llama-3.1-8B", batch, spread)
            store, q = build(lanes, seed)
            scale = lanes.head_dim**-0.5
            slots = int(store.lens.sum())
            floor = slots * 2 * lanes.head_dim * 2
            base = {
                **where, "geometry": asdict(lanes), "kv_len": lanes.average, "seed": seed, "roof_bytes_per_s": roof,
                "step": "ragged decode",
                # what only masking the dropped tokens holds: every token of the prompt
                "masked_full_cache_bytes": batch * lanes.num_kv_heads * lanes.average * 20 * 2 * lanes.head_dim * 2,
            }  # fmt: skip
            for name, call in contenders(store, q, scale).items():
                try:
                    error = check(store, q, call(), scale)
                except (RuntimeError, TypeError) as failure:  # an older torch has no such argument, say
                    if isinstance(failure, RedGateError):
                        raise
                    yield {**base, "contender": name, "left_out": str(failure).splitlines()[0][:200]}
                    continue
                times = gpu_time(call)
                held = floor if name != "padded SDPA" else floor // slots * store.lens.numel() * int(store.lens.max())
                yield {
                    **base, "contender": name, "gate": {"error": error}, "timed_by": "graph replay", "bytes_held": held,
                    **timed(times, wall_time(call)), "scratch_bytes": scratch_bytes(call),
                    "share_of_roof": floor / roof / (times.p50 * 1e-6),
                    "times_floor": times.p50 * 1e-6 / (floor / roof),
                }  # fmt: skip
