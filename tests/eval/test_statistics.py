"""Intervals that cover, comparisons that are paired, averages that say what they leave out."""

import numpy as np
import pytest
from scipy import stats

from decantkv.lab.eval.bootstrap import RESAMPLES, Bootstrap, Interval, holm, paired, student
from decantkv.lab.eval.show import print_best, print_tables
from decantkv.lab.eval.statistics import best_on_the_other_half, losing_share, tables


def rows_of(scores, *, task="t", length=100, regime="aware", policy="dropkv", budget="0.1", prompts=False, **extra):
    rows = []
    for i, score in enumerate(scores):
        key = f"s/{task}/{length}/{i}"
        if prompts:
            rows.append({"row": "prompt", "prompt": key, "task": task, "length": length})
        rows.append(
            {
                "row": "answer",
                "prompt": key,
                "regime": regime,
                "policy": policy,
                "budget": budget,
                "score": score,
                "kept": 0.1,
                "bytes": 0.1,
                "new_tokens": 10,
                **extra,
            }
        )
    return rows


def full(scores, **where):
    return rows_of(scores, regime="any", policy="full", budget="1", prompts=True, **where)


def test_the_bootstrap_interval_is_about_two_standard_errors_wide():
    rng = np.random.default_rng(1)
    values = rng.normal(0.5, 0.1, 400)
    found = Bootstrap({"t": [str(i) for i in range(400)]}).interval({str(i): v for i, v in enumerate(values)})
    error = values.std() / 20
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(values.mean() + 1.96 * error, abs=0.15 * error)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(2)
    hits = 0
    for _ in range(200):
        values = rng.random(40) < 0.7
        found = Bootstrap({"t": [str(i) for i in range(40)]}).interval({str(i): float(v) for i, v in enumerate(values)})
        hits += found.low <= 0.7 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def one_by_one(groups, values):
    """A bootstrap without any matrix: draw, look up, average."""
    rng = np.random.default_rng(0)
    whole = np.zeros(RESAMPLES)
    for keys in groups.values():
        draws = rng.integers(0, len(keys), size=(RESAMPLES, len(keys)))
        whole += [np.mean([values[keys[i]] for i in draw]) for draw in draws.tolist()]
    mean = np.mean([np.mean([values[key] for key in keys]) for keys in groups.values()])
    return (mean, *np.percentile(whole / len(groups), [2.5, 97.5]))


def test_intervals_are_those_of_a_plain_loop():
    rng = np.random.default_rng(4)
    groups = {task: [f"s/{task}/1/{i}" for i in range(n)] for task, n in (("a", 30), ("b", 42), ("c", 31))}
    values = {key: rng.random() for keys in groups.values() for key in keys}
    found = Bootstrap(groups).interval(values)
    assert (found.mean, found.low, found.high) == pytest.approx(one_by_one(groups, values), abs=1e-12)
    rows = [row for task, keys in groups.items() for row in full([1.0] * len(keys), task=task, length=1)]
    for task, keys in groups.items():
        rows += rows_of([values[key] for key in keys], task=task, length=1)
    (summary,) = tables(rows)[0].summaries
    assert (summary.score.low, summary.score.high) == pytest.approx((found.low, found.high), abs=1e-12)
    alone = summary.by_task["a"][0]
    assert (alone.mean, alone.low, alone.high) == pytest.approx(one_by_one({"a": groups["a"]}, values), abs=1e-12)


def test_few_prompts_get_students_interval():
    rng = np.random.default_rng(6)
    values = {str(i): rng.random() for i in range(9)}
    found = Bootstrap({"t": list(values)}).interval(values)
    there = stats.ttest_1samp(list(values.values()), 0.0)
    assert (found.low, found.high) == pytest.approx(tuple(there.confidence_interval(0.95)))
    assert found.p == pytest.approx(there.pvalue)


def test_two_tasks_of_few_prompts_get_welchs_interval():
    rng = np.random.default_rng(7)
    one, other = rng.random(7), 3 * rng.random(12)
    found = student([one[None], -other[None]])[0]  # a mean over two tasks is half of a difference
    there = stats.ttest_ind(one, other, equal_var=False)
    ends = there.confidence_interval(0.95)
    assert (2 * found.low, 2 * found.high) == pytest.approx((ends.low, ends.high))
    assert found.p == pytest.approx(there.pvalue)


def test_intervals_of_eight_prompts_per_task_cover_the_truth():
    rng = np.random.default_rng(8)
    groups = {task: [f"{task}{i}" for i in range(8)] for task in "abcde"}
    chances = dict(zip(groups, (0.2, 0.5, 0.6, 0.8, 0.95), strict=True))
    hits = 0
    for _ in range(400):
        values = {key: float(rng.random() < chances[task]) for task, keys in groups.items() for key in keys}
        found = Bootstrap(groups).interval(values)
        hits += found.low <= np.mean(list(chances.values())) <= found.high
    assert 0.925 <= hits / 400 <= 0.985


def test_a_task_of_one_prompt_takes_the_others_spread():
    lone = student([np.array([[0.0, 1.0, 0.0, 1.0]]), np.array([[1.0]])])[0]
    assert lone.mean == 0.75
    assert lone.low < 0.5
    assert student([np.array([[1.0]])])[0].high == np.inf


def test_holm_keeps_fewer_than_the_intervals_do():
    clear = [Interval(1.0, 0.1, 1.9, p) for p in (0.001, 0.02, 0.03, 0.04)]
    assert holm(clear) == [True, False, False, False]
    assert holm([clear[0], Interval(0.0, -1.0, 1.0, 0.9)]) == [True, False]
    assert holm([Interval(1.0, -0.1, 2.1, 0.001)]) == [False]
    assert holm([]) == []


def test_summaries_are_judged_by_their_own_scale():
    rows = full([0.24] * 3, task="report") + full([0.24] * 3, task="hard") + full([0.05] * 3, task="wrong")
    for row in rows:
        if row["row"] == "prompt" and row["task"] != "hard":
            row["metric"] = "rouge_l"
    rows += [row for task in ("report", "hard", "wrong") for row in rows_of([0.1] * 3, task=task)]
    (table,) = tables(rows)
    assert set(table.left_out) == {"hard", "wrong"}
    assert table.prompts == 3


def test_all_lengths_average_over_the_same_tasks():
    rows = []
    for length, hard in ((100, 0.9), (200, 0.1)):
        rows += full([1.0] * 2, task="easy", length=length) + full([hard] * 2, task="hard", length=length)
        rows += rows_of([0.5] * 2, task="easy", length=length) + rows_of([0.0] * 2, task="hard", length=length)
    short, long = tables(rows)
    assert (short.full.mean, long.full.mean) == (1.0, 1.0)
    assert short.left_out == {"hard": 0.9}


def test_averages_also_stand_without_the_tasks_of_one_repeated_line(capsys):
    rows = []
    for task, mine, theirs in (("niah_single_1", 1.0, 0.0), ("vt", 1.0, 0.0), ("qa_1", 0.5, 0.5)):
        rows += full([1.0] * 4, task=task) + rows_of([mine] * 4, task=task)
        rows += rows_of([theirs] * 4, task=task, policy="snapkv")
    configuration = dict.fromkeys(("suite", "model", "dtype", "device", "note"), "x") | {"yarn": 1.0}
    print_tables({"configuration": configuration}, rows)
    printed = capsys.readouterr().out
    snapkv = tables(rows)[0].summaries[1]
    assert snapkv.against.mean == pytest.approx(-2 / 3)
    assert snapkv.without[1].mean == 0.0
    assert "without niah_single_1, vt" in printed
    assert "0.500, +0.000" in printed
    assert "-0.667 [-0.667, -0.667]**" in printed


def test_the_best_is_chosen_on_prompts_that_it_shares_with_the_reference():
    rows = full([1.0] * 20) + rows_of([0.0] * 10 + [1.0] * 10)
    rows += rows_of([0.5] * 10, policy="few")  # ahead of the reference on the hard half that both have
    rows += rows_of([0.1] * 10 + [1.0] * 10, policy="whole")
    (best,) = best_on_the_other_half(rows)
    assert best.policy == "few"
    assert best.against.mean == 0.5


def test_both_halves_of_the_prompts_average_over_the_same_tasks():
    rows = full([1.0] * 8, task="easy") + full([0.5, 0.0] * 4, task="edge")  # a quarter on the whole, half on one half
    rows += rows_of([0.5] * 8, task="easy") + rows_of([0.0] * 8, task="edge")
    rows += rows_of([0.4] * 8, task="easy", policy="other") + rows_of([1.0] * 8, task="edge", policy="other")
    (best,) = best_on_the_other_half(rows)
    assert best.policy == "dropkv"
    assert best.unseen.mean == 0.5


def test_pairs_are_compared_on_the_prompts_that_both_have():
    rng = np.random.default_rng(5)
    task_of = {f"s/{task}/1/{i}": task for task in ("a", "b") for i in range(90)}
    every = {name: {key: rng.random() for key in task_of} for name in ("x", "y", "z")}
    every["z"] = {key: value for key, value in every["z"].items() if key < "s/b/1/5"}
    every["none"] = {"s/unknown/1/0": 1.0}
    found = paired(every, task_of)
    assert list(found) == [("x", "y"), ("x", "z"), ("y", "z")]
    for (one, other), interval in found.items():
        keys = sorted(every[one].keys() & every[other].keys())
        groups = {task: [key for key in keys if task_of[key] == task] for task in ("a", "b")}
        plain = one_by_one(groups, {key: every[one][key] - every[other][key] for key in keys})
        assert (interval.mean, interval.low, interval.high) == pytest.approx(plain, abs=1e-12)


def test_rounding_never_clears_zero():
    task_of = {f"s/{task}/1/{i}": task for task in "abc" for i in range(30)}
    values = {"one": dict.fromkeys(task_of, 0.1 + 0.2), "other": dict.fromkeys(task_of, 0.3)}
    values["lucky"] = {key: 0.3 if key.endswith("/29") else 0.0 for key in task_of}
    values["none"] = dict.fromkeys(task_of, 0.0)
    found = paired(values, task_of)
    assert values["one"] != values["other"]
    assert (found["one", "other"].low, found["one", "other"].high) == (0.0, 0.0)
    assert found["lucky", "none"].low == 0.0 < found["lucky", "none"].high  # one resample in 25 has none of the three


def test_the_average_is_over_tasks_not_prompts():
    rows = full([1.0] * 10, task="many") + full([1.0] * 2, task="few")
    rows += rows_of([1.0] * 10, task="many") + rows_of([0.0, 0.0], task="few")
    (table,) = tables(rows)
    (summary,) = table.summaries
    assert summary.score.mean == 0.5
    assert summary.worst == "few"
    assert summary.prompts == 12


def test_a_paired_difference_is_tighter_than_the_two_scores_are():
    rng = np.random.default_rng(3)
    hard = rng.random(100)
    rows = full([1.0] * 100) + rows_of(list(hard), policy="dropkv") + rows_of(list(hard - 0.01), policy="snapkv")
    (table,) = tables(rows)
    mine, theirs = table.summaries
    assert mine.against is None
    assert theirs.against.mean == pytest.approx(-0.01)
    assert theirs.against.high - theirs.against.low < 1e-6 < mine.score.high - mine.score.low


def test_a_comparison_counts_only_prompts_that_both_have():
    rows = full([1.0] * 4) + rows_of([1.0, 0.0, 1.0, 1.0], policy="dropkv") + rows_of([1.0, 1.0], policy="snapkv")
    (table,) = tables(rows)
    assert table.summaries[1].against.mean == 0.5
    assert table.summaries[1].full.mean == 1.0
    assert table.summaries[1].prompts == 2


def test_tasks_that_the_full_cache_fails_are_left_out_and_named():
    rows = full([1.0, 1.0], task="easy") + full([0.2, 0.0], task="hard")
    rows += rows_of([0.5, 0.5], task="easy") + rows_of([1.0, 1.0], task="hard")
    (table,) = tables(rows)
    assert table.left_out == {"hard": 0.1}
    assert table.summaries[0].score.mean == 0.5
    assert table.full.mean == 1.0


def test_a_method_that_was_only_begun_gets_no_line(capsys):
    rows = full([1.0] * 30) + rows_of([0.5] * 3) + rows_of([1.0] * 2, policy="snapkv")
    (table,) = tables(rows)
    assert [s.policy for s in table.summaries] == ["dropkv"]
    assert table.begun == ("snapkv",)
    configuration = {"suite": "s", "model": "m", "dtype": "d", "device": "cpu", "note": "", "yarn": 1.0}
    print_tables({"configuration": configuration}, rows)
    assert "begun, on fewer than a tenth of the prompts: snapkv" in capsys.readouterr().out


def test_losing_drift_and_likelihood():
    rows = full([1.0, 0.5, 0.0], nll=1.0) + rows_of([0.89, 0.46, 0.0], nll=1.5)
    rows[-1]["new_tokens"] = 13
    summary = tables(rows)[0].summaries[0]
    assert summary.losing == 0.5  # one of the two prompts that had anything to lose
    assert losing_share({"a": 0.0}, {"a": 0.0}) == 0.0
    assert summary.drift == 1.0
    assert summary.nll.mean == pytest.approx(0.5)


def test_lengths_and_regimes_are_never_merged():
    rows = full([1.0], length=100) + full([1.0], length=200)
    for length in (100, 200):
        for regime in ("aware", "agnostic"):
            rows += rows_of([0.3 if regime == "agnostic" else 0.9], length=length, regime=regime)
    found = {(s.length, s.regime): s.score.mean for table in tables(rows) for s in table.summaries}
    assert found == {(n, r): v for n in (100, 200) for r, v in (("aware", 0.9), ("agnostic", 0.3))}


def test_without_the_full_cache_there_is_no_table():
    with pytest.raises(ValueError, match="full cache"):
        tables(rows_of([1.0]))


def test_the_best_is_chosen_on_one_half_and_reported_on_the_other():
    even_good, odd_good = [1.0, 0.0] * 10, [0.0, 1.0] * 10
    rows = full([1.0] * 20) + rows_of(even_good, policy="lucky") + rows_of([0.5] * 20, policy="dropkv")
    (best,) = best_on_the_other_half(rows)
    assert (best.policy, best.seen.mean, best.unseen.mean, best.against.mean) == ("lucky", 1.0, 0.0, -0.5)
    rows = full([1.0] * 20) + rows_of(odd_good, policy="unlucky") + rows_of([0.5] * 20, policy="dropkv")
    (best,) = best_on_the_other_half(rows)
    assert (best.policy, best.against) == ("dropkv", None)


def test_of_likelihoods_the_lowest_is_the_best():
    rows = full([1.0] * 4, nll=0.1) + rows_of([0.0] * 4, nll=0.3, policy="near") + rows_of([0.0] * 4, nll=2.0)
    (best,) = best_on_the_other_half(rows, measure="nll")
    assert (best.policy, best.unseen.mean) == ("near", pytest.approx(0.3))
    assert best.against.mean == pytest.approx(-1.7)


def test_a_printed_label_keeps_its_options(capsys):
    run = {"configuration": {"suite": "niah", "model": "m", "dtype": "float32", "device": "cpu", "note": "", "yarn": 1}}
    rows = full([1.0] * 4) + rows_of([0.5] * 4, policy="dropkv[pool=avg]") + rows_of([0.2] * 4, policy="dropkv")
    print_tables(run, rows)
    print_best(run, rows)
    assert capsys.readouterr().out.count("dropkv[pool=avg]") == 2
