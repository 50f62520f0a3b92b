"""The rows of one batch give what attach and generate give one at a time."""

import contextlib
import types

import pytest
import torch

import decantkv
from decantkv.cache.stores.ragged import RaggedStore
from decantkv.lab.eval.engine import decoding
from decantkv.lab.eval.engine.keep import choose, score
from decantkv.lab.eval.engine.policy import parse_policies, parse_policy
from decantkv.lab.eval.engine.prompt import Reader
from decantkv.lab.eval.engine.quantise import bytes_share, quantise_keys, quantise_values
from decantkv.lab.eval.engine.rows import Row, RowBatch
from decantkv.selection.selector import Kept

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
def read(model, ids):
    """The prompt read once, and what every policy keeps at both cuts."""
    settings = {policy.label: policy.settings("0.3") for policy in POLICIES}
    needs = frozenset(need for s in settings.values() for need in s.method.needs)
    reader = Reader(
        model,
        rows=max(s.rows for s in settings.values()),
        needs=needs,
        rehearsals=[s.rehearsal for s in settings.values() if s.rehearsal],
    )
    kept = {}
    for cut, windows in reader.read(ids, [CUT, PROMPT]):
        for label, s in settings.items():
            kept[label, cut] = choose(windows, s, score(windows, s))
    return reader.reading(), kept


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
@pytest.mark.parametrize("lanes", [False, True], ids=["masks", "lanes"])
@pytest.mark.parametrize("cut", [CUT, PROMPT], ids=["agnostic", "aware"])
def test_rows_answer_as_attach_and_generate_do(model, ids, read, cut, lanes):
    reading, kept = read
    rows = [Row(reading, cut, tuple(ids[cut:]), kept[p.label, cut], max_new_tokens=NEW) for p in POLICIES]
    answers = RowBatch(model, rows, room=NEW + PROMPT, lanes=lanes).generate()
    plain = {policy.label: plainly(model, ids, cut, policy) for policy in POLICIES}
    assert dict(zip(plain, answers, strict=True)) == plain
    assert len({tuple(answer) for answer in answers}) > 3  # the policies do differ


@torch.no_grad()
def test_the_full_row_answers_as_the_untouched_model_in_either_regime(model, ids, read):
    x = torch.tensor([ids])
    plain = model.generate(x, max_new_tokens=NEW, do_sample=False, eos_token_id=10**6, pad_token_id=0)[0, PROMPT:]
    rows = [Row(read[0], cut, tuple(ids[cut:]), max_new_tokens=NEW) for cut in (CUT, PROMPT)]
    assert RowBatch(model, rows, room=NEW + PROMPT).generate() == [plain.tolist()] * 2


def test_lanes_hold_what_is_shown_in_its_order_whatever_lies_between(model, ids, read):
    reading, kept = read
    pairs = [("adadropkv", CUT), ("dropkv", PROMPT), ("dropkv[allocation=layer]", CUT), ("random", CUT)]
    rows = [
        Row(reading, cut, tuple(ids[cut : PROMPT - i]), kept[name, cut], max_new_tokens=NEW)
        for i, (name, cut) in enumerate(pairs)
    ]
    batch = RowBatch(model, rows, room=PROMPT, lanes=True)
    batch.feed([row.rest or (7,) for row in rows])
    shown = [s.expand(len(rows), reading.keys[0].shape[1], -1) for s in batch.shown]
    wanted = [
        [layer.keys[r, h][s[r, h]] for r in range(len(rows)) for h in range(s.shape[1])]
        for layer, s in zip(batch.cache.layers, shown, strict=True)
    ]
    batch.close_gaps(5)
    assert len({len(lane) for lane in wanted[0]}) > 3
    for store, lanes in zip(batch.stores, wanted, strict=True):
        assert store.lens.tolist() == [len(lane) for lane in lanes]
        for start, lane in zip(store.starts.tolist(), lanes, strict=True):
            assert torch.equal(store.keys[start : start + len(lane)], lane)


def test_forced_logits_are_those_of_one_forward_over_prompt_and_continuation(model, ids, read):
    continuation = (5, 77, 130, 9)
    with torch.no_grad():
        whole = model(torch.tensor([[*ids, *continuation]])).logits[0, PROMPT - 1 : -1]
    rows = [Row(read[0], cut, tuple(ids[cut:])) for cut in (CUT, PROMPT)]
    batch = RowBatch(model, rows, room=PROMPT)
    for logits in batch.forced_logits([continuation, continuation]):
        torch.testing.assert_close(logits, whole, atol=2e-4, rtol=1e-4)
    again = batch.forced_logits([continuation[:1], continuation[:1]])  # rewound: nothing of before is left
    for logits in again:
        torch.testing.assert_close(logits, whole[:1], atol=2e-4, rtol=1e-4)
    for row in rows:  # alone as well, and beside shorter ones
        alone = RowBatch(model, [row, row], room=PROMPT).forced_logits([continuation, continuation[:2]])
        torch.testing.assert_close(alone[0], whole, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(alone[1], whole[:2], atol=2e-4, rtol=1e-4)


def test_a_prompt_read_in_small_pieces_is_the_same_prompt(model, ids, read):
    reader = Reader(model, rows=8, memory=1)
    reader.chunk_of = lambda length: 7
    for _ in reader.read(ids, [CUT]):
        pass
    torch.testing.assert_close(reader.reading().next_logits, read[0].next_logits, atol=1e-4, rtol=1e-4)
    assert Reader(model, rows=8, memory=2**20).chunk_of(10_000) < Reader(model, rows=8, memory=2**32).chunk_of(10_000)


def test_masked_keys_have_no_influence_whatever_they_hold(model, ids, read):
    reading, kept = read
    rows = [Row(reading, PROMPT, (), kept[name, PROMPT], max_new_tokens=NEW) for name in ("adadropkv", "dropkv")]
    clean = RowBatch(model, rows, room=NEW).generate()
    batch = RowBatch(model, rows, room=NEW)
    for layer, shown in zip(batch.cache.layers, batch.shown, strict=True):
        hidden = ~shown.expand(-1, layer.keys.shape[1], -1)
        layer.keys[hidden] = 1e4
        layer.values[hidden] = -1e4
    assert batch.generate() == clean


def test_stops_end_rows_apart_and_dropping_done_rows_changes_nothing(model, ids, read):
    reading, kept = read
    free = RowBatch(model, [Row(reading, PROMPT, (), k, max_new_tokens=40) for k in kept_at(kept)], room=40).generate()
    stops = [answer[4 + 5 * i] for i, answer in enumerate(free[:3])]
    rows = [
        Row(reading, PROMPT, (), k, max_new_tokens=40 if i % 2 else 9, stops=tuple(stops))
        for i, k in enumerate(kept_at(kept))
    ]
    for lanes in (False, True):
        for answer, whole, row in zip(RowBatch(model, rows, room=40, lanes=lanes).generate(), free, rows, strict=True):
            ends = [i + 1 for i, token in enumerate(whole) if token in stops]
            assert answer == whole[: min([*ends, row.max_new_tokens])]


def test_steps_read_nothing_of_rows_that_are_done(monkeypatch, model, ids, read):
    reading, kept = read
    rows = [Row(reading, PROMPT, (), k, max_new_tokens=4 + 5 * (i % 2)) for i, k in enumerate(kept_at(kept))]
    attended, attend = [], RaggedStore.attend

    def noted(store, q, **options):
        attended.append(store.lens.view(store.batch, -1).sum(1).tolist())
        return attend(store, q, **options)

    monkeypatch.setattr(RaggedStore, "attend", noted)
    RowBatch(model, rows, room=40, lanes=True).generate()
    layers, heads = len(reading.keys), reading.keys[0].shape[1]
    steps = [attended[at : at + layers] for at in range(0, len(attended), layers)]
    assert len(steps) > 5
    for number, step in enumerate(steps):
        for held in step:
            for row, tokens in zip(rows, held, strict=True):
                going = number < row.max_new_tokens - 2  # the first two tokens were there before
                assert tokens > 10 * heads if going else tokens == heads


def kept_at(kept):
    return [choice for (_, cut), choice in kept.items() if cut == PROMPT]


def test_an_answer_may_be_forbidden_to_end_at_once(model, ids, read):
    free = Row(read[0], PROMPT, (), max_new_tokens=5)
    first = free.first_token()
    bound = Row(read[0], PROMPT, (), max_new_tokens=5, stops=(first,), answer_first=True)
    later = Row(read[0], CUT, tuple(ids[CUT:]), max_new_tokens=5, stops=(first,), answer_first=True)
    answers = RowBatch(model, [bound, later], room=60).generate()
    second = int(read[0].next_logits.topk(2).indices[1])
    assert [answer[0] for answer in answers] == [second, second]


def test_a_ragged_choice_shows_each_head_its_own_tokens(model, read):
    layers = len(read[0].keys)
    indices = torch.tensor([[[-1, -1, 3], [1, 2, 8]]]).expand(layers, -1, -1)
    kept = Kept(indices, torch.tensor([[1, 3]]).expand(layers, -1))
    batch = RowBatch(model, [Row(read[0], PROMPT, (), kept)], room=4)
    shown = batch.shown[0][0, :, :3].tolist()
    assert shown == [[False, False, True], [True, True, True]]
    for layer in range(layers):
        torch.testing.assert_close(batch.cache.layers[layer].keys[0, 1, 1], read[0].keys[layer][0, 1, 2])


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


@pytest.mark.parametrize("new", [1, 2, 4, 5, 12])
def test_a_captured_step_takes_the_place_of_plain_ones(model, read, new, monkeypatch):
    """Rehearsed without a GPU: a graph that repeats the step; capturing it does nothing, warming it up is a step."""
    rows = [Row(read[0], PROMPT, (), k, max_new_tokens=new) for k in kept_at(read[1])]
    plain = RowBatch(model, rows, room=NEW).generate()
    step, ran = decoding.Decoder._step, {"captured": 0, "stepped": 0}
    recording = []

    def stepping(self):
        if recording:
            graph = recording[-1]
            graph.replay = lambda: stepping(self)
            ran["captured"] += 1
            return
        ran["stepped"] += 1
        step(self)

    @contextlib.contextmanager
    def capture(device):
        recording.append(types.SimpleNamespace())
        yield recording[-1]
        recording.clear()

    side = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(decoding.Decoder, "_step", stepping)
    monkeypatch.setattr(decoding, "capture_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(decoding, "capturing", capture)
    assert RowBatch(model, rows, room=NEW, graphs=True).generate() == plain
    # the first token is the prompt's own, the second comes of feeding it: steps make the others
    assert ran == {"captured": int(new - 2 > decoding.FEW), "stepped": max(new - 2, 0)}
