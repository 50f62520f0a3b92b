"""Prompts evicted through a block table, as the GPU backends do it, against a dense prompt alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decantkv.engines.blocks import BlockSettings
from decantkv.engines.common.plan import Plans
from decantkv.engines.common.steps import read_step
from decantkv.engines.vllm.batch import Batch
from decantkv.engines.vllm.eviction import Heads, choose, evict_paged
from decantkv.settings import Settings

BLOCK, HEADS, GROUP, WIDTH = 16, 2, 3, 8


def pages(lengths, order, seed=0):
    """A cache [blocks, H, tokens, 2·D] as vLLM lays it out, and prompts in blocks dealt in any order."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-n // BLOCK) for n in lengths]
    cache = torch.randn(sum(needed) + 3, HEADS, BLOCK, 2 * WIDTH, generator=generator)
    if order == "NHD":
        cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
    free = torch.randperm(len(cache), generator=generator)
    table = torch.full((len(lengths) + 1, max(needed)), -7, dtype=torch.int32)
    for row, (number, start) in enumerate(zip(needed, np.cumsum([0, *needed[:-1]]), strict=True)):
        table[row, :number] = free[start : start + number]
    return cache, table


def dense(cache, table, length):
    blocks = table[: -(-length // BLOCK)].long()
    rows = cache[blocks].transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1)
    return rows[..., :WIDTH].clone(), rows[..., WIDTH:].clone()


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize(
    ("options", "heads"),
    [
        ({}, Heads(0.3)),
        ({"reduce": "max", "sinks": 4}, Heads(0.3, softcap=20.0)),
        ({"impl": "torch"}, Heads(0.3)),
        ({"method": "snapkv", "window": 16}, Heads(0.3, sink_logits=torch.linspace(-1, 1, HEADS * GROUP))),
        ({"method": "tova"}, Heads(0.3)),
        ({"method": "streaming"}, Heads(0.3)),
        ({"allocation": "shared"}, Heads(0.3)),
    ],
)
def test_every_prompt_keeps_what_it_would_alone(order, options, heads):
    parsed = Settings.parse(options.pop("method", "dropkv"), budget=0.2, **options)
    settings, lengths = BlockSettings.of(parsed, BLOCK), [200, 75, 333]
    cache, table = pages(lengths, order)
    query = torch.randn(sum(lengths), HEADS * GROUP, WIDTH, generator=torch.Generator().manual_seed(2))
    starts = np.cumsum([0, *lengths])
    names = ["a", "b", "c"]
    step = read_step(Batch(names, np.array(lengths), set(names)), Plans(settings), starts, np.array(lengths))
    finished = [(run, query[run.start : run.stop]) for run in step.finishing]
    assert len(finished) == 3
    before = [dense(cache, table[row], length) for row, length in enumerate(lengths)]
    k_cache, v_cache = cache.transpose(1, 2).split(WIDTH, dim=-1)
    evict_paged(finished, k_cache, v_cache, table, heads, settings)
    for row, (run, window) in enumerate(finished):
        made, (keys, values) = run.plan, before[row]
        slots = choose(heads.window(window, keys, values), settings, made)[..., None].expand(-1, -1, WIDTH)
        kept = [torch.cat([x.gather(1, slots), x[:, made.tail_block * BLOCK :]], 1) for x in (keys, values)]
        shifted = table[row, made.first_block :]
        for got, want in zip(dense(cache, shifted, made.kept), kept, strict=True):
            assert torch.equal(got, want)
        head = dense(cache, table[row], made.dropped)  # freed blocks may be another request's prefix
        assert torch.equal(head[0], keys[:, : made.dropped])
