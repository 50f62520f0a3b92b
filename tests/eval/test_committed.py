"""The committed rows: complete circumstances, and numbers that today's code still gives."""

import json
from pathlib import Path

import pytest

from decantkv.lab.eval.chat import REGIMES, ChatFormat
from decantkv.lab.eval.cli import make_plan
from decantkv.lab.eval.niah import DEPTHS, Grid
from decantkv.lab.eval.presets import PRESETS
from decantkv.lab.eval.results import Store, read_folder
from decantkv.lab.eval.runner import Runner
from decantkv.lab.eval.session import stop_tokens
from decantkv.lab.eval.statistics import tables

RESULTS = Path(__file__).parents[2] / "results" / "eval"
FOLDERS = sorted(file.parent for file in RESULTS.rglob("run.json"))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_number_carries_its_circumstances(folder):
    run, rows = read_folder(folder)
    assert len(run["configuration"]["weights"]) >= 40
    assert run["configuration"]["dtype"]
    assert isinstance(run["configuration"]["seed"], int)
    for session in run["sessions"]:
        assert session["command"].startswith("decantkv eval --model ")
        assert " /" not in session["command"]  # files by their names, not by somebody's folders
        assert session["device"]
        assert {"torch", "transformers"} <= set(session["versions"])
    prompts = {row["prompt"] for row in rows if row["row"] == "prompt"}
    seen = set()
    for row in rows:
        if row["row"] == "answer":
            assert row["prompt"] in prompts
            assert row["regime"] in (*REGIMES, "any")
            assert row["session"] < len(run["sessions"])
            cell = (row["prompt"], row["regime"], row["policy"], row["budget"])
            assert cell not in seen
            seen.add(cell)
    assert tables([{**row, "score": row.get("score", row.get("nll"))} if "kept" in row else row for row in rows])


@pytest.mark.model
def test_the_likelihoods_of_the_regression_are_todays(demo_model, tmp_path):
    """Five of its two hundred prompts, one a depth; `--preset regression` runs them all."""
    model, tokenizer = demo_model
    preset, form = PRESETS["regression"], ChatFormat(tokenizer)
    plan = make_plan(preset.method, preset.budget, preset.regime, likelihood=True, generate=False)
    length = int(preset.length)
    grids = [Grid(length, depth, form.measure(), digits=4) for depth in DEPTHS]
    store = Store(tmp_path, {"x": 1}, {})
    prompts = [(f"niah/{grid.task}/{length}/0", lambda grid=grid: grid.sample(0)) for grid in grids]
    assert Runner(model, form, plan, stops=stop_tokens(model, tokenizer)).run(prompts, store)
    store.close()
    now, then = (
        {(r["prompt"], r["policy"]): r["nll"] for r in read_folder(folder)[1] if r["row"] == "answer"}
        for folder in (tmp_path, RESULTS / "smollm2-regression")
    )
    assert len(now) == 5 * 4
    for key, value in now.items():
        assert value == pytest.approx(then[key], abs=0.02), key


def test_eviction_by_scores_beats_chance_in_the_committed_regression():
    folder = RESULTS / "smollm2-regression"
    _, rows = read_folder(folder)
    assert sum(row["row"] == "prompt" for row in rows) == 200
    found = {s.policy: s for s in tables(rows, measure="nll")[0].summaries}
    assert found["random"].against.low > 0  # likelier answers under dropkv, beyond the interval
    assert found["dropkv"].score.mean > found["dropkv"].full.mean  # and still less likely than with the full cache
    assert json.dumps(sorted(found)) == json.dumps(["dropkv", "random", "snapkv:shared"])
