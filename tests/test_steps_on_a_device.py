"""A decoding step as a capture would see it, without a GPU: fake tensors know devices, and have no values to wait for.

"meta" stands for the device: fake tensors of a CUDA device need a torch that was built for one.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import decantkv
from decantkv.cache.evicting_cache import cache_argument
from decantkv.cache.phases import KEPT_WHOLE
from decantkv.cache.re_eviction import EvictedAnswer
from decantkv.cache.stores import ragged
from decantkv.selection.selector import Kept
from tests.support import tiny
from tests.support.families import at_least

HEADS, WIDTH = 2, 8
# earlier versions make a number for eager's mask on the host, which the rehearsal finds: no graph there
ATTENTIONS = ["sdpa", "eager"] if at_least("5.24") else ["sdpa"]


class Kernel:
    """The decode kernel without its launch."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.launches.append((grid, args))


@pytest.fixture
def kernel(monkeypatch):
    decode = pytest.importorskip("decantkv.kernels.decode")
    from decantkv.kernels.blocks import Device

    fake = Kernel()
    monkeypatch.setattr(decode, "decode_kernel", fake)
    monkeypatch.setattr(ragged, "kernels_on", lambda device, name: decode if name == "decode" else None)
    monkeypatch.setattr(decode, "device_of", lambda device: Device("cuda", 132, 227 * 1024, warpgroups=True))
    return fake


def after_a_prompt(model, batch, every):
    """A cache that holds 40 tokens a head of 100, with room, as after the first step."""
    from decantkv.kernels.decode import Splits

    cache = decantkv.EvictingCache(model, budget=40, decode="own", every=every)
    lanes = batch * HEADS
    for layer in cache.layers:
        flat = [torch.empty(lanes * 60, WIDTH, device="meta") for _ in range(2)]
        starts, lens = (torch.empty(lanes, dtype=torch.int64, device="meta") for _ in range(2))
        store = ragged.RaggedStore(*flat, starts, lens, batch=batch, room=20)
        number = torch.empty(lanes, dtype=torch.int32, device="meta")
        store._splits = Splits(number, number, starts, 64, 1, number)
        layer.logical, layer.unmasked, layer.postponed, rows = 100, True, True, layer.policy.rows
        recent = torch.empty(batch, 8, rows, WIDTH, device="meta")
        answer = KEPT_WHOLE if every is None else EvictedAnswer(torch.zeros(batch, 3), 100, recent, rows)
        kept = Kept(*(torch.empty(shape, dtype=torch.int64, device="meta") for shape in ((batch, 2, 40), (batch, 2))))
        layer.hold(store, answer, kept)
    return cache


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("every", [None, 50])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_step_stays_on_the_device_and_needs_no_values(kernel, attention, every, batch):
    with FakeTensorMode(), torch.device("meta"):
        model = tiny.llama(attention=attention)
        cache = after_a_prompt(model, batch, every)
        ids, position = (torch.ones(batch, 1, dtype=torch.int64) for _ in range(2))
        with torch.no_grad():
            out = model(ids, position_ids=position, **{cache_argument(model): cache}, use_cache=True)
    assert out.logits.device.type == "meta"
    assert out.logits.shape == (batch, 1, tiny.VOCABULARY)
    assert len(kernel.launches) == 3
    for _, args in kernel.launches:
        assert {x.device.type for x in args if isinstance(x, torch.Tensor)} == {"meta"}
    assert [(layer.logical, layer.store.room, layer.store.appended) for layer in cache.layers] == [(101, 19, 1)] * 3


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
@pytest.mark.parametrize("fault", [
    lambda x: x * float(x.sum()), lambda x: x + torch.zeros(3, device="cpu")[:, None, None, None].sum(0),
    lambda x: x[x > 0],
], ids=["waits", "another device", "a shape by values"])  # fmt: skip
def test_a_step_that_does_not_is_found(kernel, fault):
    with FakeTensorMode(), torch.device("meta"):
        model = tiny.llama()
        cache = after_a_prompt(model, 1, None)
        model.model.layers[1].mlp.register_forward_pre_hook(lambda m, args: (fault(args[0]),))
        ids, position = (torch.ones(1, 1, dtype=torch.int64) for _ in range(2))
        with torch.no_grad(), pytest.raises((RuntimeError, NotImplementedError)):
            model(ids, position_ids=position, **{cache_argument(model): cache}, use_cache=True)
