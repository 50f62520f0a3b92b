"""The rows of one batch give what attach and generate give one at a time."""

import dataclasses

import pytest
import torch

import decantkv
from decantkv.cache.chunked_reading import evicting_layers
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.decode.graphs import Trust
from decantkv.lab.eval.engine import rows as rows_of
from decantkv.lab.eval.engine.policy import parse_policies, parse_policy
from decantkv.lab.eval.engine.quantise import bytes_share, quantise_keys, quantise_values
from decantkv.lab.eval.engine.reading import Reader
from decantkv.lab.eval.engine.rows import Row, RowBatch

PROMPT, CUT, NEW = 90, 71, 12
POLICIES = parse_policies(
    "dropkv,snapkv,snapkv:shared,adadropkv,dropkv[allocation=layer],dropkv[allocation=pyramid],knorm,random,h2o,"
    "criticalkv,defensivekv,tova,streaming[renumber=false],dropkv[weigh=output],expected-attention,"
    "dropkv[rehearsal=replay+anchors,allocation=uniform],snapkv[rehearsal=anchors:0.3+window]"
)


@pytest.fixture(scope="module")
def ids(model):
    torch.manual_seed(3)
    return torch.randint(1, model.config.vocab_size, (PROMPT,)).tolist()


@pytest.fixture(scope="module")
def settings():
    """What every policy evicts by."""
    return {policy.label: policy.settings("0.3") for policy in POLICIES}


@pytest.fixture(scope="module")
def read(model, ids, settings):
    """The prompt read once, and scored for every policy at both cuts."""
    needs = frozenset(need for s in settings.values() for need in s.method.needs)
    reader = Reader(model, rows=max(s.rows for s in settings.values()), needs=needs)
    for cut in reader.read(ids, [CUT]):
        for s in settings.values():
            cut.score(s)
    return reader.reading()


def row(read, ids, length, settings=None, **options):
    return Row(read, read.cuts[length], tuple(ids[length:]), settings, **{"max_new_tokens": NEW, **options})


def plainly(model, ids, cut, policy):
    """The same by the public way: attach, read up to the cut, generate."""
    x = torch.tensor([ids])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 10**6, "pad_token_id": 0}
    chosen = policy.settings("0.3")
    with (
        torch.no_grad(),
        decantkv.attach(
            model,
            chosen.method,
            budget=chosen.budget,
            allocation=chosen.allocation,
            sinks=chosen.sinks,
            rehearsal=chosen.rehearsal,
        ) as run,
    ):
        cache = run.new_cache()
        if cut < len(ids):
            model(x[:, :cut], past_key_values=cache, use_cache=True)
        out = model.generate(x, past_key_values=cache, **options)
    return out[0, len(ids) :].tolist()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("cut", [CUT, PROMPT], ids=["agnostic", "aware"])
def test_rows_answer_as_attach_and_generate_do(model, ids, read, settings, cut):
    rows = [row(read, ids, cut, s) for s in settings.values()]
    answers = RowBatch(model, rows, room=NEW + PROMPT).generate()
    plain = {policy.label: plainly(model, ids, cut, policy) for policy in POLICIES}
    assert dict(zip(plain, answers, strict=True)) == plain
    assert len({tuple(answer) for answer in answers}) > 3  # the policies do differ


@torch.no_grad()
def test_the_full_row_answers_as_the_untouched_model_in_either_regime(model, ids, read):
    x = torch.tensor([ids])
    plain = model.generate(x, max_new_tokens=NEW, do_sample=False, eos_token_id=10**6, pad_token_id=0)[0, PROMPT:]
    rows = [row(read, ids, cut) for cut in (CUT, PROMPT)]
    assert RowBatch(model, rows, room=NEW + PROMPT).generate() == [plain.tolist()] * 2


def test_forced_logits_are_those_of_one_forward_over_prompt_and_continuation(model, ids, read):
    continuation = (5, 77, 130, 9)
    with torch.no_grad():
        whole = model(torch.tensor([[*ids, *continuation]])).logits[0, PROMPT - 1 : -1]
    rows = [row(read, ids, cut) for cut in (CUT, PROMPT)]
    batch = RowBatch(model, rows, room=PROMPT)
    for logits in batch.forced_logits([continuation, continuation]):
        torch.testing.assert_close(logits, whole, atol=2e-4, rtol=1e-4)
    again = batch.forced_logits([continuation[:1], continuation[:1]])  # rewound: nothing of before is left
    for logits in again:
        torch.testing.assert_close(logits, whole[:1], atol=2e-4, rtol=1e-4)
    for one in rows:  # alone as well, and beside shorter ones
        alone = RowBatch(model, [one, one], room=PROMPT).forced_logits([continuation, continuation[:2]])
        torch.testing.assert_close(alone[0], whole, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(alone[1], whole[:2], atol=2e-4, rtol=1e-4)


def test_a_prompt_read_in_small_pieces_is_the_same_prompt(model, ids, read):
    reader = Reader(model, rows=8, memory=1)
    reader.chunk_of = lambda length: 7
    for _ in reader.read(ids, [CUT]):
        pass
    torch.testing.assert_close(reader.reading().next_logits, read.next_logits, atol=1e-4, rtol=1e-4)
    assert Reader(model, rows=8, memory=2**20).chunk_of(10_000) < Reader(model, rows=8, memory=2**32).chunk_of(10_000)


def test_rows_fed_in_pieces_answer_as_those_fed_at_once(model, ids, read, settings, monkeypatch):
    rows = [row(read, ids, CUT, s) for s in settings.values()]
    shorter = [dataclasses.replace(one, rest=one.rest[-3:]) for one in rows[:4]]
    at_once = RowBatch(model, [*rows, *shorter], room=NEW + PROMPT).generate()
    monkeypatch.setattr(rows_of, "FED", 4)
    assert RowBatch(model, [*rows, *shorter], room=NEW + PROMPT).generate() == at_once


def test_copies_share_a_prompt_and_leave_it_as_it_was(model, ids, read, settings):
    before = [x.clone() for layer in read.whole.layers for x in (layer.keys, layer.values)]
    cut, whole = read.cuts[CUT].layers[0], read.whole.layers[0]
    assert cut.keys.data_ptr() == whole.keys.data_ptr()
    rows = [row(read, ids, length, s) for s in settings.values() for length in (CUT, PROMPT)]
    RowBatch(model, rows, room=PROMPT).generate()
    after = [x for layer in read.whole.layers for x in (layer.keys, layer.values)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_stops_end_rows_apart_and_leaving_out_done_rows_changes_nothing(model, ids, read, settings):
    every = list(settings.values())
    free = RowBatch(model, [row(read, ids, PROMPT, s, max_new_tokens=40) for s in every], room=40).generate()
    stops = tuple(answer[4 + 5 * i] for i, answer in enumerate(free[:3]))
    rows = [row(read, ids, PROMPT, s, max_new_tokens=40 if i % 2 else 9, stops=stops) for i, s in enumerate(every)]
    for answer, whole, one in zip(RowBatch(model, rows, room=40).generate(), free, rows, strict=True):
        ends = [i + 1 for i, token in enumerate(whole) if token in stops]
        assert answer == whole[: min([*ends, one.max_new_tokens])]


@pytest.fixture
def attended(monkeypatch):
    """Tokens that each row of each layer's store holds when it is attended to."""
    seen, attend = [], RaggedStore.attend

    def noted(store, q, **options):
        seen.append(store.lens.view(store.batch, -1).sum(1).tolist())
        return attend(store, q, **options)

    monkeypatch.setattr(RaggedStore, "attend", noted)
    return seen


def test_recorded_steps_read_nothing_of_rows_that_are_done(attended, model, ids, read, settings):
    rows = [row(read, ids, PROMPT, s, max_new_tokens=4 + 5 * (i % 2)) for i, s in enumerate(settings.values())]
    RowBatch(model, rows, room=40, graphs=True).generate()
    layers, heads = len(read.whole.layers), read.whole.layers[0].keys.shape[1]
    steps = [attended[at : at + layers] for at in range(0, len(attended), layers)]
    assert len(steps) > 5
    for number, step in enumerate(steps):
        for held in step:
            for one, tokens in zip(rows, held, strict=True):
                going = number < one.max_new_tokens - 1  # the first token was there before
                assert tokens >= 10 * heads if going else tokens == heads


def test_recorded_steps_answer_as_plain_ones(tape, model, ids, read, settings):
    rows = [row(read, ids, PROMPT, s, max_new_tokens=9 + 5 * (i % 3)) for i, s in enumerate(settings.values())]
    plain, trust = RowBatch(model, rows, room=40).generate(), Trust()
    for batches in (1, 2):
        assert RowBatch(model, rows, room=40, graphs=True, trust=trust).generate() == plain
        assert (trust.broken, trust.checked, trust.left) == (None, 2, {})
        assert trust.replayed == batches * 16, "all of 17 steps but the one that takes room"
        assert len(tape) == batches
    quarter = rows[: len(rows) // 4]
    assert RowBatch(model, quarter, room=40, graphs=True, trust=trust).generate() == plain[: len(quarter)]


def test_other_steps_read_no_more_rows_than_twice_those_that_go_on(attended, model, ids, read, settings):
    rows = [row(read, ids, PROMPT, s, max_new_tokens=4 + 3 * i) for i, s in enumerate(settings.values())]
    RowBatch(model, rows, room=60).generate()
    steps = attended[:: len(read.whole.layers)]
    assert len(steps) > 40
    for number, step in enumerate(steps):
        assert len(step) < 2 * sum(number < one.max_new_tokens - 1 for one in rows)


def test_an_answer_may_be_forbidden_to_end_at_once(model, ids, read):
    free = row(read, ids, PROMPT, max_new_tokens=5)
    first = free.first_token()
    bound = row(read, ids, PROMPT, max_new_tokens=5, stops=(first,), answer_first=True)
    later = row(read, ids, CUT, max_new_tokens=5, stops=(first,), answer_first=True)
    answers = RowBatch(model, [bound, later], room=60).generate()
    second = int(read.next_logits.topk(2).indices[1])
    assert [answer[0] for answer in answers] == [second, second]


def test_a_joined_row_holds_what_its_own_copy_holds(model, ids, read, settings):
    names = ("adadropkv", "dropkv", "dropkv[allocation=layer]", "random")
    rows = [row(read, ids, CUT, settings[name]) for name in names]
    rows += [row(read, ids, PROMPT), row(read, ids, PROMPT, bits=4)]
    batch, copies = RowBatch(model, rows, room=PROMPT), {one: one.copy() for one in rows}
    for i, layer in enumerate(evicting_layers(batch.cache)):
        lanes = iter(zip(layer.store.starts.tolist(), layer.store.lens.tolist(), strict=True))
        for one in rows:
            alone = copies[one].stores[i]
            for start, length in zip(alone.starts.tolist(), alone.lens.tolist(), strict=True):
                at, stored = next(lanes)
                assert stored == length
                assert torch.equal(layer.store.keys[at : at + length], alone.keys[start : start + length])
                assert torch.equal(layer.store.values[at : at + length], alone.values[start : start + length])


def test_kept_tokens_are_counted_in_what_is_stored(model, ids, read, settings):
    names = ("adadropkv", "dropkv", "dropkv[allocation=layer]")
    rows = [row(read, ids, CUT, settings[name]) for name in names] + [row(read, ids, PROMPT)]
    batch = RowBatch(model, rows, room=PROMPT)
    lens = torch.stack([layer.store.lens.view(len(rows), -1) for layer in evicting_layers(batch.cache)])
    torch.testing.assert_close(batch.kept, lens.float().mean((0, 2)))
    assert batch.kept.tolist() == pytest.approx([one.stored for one in rows])


@pytest.mark.parametrize("bits", [2, 4])
def test_a_quantised_row_holds_the_prompts_numbers_after_their_round_trip(read, ids, bits):
    for store, prompt in zip(row(read, ids, CUT, bits=bits).copy().stores, read.cuts[CUT].layers, strict=True):
        keys, values, held = store.padded()
        assert bool(held.all())
        assert torch.equal(keys, quantise_keys(prompt.keys, bits))
        assert torch.equal(values, quantise_values(prompt.values, bits))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_quantising_errs_by_half_a_step_at_most(bits):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 3, 100, 16), torch.randn(2, 3, 100, 16)
    keys[:, :, :, 2] *= 50  # a channel of its own size must not spoil the others
    steps = 2**bits - 1
    for group in range(0, 100, 64):
        part = keys[:, :, group : group + 64]
        step = (part.amax(2, keepdim=True) - part.amin(2, keepdim=True)) / steps
        error = (quantise_keys(keys, bits)[:, :, group : group + 64] - part).abs()
        assert bool((error <= 0.51 * step + 2e-3 * part.abs().amax(2, keepdim=True)).all())
    step = (values.amax(3, keepdim=True) - values.amin(3, keepdim=True)) / steps
    error = (quantise_values(values, bits) - values).abs()
    assert bool((error <= 0.51 * step + 2e-3 * values.abs().amax(3, keepdim=True)).all())
    assert bits / 16 < bytes_share(bits, 16) < bits / 16 + 0.1


@pytest.mark.parametrize(
    ("typed", "wrong"),
    [
        ("dropkvv", "did you mean"),
        ("dropkv[widow=3]", "widow"),
        ("dropkv[window]", "OPTION=VALUE"),
        ("quantised-3bit", "quantised-2bit"),
        ("dropkv,dropkv", "each once"),
        ("", "at least one"),
    ],
)
def test_a_method_list_with_a_mistake_is_refused(typed, wrong):
    with pytest.raises((ValueError, TypeError), match=wrong):
        parse_policies(typed)


def test_brackets_hold_options():
    policy = parse_policy("dropkv[pool=avg,window=32,allocation=ada]")
    settings = policy.settings("0.1")
    assert (settings.method.pool, settings.method.window, settings.allocation.name) == ("avg", 32, "ada")
