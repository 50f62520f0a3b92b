"""What a batch of rows holds, and that building it takes few launches and at most one look by the host."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from decantkv.lab.eval.engine import rows as engine
from decantkv.lab.eval.engine.keep import choose, score
from decantkv.lab.eval.engine.policy import parse_policies
from decantkv.lab.eval.engine.prompt import Reader
from decantkv.lab.eval.engine.quantise import quantise_keys, quantise_values
from decantkv.lab.eval.engine.rows import Row, RowBatch
from decantkv.selection.selector import FILLER

LENGTHS, ROOM = (83, 61), 9
POLICIES = parse_policies("dropkv,adadropkv,dropkv[allocation=pyramid],knorm")


class Count(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def rows(model):
    """Rows of two prompts in turn: full ones, quantised ones, even, ragged and layer by layer."""
    reader, made = Reader(model, rows=32), []
    for seed, length in enumerate(LENGTHS):
        ids = torch.randint(1, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
        settings = [policy.settings("0.4") for policy in POLICIES]
        kept = [[choose(w, s, score(w, s)) for s in settings] for _, w in reader.read(ids, [length - 7])]
        reading = reader.reading()
        for cut, choices in zip((length - 7, length), kept, strict=True):
            here = [Row(reading, cut, tuple(ids[cut:]), kept=choice) for choice in choices]
            here.insert(1, Row(reading, cut, tuple(ids[cut:]), bits=4))
            made.append([*here, Row(reading, cut, tuple(ids[cut:]))])
    return [row for group in zip(*made, strict=True) for row in group]


def expected(row, layer, head):
    """(tokens, keys, values) of a row's head, picked one by one."""
    keys, values = row.reading.keys[layer][:, :, : row.cut], row.reading.values[layer][:, :, : row.cut]
    if row.bits:
        keys, values = quantise_keys(keys, row.bits), quantise_values(values, row.bits)
    slots = list(range(row.cut)) if row.kept is None else row.kept.indices[layer, head].tolist()
    return slots, keys[0, head], values[0, head]


@pytest.mark.parametrize("pieces", [1, 2**28], ids=["a layer at a time", "all layers"])
@pytest.mark.parametrize("apart", [False, True], ids=["prompts in turn", "prompt by prompt"])
def test_every_slot_holds_its_token_and_is_shown(model, rows, apart, pieces, monkeypatch):
    monkeypatch.setattr(engine, "QUANTISE_BYTES", pieces)
    rows = sorted(rows, key=lambda row: row.reading.length) if apart else rows
    batch = RowBatch(model, rows, room=ROOM)
    assert len(batch.shown) == len(batch.cache.layers)  # ragged
    for layer, (held, shown) in enumerate(zip(batch.cache.layers, batch.shown, strict=True)):
        assert bool(torch.stack([held.keys, held.values]).isfinite().all())
        for r, row in enumerate(rows):
            for head in range(held.keys.shape[1]):
                slots, keys, values = expected(row, layer, head)
                real = [token != FILLER for token in slots]
                assert shown[r, head].tolist() == real + [False] * (shown.shape[2] - len(slots))
                at = [i for i, here in enumerate(real) if here]
                tokens = [slots[i] for i in at]
                assert torch.equal(held.keys[r, head, at], keys[tokens])
                assert torch.equal(held.values[r, head, at], values[tokens])


def test_rows_whose_heads_agree_are_masked_once_for_all_and_nothing_is_asked(model, rows):
    even = [row for row in rows if row.kept is None or len(set(row.kept.rows or ())) == 1]
    assert 4 < len(even) < len(rows)
    with Count() as count:
        batch = RowBatch(model, even, room=ROOM)
    assert count.seen["_local_scalar_dense"] == 0
    assert [tuple(shown.shape) for shown in batch.shown] == [(len(even), 1, batch.slots_total)]
    for r, row in enumerate(even):
        assert batch.shown[0][r, 0].sum() == row.stored


def test_launches_grow_with_prompts_and_layers_and_hardly_with_rows(model, rows):
    evicted = sorted((row for row in rows if not row.bits), key=lambda row: row.reading.length)
    with Count() as count:
        RowBatch(model, evicted * 4, room=ROOM)  # four runs of either prompt
    assert count.seen["index_select"] == 8 * 2 * len(evicted[0].reading.keys)
    assert count.seen["_local_scalar_dense"] == 1  # whether any head keeps fewer
    with Count() as once:
        RowBatch(model, evicted, room=ROOM)
    assert once.seen["index_select"] == 2 * 2 * len(evicted[0].reading.keys)
    assert count.seen["copy_"] <= 5 * len(evicted)


def test_first_tokens_are_asked_for_once_a_prompt(model, rows):
    whole = [row for row in rows if not row.rest]
    stop = whole[0].first_token()
    bound = [
        Row(row.reading, row.cut, (), row.kept, max_new_tokens=3, stops=(stop, 3), answer_first=True) for row in whole
    ]
    mixed = [*whole, *bound, *[row for row in rows if row.rest]]
    with Count() as count:
        found = engine._first_tokens(mixed)
    assert found == [[] if row.rest else [row.first_token()] for row in mixed]
    assert count.seen["argmax"] == 1
    assert found[len(whole)] != found[0]
