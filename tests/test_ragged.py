"""Ragged storage against lanes kept as plain lists of tokens, and its attention against one float64 softmax a row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decantkv.cache.report import storage_bytes
from decantkv.cache.stores import ragged
from decantkv.cache.stores.ragged import ROOM, RaggedStore
from decantkv.selection.selector import select

B, H, N, D, DV, G = 2, 3, 40, 8, 6, 2


class Lists:
    """What the store must hold: per batch row and head, a list of (key, value)."""

    def __init__(self, keys, values, kept):
        self.lanes = [
            [
                [(keys[b, h, j], values[b, h, j]) for j in kept.indices[b, h].tolist() if j >= 0]
                for h in range(keys.shape[1])
            ]
            for b in range(keys.shape[0])
        ]

    def append(self, keys, values, real=None):
        for b, row in enumerate(self.lanes):
            for h, lane in enumerate(row):
                lane += [(keys[b, h, t], values[b, h, t]) for t in range(keys.shape[2]) if real is None or real[b, t]]

    def attend(self, q, scale, softcap=None, sinks=None):
        """One query at a time, float64."""
        out = torch.zeros(*q.shape[:3], self.lanes[0][0][0][1].shape[0], dtype=torch.float64)
        group = q.shape[1] // len(self.lanes[0])
        for b, hq, t in ((b, hq, t) for b in range(q.shape[0]) for hq in range(q.shape[1]) for t in range(q.shape[2])):
            lane = self.lanes[b][hq // group]
            seen = lane[: len(lane) - (q.shape[2] - 1 - t)]
            s = torch.stack([scale * torch.dot(q[b, hq, t].double(), k.double()) for k, _ in seen])
            s = s if softcap is None else softcap * torch.tanh(s / softcap)
            s = s if sinks is None else torch.cat([s, sinks[hq].double()[None]])
            p = torch.softmax(s, 0)[: len(seen)]
            out[b, hq, t] = p @ torch.stack([v.double() for _, v in seen])
        return out


def example(seed=0, batch=B, allocation="ada", dtype=torch.float32, budget=9):
    g = torch.Generator().manual_seed(seed)
    keys, values = (
        torch.randn(batch, H, N, D, generator=g, dtype=dtype),
        torch.randn(batch, H, N, DV, generator=g, dtype=dtype),
    )
    scores = torch.rand(batch, H, N, generator=g) * torch.tensor([1.0, 3.0, 0.3])[:, None]
    kept = select(scores, n_keep=budget, window=2, allocation=allocation)
    return keys, values, kept, g


def new_tokens(g, count, batch=B, dtype=torch.float32):
    return (
        torch.randn(batch, H, count, D, generator=g, dtype=dtype),
        torch.randn(batch, H, count, DV, generator=g, dtype=dtype),
        torch.randn(batch, H * G, count, D, generator=g, dtype=dtype),
    )


def same_tokens(store, lists):
    keys, values, held = store.padded()
    for b, row in enumerate(lists.lanes):
        for h, lane in enumerate(row):
            assert int(held[b, h].sum()) == len(lane)
            for slot, (k, v) in enumerate(lane):
                assert torch.equal(keys[b, h, slot], k)
                assert torch.equal(values[b, h, slot], v)


def test_a_prompt_takes_no_slack_and_the_first_token_does():
    keys, values, kept, g = example()
    assert len(set(kept.counts[0].tolist())) > 1
    store = RaggedStore.from_kept(keys, values, kept)
    total = B * H * 9
    assert storage_bytes([store.keys, store.values]) == total * (D + DV) * 4
    k, v, _ = new_tokens(g, 1)
    store.append(k, v)
    grown = storage_bytes([store.keys, store.values])
    assert grown == (total + B * H * ROOM) * (D + DV) * 4
    for _ in range(ROOM - 1):
        store.append(k, v)
    assert storage_bytes([store.keys, store.values]) == grown
    store.append(k, v)
    assert storage_bytes([store.keys, store.values]) == grown + B * H * ROOM * (D + DV) * 4


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("tile_bytes", [1, ragged.TILE_BYTES])
def test_attention_is_one_softmax_over_each_lane(monkeypatch, softcap, sinks, tile_bytes):
    monkeypatch.setattr(ragged, "TILE_BYTES", tile_bytes)  # 16 keys a tile against all at once
    keys, values, kept, g = example(budget=20)
    store, lists = RaggedStore.from_kept(keys, values, kept), Lists(keys, values, kept)
    sink_logits = torch.randn(H * G, generator=g) if sinks else None
    for count in (1, 4, 1):
        k, v, q = new_tokens(g, count)
        store.append(k, v)
        lists.append(k, v)
        got = store.attend(q, scale=0.7, softcap=softcap, sink_logits=sink_logits)
        want = lists.attend(q, 0.7, softcap, sink_logits)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    same_tokens(store, lists)


def test_new_pads_are_not_stored():
    keys, values, kept, g = example()
    store, lists = RaggedStore.from_kept(keys, values, kept), Lists(keys, values, kept)
    k, v, q = new_tokens(g, 5)
    real = torch.tensor([[True] * 5, [False, False, True, True, True]])
    store.append(k, v, real)
    lists.append(k, v, real)
    same_tokens(store, lists)
    got, want = store.attend(q, scale=0.7).double(), lists.attend(q, 0.7)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got[1, :, 2:], want[1, :, 2:], rtol=1e-5, atol=1e-6)
    assert bool(got.isfinite().all())


def test_a_head_that_kept_nothing_starts_with_the_new_tokens():
    keys, values, _, g = example()
    scores = torch.rand(B, H, N) + torch.tensor([5.0, 5.0, 0.0])[:, None]
    kept = select(scores, n_keep=4, allocation="heads")
    assert kept.counts[:, 2].tolist() == [0, 0]
    store, lists = RaggedStore.from_kept(keys, values, kept), Lists(keys, values, kept)
    k, v, q = new_tokens(g, 2)
    store.append(k, v)
    lists.append(k, v)
    torch.testing.assert_close(store.attend(q, scale=1.0).double(), lists.attend(q, 1.0), rtol=1e-5, atol=1e-6)


@given(st.lists(st.sampled_from(["append", "many", "crop", "rows", "repeat", "save"]), max_size=8), st.integers(0, 9))
@settings(max_examples=25, deadline=None)
def test_any_sequence_of_changes_is_what_doing_it_by_hand_gives(changes, seed):
    keys, values, kept, g = example(seed)
    store, lists, appended = RaggedStore.from_kept(keys, values, kept), Lists(keys, values, kept), 0
    for change in changes:
        if change in ("append", "many"):
            k, v, _ = new_tokens(g, 1 if change == "append" else ROOM - 1, batch=store.batch)
            store.append(k, v)
            lists.append(k, v)
            appended += k.shape[2]
        elif change == "crop":
            number = min(appended, 3)
            store.crop(number)
            appended -= number
            lists.lanes = [[lane[: len(lane) - number] for lane in row] for row in lists.lanes]
        elif change in ("rows", "repeat") and store.batch <= 4:
            rows = (
                torch.arange(store.batch).flip(0)
                if change == "rows"
                else torch.arange(store.batch).repeat_interleave(2)
            )
            store.select_rows(rows)
            lists.lanes = [[list(lane) for lane in lists.lanes[r]] for r in rows.tolist()]
        elif change == "save":
            store = RaggedStore.from_state({name: x.clone() for name, x in store.state().items()})
    same_tokens(store, lists)
    k, v, q = new_tokens(g, 2, batch=store.batch)
    store.append(k, v)
    lists.append(k, v)
    torch.testing.assert_close(store.attend(q, scale=0.7).double(), lists.attend(q, 0.7), rtol=1e-5, atol=1e-6)


def test_cropping_into_the_evicted_prompt_is_refused():
    keys, values, kept, g = example()
    store = RaggedStore.from_kept(keys, values, kept)
    store.append(*new_tokens(g, 3)[:2])
    with pytest.raises(ValueError, match="at most the 3 tokens after the evicted prompt, got 4"):
        store.crop(4)
    store.crop(3)
    assert store.lens.tolist() == kept.counts.flatten().tolist()


def test_shrinking_keeps_the_marked_slots():
    keys, values, kept, g = example()
    store, lists = RaggedStore.from_kept(keys, values, kept), Lists(keys, values, kept)
    marks = torch.rand(store.keys.shape[0], generator=g) < 0.5
    lanes = store.lanes()
    store.shrink(marks)
    for lane in range(B * H):
        own = marks[lanes == lane].tolist()
        row = lists.lanes[lane // H]
        row[lane % H] = [token for token, stays in zip(row[lane % H], own, strict=True) if stays]
    same_tokens(store, lists)
    store.append(*new_tokens(g, 1)[:2])
    with pytest.raises(RuntimeError, match="before new tokens come"):
        store.shrink(marks)


def test_saved_states_are_plain_tensors_and_bad_ones_are_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    keys, values, kept, g = example()
    store = RaggedStore.from_kept(keys, values, kept)
    store.append(*new_tokens(g, 3)[:2])
    save_file(store.state(), tmp_path / "store.safetensors")
    again = RaggedStore.from_state(load_file(tmp_path / "store.safetensors"))
    q = new_tokens(g, 1)[2]
    assert torch.equal(store.attend(q, scale=1.0), again.attend(q, scale=1.0))
    state = store.state()
    with pytest.raises(ValueError, match="none named lens"):
        RaggedStore.from_state({name: x for name, x in state.items() if name != "lens"})
    with pytest.raises(ValueError, match="expected lanes inside"):
        RaggedStore.from_state({**state, "starts": state["starts"] + 1000})


def test_low_precision_attends_in_float32():
    keys, values, kept, g = example(dtype=torch.bfloat16)
    store, lists = RaggedStore.from_kept(keys, values, kept), Lists(keys, values, kept)
    k, v, q = new_tokens(g, 1, dtype=torch.bfloat16)
    store.append(k, v)
    lists.append(k, v)
    got = store.attend(q, scale=0.7)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), lists.attend(q, 0.7), rtol=2**-8, atol=1e-6)  # its output's own rounding
