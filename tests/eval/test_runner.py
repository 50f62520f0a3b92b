"""Running, stopping, going on: every cell once, whatever happens in between."""

import gc
import json
import time
import weakref

import pytest
import torch

from decantkv.lab.eval import metrics
from decantkv.lab.eval import runner as runner_module
from decantkv.lab.eval.chat import ChatFormat
from decantkv.lab.eval.cli import make_plan
from decantkv.lab.eval.engine.quantise import bytes_share
from decantkv.lab.eval.engine.reading import Cut
from decantkv.lab.eval.results import ROWS, RUN, Store, pack, read_folder, read_rows
from decantkv.lab.eval.ruler import Series, Sources
from decantkv.lab.eval.runner import Runner

CONFIGURATION = {"model": "tiny", "seed": 42}
PLAN = make_plan("dropkv,random,quantised-4bit", "0.2,40", "aware,aware-question,agnostic")


@pytest.fixture(scope="module")
def form(tokenizer):
    return ChatFormat(tokenizer)


def prompts(form, count=2, tasks=("niah_single_1", "vt")):
    made = []
    for task in tasks:
        series = Series(task, 1500, Sources(), measure=form.measure(), count_tokens=form.count)
        for index in range(count):
            made.append((f"ruler/{task}/1500/{index}", lambda s=series, i=index: s.sample(i)))
    return made


def run(model, form, folder, plan=PLAN, count=2, **options):
    store = Store(folder, CONFIGURATION, {"command": "test"})
    try:
        return Runner(model, form, plan, stops=(0,), memory=2**30, **options).run(prompts(form, count), store)
    finally:
        store.close()


def answers(folder):
    _, rows = read_folder(folder)
    found = [row for row in rows if row["row"] == "answer"]
    return {(r["prompt"], r["regime"], r["policy"], r["budget"]): r for r in found}, len(found)


@pytest.fixture(scope="module")
def whole(model, form, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert run(model, form, folder)
    return folder


def test_every_cell_is_there_once_and_scored_by_the_suites_metric(whole, form):
    cells, lines = answers(whole)
    assert lines == len(cells) == 4 * (1 + 3 * (2 * 2 + 1))
    made = {key: make() for key, make in prompts(form)}
    for (prompt, *_), row in cells.items():
        assert row["score"] == pytest.approx(metrics.score(made[prompt], row["answer"]), abs=1e-4)
        assert 1 <= row["new_tokens"] <= made[prompt].max_new_tokens
    _, rows = read_folder(whole)
    tokens = {row["prompt"]: row for row in rows if row["row"] == "prompt"}
    assert len(tokens) == 4
    for (prompt, regime, policy, budget), row in cells.items():
        length = tokens[prompt]["context_tokens" if regime == "agnostic" else "tokens"]
        if regime == "aware" or regime == "agnostic":
            wanted = {"0.2": int(length * 0.2) / length, "40": 40 / length, "1": 1.0, "-": 1.0}[budget]
            assert row["kept"] == pytest.approx(wanted, abs=1e-4)
        wanted = bytes_share(4, 16) if policy == "quantised-4bit" else row["kept"]
        assert row["bytes"] == pytest.approx(wanted, abs=1e-4)


def test_one_row_at_a_time_gives_the_same_rows(whole, model, form, tmp_path):
    assert run(model, form, tmp_path, plan=make_plan("dropkv", "0.2", "aware,agnostic"), count=1, max_rows=1)
    together = answers(whole)[0]
    for key, row in answers(tmp_path)[0].items():
        assert row["answer"] == together[key]["answer"]


def test_without_memory_for_a_batch_it_goes_on_in_halves(whole, model, form, tmp_path, monkeypatch):
    batches, measure = [], Runner._measure

    def tight(self, batch):
        batches.append(len(batch))
        if len(batch) > 5:
            raise torch.OutOfMemoryError
        return measure(self, batch)

    monkeypatch.setattr(Runner, "_measure", tight)
    assert run(model, form, tmp_path)
    assert max(batches) > 5 >= max(batches[-3:])
    assert answers(tmp_path) == answers(whole)


def test_without_memory_for_a_single_row_it_waits_for_others(whole, model, form, tmp_path, monkeypatch):
    pauses, tries, measure = [], [], Runner._measure

    def tight(self, batch):
        tries.append(len(batch))
        if len(batch) > 1 or tries.count(1) < 4:
            raise torch.OutOfMemoryError("others hold it")
        return measure(self, batch)

    monkeypatch.setattr(runner_module.time, "sleep", pauses.append)
    monkeypatch.setattr(Runner, "_measure", tight)
    assert run(model, form, tmp_path)
    assert pauses == [0, 5, 15]
    assert answers(tmp_path) == answers(whole)
    monkeypatch.setattr(Runner, "_measure", lambda *a: (_ for _ in ()).throw(torch.OutOfMemoryError("too long")))
    with pytest.raises(torch.OutOfMemoryError, match="too long"):
        run(model, form, tmp_path / "never")


def test_a_prompt_that_failed_half_way_leaves_nothing_behind(model, form, tmp_path, monkeypatch):
    held, keys, score, finish = [], [], Cut.score, Runner._finish

    def tight(self, settings):
        keys.append(weakref.ref(self.layers[0].keys))
        if len(keys) == 1:
            raise torch.OutOfMemoryError
        return score(self, settings)

    def watched(self, jobs, *rest):
        held.append([ref() is not None for ref in keys])
        return finish(self, jobs, *rest)

    monkeypatch.setattr(Cut, "score", tight)
    monkeypatch.setattr(Runner, "_finish", watched)
    gc.collect()
    gc.disable()  # memory goes at once, not with the next collection
    try:
        assert run(model, form, tmp_path, count=1)
    finally:
        gc.enable()
    assert held[0] == [False], "while what waits is finished"


def test_without_memory_for_a_prompt_it_finishes_what_waits_and_tries_again(whole, model, form, tmp_path, monkeypatch):
    pauses, tries, read, finish, finished = [], [], Runner._read, Runner._finish, []

    def tight(self, sample, missing):
        tries.append(sample.key)
        if tries.count(sample.key) < 4:
            raise torch.OutOfMemoryError
        return read(self, sample, missing)

    monkeypatch.setattr(runner_module.time, "sleep", pauses.append)
    monkeypatch.setattr(Runner, "_read", tight)
    monkeypatch.setattr(Runner, "_finish", lambda self, jobs, *a: finished.append(len(jobs)) or finish(self, jobs, *a))
    assert run(model, form, tmp_path)
    assert answers(tmp_path) == answers(whole)
    assert pauses == [0, 5, 15] * len(set(tries))
    assert finished == [0] + [1] * len(set(tries)), "what waited was let go before the next attempt"
    monkeypatch.setattr(Runner, "_read", lambda *a: (_ for _ in ()).throw(torch.OutOfMemoryError("too long")))
    with pytest.raises(torch.OutOfMemoryError, match="too long"):
        run(model, form, tmp_path / "never")


def test_a_finished_run_does_nothing_and_more_of_anything_adds_only_that(whole, model, form, tmp_path):
    folder = tmp_path / "grown"
    small = make_plan("dropkv", "0.2", "aware")
    assert run(model, form, folder, plan=small, count=1)
    before = (folder / ROWS).read_bytes()
    assert run(model, form, folder, plan=small, count=1)
    assert (folder / ROWS).read_bytes() == before
    assert run(model, form, folder)
    assert (folder / ROWS).read_bytes().startswith(before)
    grown, lines = answers(folder)
    assert lines == len(grown)
    assert {k: r["answer"] for k, r in grown.items()} == {k: r["answer"] for k, r in answers(whole)[0].items()}


def test_a_killed_run_loses_half_a_line_and_repeats_nothing_else(whole, model, form, tmp_path):
    lines = (whole / ROWS).read_bytes().splitlines(keepends=True)
    (tmp_path / RUN).write_bytes((whole / RUN).read_bytes())
    kept = lines[: len(lines) // 2]
    (tmp_path / ROWS).write_bytes(b"".join(kept) + lines[len(kept)][:25])
    assert run(model, form, tmp_path)
    assert (tmp_path / ROWS).read_bytes().startswith(b"".join(kept))
    found, count = answers(tmp_path)
    assert count == len(found)
    assert {k: r["answer"] for k, r in found.items()} == {k: r["answer"] for k, r in answers(whole)[0].items()}


def test_a_deadline_stops_between_prompts_and_the_rest_follows(model, form, tmp_path):
    store = Store(tmp_path, CONFIGURATION, {})
    runner = Runner(model, form, make_plan("random", "0.2", "aware"), stops=(0,), memory=2**30)
    made = prompts(form)
    assert not runner.run(made, store, deadline=time.monotonic() - 1)
    seen = []
    slow = [(key, lambda m=make: (seen.append(1), m())[1]) for key, make in made]
    assert runner.run(slow, store)
    assert runner.run(slow, store)  # nothing is made a second time
    store.close()
    assert len(seen) == 4


def test_samples_are_made_in_turn_a_few_ahead_and_no_more_when_nobody_waits():
    made = []
    undone = ((lambda i=i: made.append(i) or i, [i]) for i in range(60))
    samples = runner_module._made_ahead(undone)
    assert [next(samples) for _ in range(3)] == [(i, [i]) for i in range(3)]
    samples.close()
    assert made == list(range(len(made)))
    assert 3 <= len(made) <= 3 + runner_module.AHEAD
    assert [i for i, _ in runner_module._made_ahead((lambda i=i: i, []) for i in range(40))] == list(range(40))


def test_prompts_wait_for_each_other_and_answer_alike(whole, model, form, tmp_path, monkeypatch):
    read, decoded = [], []
    reads, measure = Runner._read, Runner._measure
    monkeypatch.setattr(Runner, "_read", lambda self, *a: read.append(1) or reads(self, *a))
    monkeypatch.setattr(
        Runner,
        "_measure",
        lambda self, batch: decoded.append((len(read), {e.cell.prompt for e in batch})) or measure(self, batch),
    )
    store = Store(tmp_path, CONFIGURATION, {"command": "test"})
    runner = Runner(model, form, PLAN, stops=(0,), memory=2**30)
    runner.max_waiting = 10**6
    assert runner.run(prompts(form), store)
    store.close()
    assert decoded[0][0] == 4  # all were read before the first was decoded
    assert max(len(asked) for _, asked in decoded) == 4
    assert answers(tmp_path) == answers(whole)


def test_packed_rows_are_read_and_gone_on_with(whole, model, form, tmp_path):
    for name in (ROWS, RUN):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    packed = pack(tmp_path)
    assert not (tmp_path / ROWS).exists()
    assert packed.stat().st_size < (whole / ROWS).stat().st_size / 2
    assert answers(tmp_path) == answers(whole)
    assert run(model, form, tmp_path)
    assert (tmp_path / ROWS).read_bytes() == (whole / ROWS).read_bytes()


def test_likelihood_is_of_the_references(model, form, tmp_path):
    plan = make_plan("dropkv", "1.0", "aware,agnostic", likelihood=True, generate=False)
    assert run(model, form, tmp_path, plan=plan, count=1)
    cells, _ = answers(tmp_path)
    by_prompt = {}
    for (prompt, *_), row in cells.items():
        assert "answer" not in row
        by_prompt.setdefault(prompt, set()).add(round(row["nll"], 3))
    assert all(len(values) == 1 for values in by_prompt.values())  # budget 1 is the full cache in either regime


def test_rows_of_another_configuration_are_never_mixed_in(whole, tmp_path):
    with pytest.raises(ValueError, match=r"seed: there 42, here 43"):
        Store(whole, {**CONFIGURATION, "seed": 43}, {})
    foreign = json.loads((whole / ROWS).read_text().splitlines()[3])
    (tmp_path / RUN).write_bytes((whole / RUN).read_bytes())
    (tmp_path / ROWS).write_text(json.dumps({**foreign, "config": "0" * 12}) + "\n")
    with pytest.raises(ValueError, match=r"line 1.*000000000000"):
        Store(tmp_path, CONFIGURATION, {})
    (tmp_path / RUN).unlink()
    with pytest.raises(ValueError, match=r"run\.json"):
        Store(tmp_path, CONFIGURATION, {})


@pytest.mark.parametrize("broken", ["{not json", '{"row":"answer"}', '{"row":"poem","prompt":"x"}', "[1]"])
def test_a_broken_line_is_named(broken, tmp_path):
    file = tmp_path / ROWS
    file.write_text('{"row":"prompt","prompt":"a","config":"x"}\n' + broken + "\n")
    with pytest.raises(ValueError, match="line 2"):
        list(read_rows(file))


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (("dropkv", "1.5", "aware"), "budget"),
        (("dropkv", "some", "aware"), "budget"),
        (("dropkv", "0.1", "unaware"), "regime: expected one of aware"),
        (("nothing", "0.1", "aware"), "method"),
    ],
)
def test_a_plan_with_a_mistake_is_refused(arguments, wrong):
    with pytest.raises(ValueError, match=wrong):
        make_plan(*arguments)
