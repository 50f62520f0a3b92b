"""`decantkv.kernels.paged` in plain torch, with a dense copy per request: slow, on any device, for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from decantkv.scoring import compute
from decantkv.scoring.window import make_window


def gather_paged(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Return one request's keys or values [H, N, D], copied out of their pages.

    Args:
        cache: [blocks, block_size, H, D]. table: [nblocks] integers.
    """
    blocks = table[: -(-length // cache.shape[1])].long()
    return cache[blocks].flatten(0, 1)[:length].transpose(0, 1)


def score_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    quantity: Any = "perturbation",
    reduce: Any = "sum",
    output_projection: Tensor | None = None,
    max_len: int | None = None,
    impl: Any = "torch",
    **options: Any,
) -> Tensor:
    """Return scores [R, H, N] float32; arguments as in `kernels.paged.score_paged`, `impl` as in `scoring.compute`."""
    n_keys = block_table.shape[1] * k_cache.shape[1] if max_len is None else max_len
    scores = torch.full((q.shape[0], k_cache.shape[2], n_keys), -torch.inf, device=q.device)
    if output_projection is not None:
        options["weigh"] = "output"
    for row, length in enumerate(lengths.tolist()):
        k, v = (gather_paged(cache, block_table[row], length)[None] for cache in (k_cache, v_cache))
        win = make_window(
            q[row : row + 1], k, v, scale=scale, softcap=softcap, sink_logits=sink_logits,
            output_projection=output_projection,
        )  # fmt: skip
        scores[row, :, :length] = compute(quantity, win, impl=impl, reduce=reduce, **options)[0]
    return scores


def compact_paged(
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    index: Tensor,
    first_block: Tensor,
    *,
    counts: Tensor | None = None,
) -> None:
    """Compact in place; arguments as in `kernels.paged.compact_paged`. Each request's kept tokens are copied first."""
    size, heads = k_cache.shape[1], torch.arange(k_cache.shape[2], device=k_cache.device)[:, None]
    for row, first in enumerate(first_block.tolist()):
        kept = index[row] if counts is None else index[row, :, index.shape[2] - int(counts[row]) :]
        to = first * size + torch.arange(kept.shape[1], device=index.device)
        block, block_to = block_table[row].long()[kept // size], block_table[row].long()[to // size]
        for cache in (k_cache, v_cache):
            cache[block_to, to % size, heads] = cache[block, kept % size, heads].clone()
