"""The suites without published data: needles on a grid, fidelity; and the command line around all of them."""

import json
import re

import pytest
import torch
import typer
from typer.testing import CliRunner

from decantkv.lab.eval import fidelity
from decantkv.lab.eval.chat import ChatFormat
from decantkv.lab.eval.cli import app
from decantkv.lab.eval.engine.policy import parse_policy
from decantkv.lab.eval.engine.reading import Reader
from decantkv.lab.eval.niah import Grid
from decantkv.lab.eval.presets import PRESETS
from decantkv.lab.eval.results import digest, read_folder
from decantkv.lab.eval.ruler.haystack import Haystack
from decantkv.lab.eval.session import stretch
from decantkv.lab.theory import oracle


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    (folder / "book.txt").write_text(" ".join(f"Sentence {i} says {i * 7}." for i in range(2000)))
    return folder


@pytest.mark.parametrize("depth", [0, 50, 100])
def test_the_needle_stands_at_its_depth(depth, tokenizer):
    form = ChatFormat(tokenizer)
    for haystack in (None, Haystack("h", tuple(f"Word{i}." for i in range(500)))):
        sample = Grid(2000, depth, form.measure(), haystack).sample(1)
        body = sample.context.split("\n", 1)[1]
        needle = body.index("The special magic number for")
        assert needle / (len(body) - 70) == pytest.approx(depth / 100, abs=0.08)
        assert 1800 < form.measure()(sample) + sample.max_new_tokens <= 2000


def test_kl_and_agreement_are_what_they_say():
    full = torch.tensor([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0]])
    other = torch.tensor([[0.0, 2.0, -1.0], [0.0, 3.0, 0.0]])
    p, q = full.softmax(-1).double(), other.softmax(-1).double()
    kl = sum(float(a * torch.log(a / b)) for a, b in zip(p.flatten(), q.flatten(), strict=True)) / 2
    found = fidelity.compare(full, other)
    assert found["kl"] == pytest.approx(kl, abs=1e-5)
    assert found["top1"] == 0.5
    sets = [(p[i, list(s)].sum() - q[i, list(s)].sum()) for i in range(2) for s in ((0,), (1,), (2,), (0, 2), (0, 1))]
    largest = [max(abs(float(x)) for x in sets[i * 5 : i * 5 + 5]) for i in range(2)]  # over sets of tokens
    assert found["tv"] == pytest.approx(sum(largest) / 2, abs=1e-5)
    assert fidelity.compare(full, full) == {"kl": 0.0, "tv": 0.0, "top1": 1.0}


def test_the_output_shift_is_the_oracles(model):
    torch.manual_seed(1)
    reader = Reader(model, rows=8)
    settings = parse_policy("dropkv").settings("0.3")
    ids = torch.randint(1, model.config.vocab_size, (60,)).tolist()
    for cut in reader.read(ids, [60]):
        windows = [cut.window(layer, 8) for layer in range(len(cut.layers))]
        kept = fidelity.kept_mask(cut.evict(settings), 60)
        found = fidelity.output_shift(windows, kept, fidelity.costs(windows))
        shared = fidelity.overlaps({"a": kept, "b": kept})
    for layer, win in enumerate(windows):
        gone = ~kept[layer : layer + 1]
        shift = oracle.joint_shift(win.q, win.k, win.v, gone, scale=win.scale)
        size = oracle.attention(win.q, win.k, win.v, scale=win.scale).norm()
        assert found["real"][layer] == pytest.approx(float(shift.norm() / size), rel=1e-3, abs=1e-4)
        assert found["predicted"][layer] > 0
    assert shared == {"a": {"b": 1.0}, "b": {"a": 1.0}}


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize("suite", ["niah", "ruler", "fidelity", "probes", "longbench"])
def test_each_suite_runs_from_the_command_line(suite, model_folder, text, tmp_path):
    record = {"context": "A context. " * 20, "input": "What?", "answers": ["it"], "all_classes": None}
    (tmp_path / "hotpotqa.jsonl").write_text((json.dumps(record) + "\n") * 3)
    tasks = {"ruler": "niah_single_2,fwe", "longbench": "hotpotqa"}.get(suite, "")
    policies = "dropkv,random+protect" if suite == "probes" else "dropkv,random,quantised-2bit"
    given = (
        "--model", model_folder, "--suite", suite, "--task", tasks, "--length", 1200, "--samples", 2,
        "--method", policies, "--budget", 0.2, "--haystack", text, "--longbench", tmp_path,
        "--out", tmp_path / "out", "--note", "tiny",
    )  # fmt: skip
    first = invoke(*given)
    assert first.exit_code == 0, first.output + repr(first.exception)
    assert "regime: aware" in first.output
    assert "regime: agnostic" in first.output
    assert "tiny" in first.output
    run, rows = read_folder(tmp_path / "out")
    count = len(rows)
    assert run["configuration"]["suite"] == suite
    assert invoke(*given).exit_code == 0
    run, rows = read_folder(tmp_path / "out")
    assert len(rows) == count
    assert len(run["sessions"]) == 2
    if suite == "fidelity":
        row = next(r for r in rows if r.get("policy") == "dropkv")
        assert {"kl", "tv", "top1", "nll", "shift", "overlap"} <= set(row)
    table = CliRunner().invoke(app, ["table", str(tmp_path / "out")])
    assert table.exit_code == 0
    assert re.search(r"agnostic", table.output)


def test_parts_measured_side_by_side_are_the_whole(model_folder, tmp_path):
    given = ("--model", model_folder, "--suite", "niah", "--length", 600, "--samples", 1, "--method", "dropkv,random",
             "--budget", 0.2, "--regime", "aware")  # fmt: skip
    assert invoke(*given, "--out", tmp_path / "whole").exit_code == 0
    parts = [tmp_path / f"part-{i}" for i in (1, 2, 3)]
    for i, part in enumerate(parts, start=1):
        assert invoke(*given, "--out", part, "--part", f"{i}/3").exit_code == 0
    for _ in range(2):  # what is there already stays out
        joined = CliRunner().invoke(app, ["join", str(tmp_path / "joined"), *map(str, parts)])
        assert joined.exit_code == 0, joined.output + repr(joined.exception)
    wanted, found = (
        sorted(json.dumps({k: v for k, v in row.items() if k != "session"}, sort_keys=True) for row in rows)
        for rows in (read_folder(tmp_path / name)[1] for name in ("whole", "joined"))
    )
    assert found == wanted
    run, rows = read_folder(tmp_path / "joined")
    assert {row["session"] for row in rows} == {0, 1, 2}
    assert len(run["sessions"]) == 3, "a session that brings no row is not noted"


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"--suite": "rulers"}, "suite: expected one of ruler"),
        ({"--task": "niah_single_9"}, "did you mean"),
        ({"--length": "many"}, "length"),
        ({"--length": "8192"}, "--beyond-context"),
        ({"--dtype": "int3"}, "dtype"),
        ({"--part": "0/3"}, "part: expected K/N"),
        ({"--part": "4/3"}, "part: expected K/N"),
        ({"--preset": "papers"}, "preset: expected one of paper"),
        ({"--haystack": "/nowhere"}, "haystack"),
        ({"--model": ""}, "--model"),
        ({"--out": None}, "--out"),
    ],
)
def test_mistakes_are_named_before_any_work(changed, wrong, model_folder, tmp_path):
    given = {
        "--model": str(model_folder), "--suite": "ruler", "--task": "niah_single_1", "--length": "1000",
        "--samples": "1", "--method": "dropkv", "--out": str(tmp_path / "out"), **changed,
    }  # fmt: skip
    found = invoke(*(part for pair in given.items() if pair[1] is not None for part in pair))
    assert isinstance(found.exception, ValueError | typer.BadParameter)
    assert wrong in str(found.exception)
    assert not (tmp_path / "out").exists()


def test_a_length_too_short_for_a_task_is_refused_before_the_weights(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("decantkv.hf.loading.AutoModelForCausalLM", None)
    given = ("--model", model_folder, "--suite", "ruler", "--task", "vt", "--length", 60, "--out", tmp_path / "out")
    assert "tokens for vt, got 60" in str(invoke(*given).exception)


def test_another_seed_needs_another_folder(model_folder, tmp_path):
    given = ("--model", model_folder, "--suite", "niah", "--length", 600, "--samples", 1, "--method", "random",
             "--budget", 0.2, "--regime", "aware", "--out", tmp_path)  # fmt: skip
    assert invoke(*given).exit_code == 0
    found = invoke(*given, "--seed", 7)
    assert "seed: there 42, here 7" in str(found.exception)


def test_beyond_the_context_only_with_the_flag_and_a_warning(model_folder, tmp_path):
    given = ("--model", model_folder, "--suite", "niah", "--length", 4200, "--samples", 1, "--method", "random",
             "--budget", 0.2, "--regime", "aware", "--out", tmp_path / "a")  # fmt: skip
    with pytest.warns(UserWarning, match="4,096 tokens"):
        assert invoke(*given, "--beyond-context").exit_code == 0


def test_yarn_stretches_the_slow_frequencies_only(model):
    import copy

    stretched = copy.deepcopy(model)
    stretch(stretched, 4.0)
    before, after = model.model.rotary_emb.inv_freq, stretched.model.rotary_emb.inv_freq
    assert after[0] == pytest.approx(before[0])
    assert float(before[-1] / after[-1]) == pytest.approx(4.0, rel=1e-3)
    with pytest.raises(ValueError, match="yarn"):
        stretch(stretched, 2.0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plans_that_parse(name):
    from decantkv.lab.eval.cli import SUITES, make_plan

    preset = PRESETS[name]
    plan = make_plan(preset.method, preset.budget, preset.regime)
    assert plan.policies
    assert preset.suite in SUITES
    assert all(part.strip().isdigit() for part in preset.length.split(","))


def test_committed_rows_are_answered_again_and_compared(model_folder, tmp_path):
    given = ("--model", model_folder, "--suite", "niah", "--length", 600, "--samples", 1, "--budget", 0.2,
             "--method", "dropkv,quantised-4bit,dropkv[allocation=layer]", "--out", tmp_path)  # fmt: skip
    assert invoke(*given).exit_code == 0
    before = (tmp_path / "rows.jsonl").read_bytes()
    again = ("repeat", tmp_path, "--model", model_folder, "--rows", 12)
    found = invoke(*again)
    assert found.exit_code == 0, found.output + repr(found.exception)
    assert re.fullmatch(r"(\d+) of \1 answers are the same", found.output.strip())
    assert (tmp_path / "rows.jsonl").read_bytes() == before
    (tmp_path / "rows.jsonl").write_bytes(before.replace(b'"answer":"', b'"answer":"other '))
    assert "\n0 of" in invoke(*again).output
    run = json.loads((tmp_path / "run.json").read_text())
    run["configuration"]["weights"] = "0" * 64
    (tmp_path / "run.json").write_text(json.dumps(run))
    rows = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(re.sub(r'"config":"\w+"', f'"config":"{digest(run["configuration"])}"', rows))
    assert "weights: expected those that" in str(invoke(*again).exception)
    assert "answers to prompts of 700 tokens" in str(invoke(*again, "--length", 700).exception)
