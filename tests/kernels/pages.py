"""Requests in pages: random block tables over poisoned storage, in the layouts that vLLM uses."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tests.kernels.windows import window

LAYOUTS = ("packed heads first", "apart", "apart, heads first")


class Paged(NamedTuple):
    wins: list  # each request as a dense window
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor
    lengths: Tensor


def caches(layout, blocks, size, heads, dim, v_dim, dtype, device):
    """[blocks, size, heads, D] views full of NaN: what no request wrote must not matter."""
    nan = {"dtype": dtype, "device": device, "fill_value": float("nan")}
    if layout == "packed heads first":
        return torch.full((blocks, heads, size, dim + v_dim), **nan).transpose(1, 2).split([dim, v_dim], -1)
    if layout == "apart":
        return torch.full((blocks, size, heads, dim), **nan), torch.full((blocks, size, heads, v_dim), **nan)
    k, v = torch.full((blocks, heads, size, dim), **nan), torch.full((blocks, heads, size, v_dim), **nan)
    return k.transpose(1, 2), v.transpose(1, 2)


def paged(seed, lengths, *, size=16, layout=LAYOUTS[0], spare=2, device="cpu", **options):
    """Requests of these lengths, each a window of its own, spread over shuffled blocks."""
    wins = [window(seed + i, B=1, N=n, device=device, **options) for i, n in enumerate(lengths)]
    first = wins[0]
    need = [-(-n // size) for n in lengths]
    blocks = sum(need) + 5
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(blocks, generator=rng).to(torch.int32)
    table = torch.full((len(lengths), max(need) + spare), 2**30, dtype=torch.int32)  # past the end: never read
    heads, dim, v_dim = first.num_kv_heads, first.k.shape[3], first.v.shape[3]
    k_cache, v_cache = caches(layout, blocks, size, heads, dim, v_dim, first.k.dtype, device)
    used = 0
    for row, (win, n) in enumerate(zip(wins, need, strict=True)):
        table[row, :n] = order[used : used + n]
        used += n
        at = torch.arange(win.kv_len)
        block = table[row].long()[at // size].to(device)
        k_cache[block, (at % size).to(device)] = win.k[0].transpose(0, 1)
        v_cache[block, (at % size).to(device)] = win.v[0].transpose(0, 1)
    q = torch.cat([win.q for win in wins])
    return Paged(wins, q, k_cache, v_cache, table.to(device), torch.tensor(lengths, device=device))


def check_scores(score_paged, made, quantity="perturbation", reduce="sum", *, weigh="value", max_len=None, **options):
    """Every request meets the contract as if it were alone; nothing may be chosen behind its end. Return the worst."""
    from tests.kernels.windows import worst_error

    first = made.wins[0]
    scores = score_paged(
        made.q, made.k_cache, made.v_cache, made.table, made.lengths, scale=first.scale, softcap=first.softcap,
        sink_logits=first.sink_logits, quantity=quantity, reduce=reduce, max_len=max_len,
        output_projection=first.output_projection if weigh == "output" else None, **options,
    )  # fmt: skip
    assert scores.shape[2] == (max_len or made.table.shape[1] * made.k_cache.shape[1])
    worst = 0.0
    if weigh == "output":
        options["weigh"] = weigh
    for row, win in enumerate(made.wins):
        assert (scores[row, :, win.kv_len :] == -torch.inf).all()
        own = scores[row : row + 1, :, : win.kv_len]
        if weigh == "output":  # all requests share one layer's W_O
            win = replace(win, output_projection=first.output_projection)
        worst = max(worst, worst_error(own, win, quantity, reduce, **options))
    assert worst <= 1, f"{worst:.3g} of the contract"
    return worst


def choose(made, kept, seed, *, tail=0):
    """[R, H, kept] int64 tokens of each request, ascending, none of its last `tail`; filler on the left, and counts."""
    rng = torch.Generator().manual_seed(seed)
    heads = made.k_cache.shape[2]
    counts = [min(kept, win.kv_len - tail) for win in made.wins]
    index = torch.full((len(counts), heads, kept), -1)
    for row, (win, count) in enumerate(zip(made.wins, counts, strict=True)):
        for head in range(heads):
            chosen = torch.randperm(win.kv_len - tail, generator=rng)[:count].sort().values
            index[row, head, kept - count :] = chosen
    return index.to(made.table.device), torch.tensor(counts, device=made.table.device)


def own(made):
    """The same requests on a copy of their storage, packed as it was."""
    copies = {}

    def copied(cache):
        storage = cache.untyped_storage()
        copy = copies.setdefault(storage.data_ptr(), storage.clone())
        return cache.new_empty(0).set_(copy, cache.storage_offset(), cache.shape, cache.stride())

    return made._replace(k_cache=copied(made.k_cache), v_cache=copied(made.v_cache))


def check_compaction(compact_paged, twin, made, index, first, counts=None):
    """Every block agrees with the twin's bit for bit, those that nobody touched included."""
    ours, theirs = own(made)[2:4], own(made)[2:4]
    compact_paged(*ours, made.table, index, first, counts=counts)
    twin(*theirs, made.table, index, first, counts=counts)
    for got, want in zip(ours, theirs, strict=True):
        assert torch.equal(got.nan_to_num(123.0), want.nan_to_num(123.0))
