"""A run on a tiny model: the rows say what the oracle says, stop and resume, and become tables and plots."""

import gzip
import json
import math
import os
from collections import Counter

import pytest
import torch

from decantkv.cache.evicting_cache import cache_argument
from decantkv.cache.watching import ObservingCache
from decantkv.lab.theory import cli, oracle
from decantkv.lab.theory.measure import Plan
from decantkv.lab.theory.plots import page
from decantkv.lab.theory.results import files_of, read
from decantkv.lab.theory.summary import summary
from decantkv.lab.theory.verify import run
from decantkv.methods import resolve
from decantkv.selection.budget import Budget

from ..support.tiny import VOCABULARY, llama

TOKENS, LAYERS, QUERY_HEADS, KV_HEADS, WINDOW = 160, 3, 8, 2, 8
PLAN = Plan(pool_sizes=(8, 64), search_size=10, ks=(2, 4), search_rows=2, n_keep=32, seed=0)


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(1, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(1))


def measured(model, ids, path, **options):
    settings = {"model_name": "tiny", "method": resolve("dropkv"), "budget": Budget.parse(0.2), "plan": PLAN}
    run(model, ids, path, **{**settings, **options})
    return read([path])


@pytest.fixture(scope="module")
def results(model, ids, tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "rows.jsonl"
    return path, *measured(model, ids, path)


@pytest.fixture(scope="module")
def windows(model, ids):
    found = []
    cache = ObservingCache(model, lambda win: found.append(win), rows=WINDOW)
    with torch.no_grad():
        model(ids, **{cache_argument(model): cache})
    return found


def test_every_row_is_there(results):
    _, header, records = results
    rows = LAYERS * QUERY_HEADS * WINDOW
    searched = LAYERS * (QUERY_HEADS * PLAN.search_rows + KV_HEADS)
    assert header["tokens"] == TOKENS
    assert Counter(r["kind"] for r in records) == {
        "assumptions": rows * (len(PLAN.pool_sizes) + 1),
        "ratio": searched * 2 * len(PLAN.ks),
        "eviction": LAYERS * KV_HEADS * 4,
    }
    assert Counter(r["pool_size"] for r in records if r["kind"] == "assumptions" and r["pool"] == "evicted") == {
        TOKENS - PLAN.n_keep: rows
    }


def test_ratios_and_bounds(results):
    """Sets of the same size from the same pool: none beats the best, none breaks its bound."""
    for r in (r for r in results[2] if r["kind"] == "ratio"):
        for selection in ("raw", "pooled", "attention"):
            assert r[selection] >= r["best"] * (1 - 1e-4)
        if r["bound"] is not None:
            assert r["raw"] <= r["bound"] * r["best"] * (1 + 1e-4)
        if r.get("relaxed_bound") is not None:
            assert r["raw"] <= r["relaxed_bound"] * r["best"] * (1 + 1e-4)
    for r in (r for r in results[2] if r["kind"] == "assumptions"):
        assert (r["certified"] is not None) >= (r["c"] > 0 and r["k"] * r["epsilon"] < 1)


def test_the_eviction_moves_the_outputs_as_deletion_does(results, windows):
    from decantkv.selection.selector import select

    method = resolve("dropkv")
    for win in windows:
        scores = method.score(win)
        kept = select(scores, n_keep=PLAN.n_keep, window=WINDOW, pool=method.pool, kernel_size=method.kernel_size)
        gone = ~kept.mask(TOKENS)
        moved = oracle.joint_shift(win.q, win.k, win.v, gone, scale=win.scale)[0]
        for head in range(KV_HEADS):
            (row,) = (
                r
                for r in results[2]
                if (r["kind"], r["layer"], r["kv_head"]) == ("eviction", win.layer_idx, head)
                and r["selection"] == "pooled"
            )
            assert row["shift"] == pytest.approx(moved[4 * head : 4 * head + 4].norm().item(), rel=1e-4)


def test_the_lowest_pools_weight_is_the_softmax(results, windows):
    win = windows[1]
    s = win.scale * win.q[0, 5, 3].double() @ win.k[0, 1].double().T
    s[TOKENS - WINDOW + 3 + 1 :] = -math.inf
    p = torch.softmax(s, -1)[: TOKENS - WINDOW].sort().values[:64]
    wanted = {"layer": 1, "head": 5, "row": 3, "pool": "lowest", "pool_size": 64, "kind": "assumptions"}
    (row,) = (r for r in results[2] if all(r.get(key) == value for key, value in wanted.items()))
    assert row["epsilon"] == pytest.approx(p.max().item(), rel=1e-4)
    assert row["mass"] == pytest.approx(p.sum().item(), rel=1e-4)


def test_a_stopped_run_resumes(results, model, ids, tmp_path):
    whole = results[0].read_text().splitlines()
    second = next(i for i, line in enumerate(whole) if json.loads(line).get("layer") == 1)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(whole[: second + 5]) + '\n{"kind": "assum')  # torn in the middle of layer 1
    _, records = measured(model, ids, path)
    assert records == results[2]


def test_layers_measured_side_by_side_are_one_run(results, model, ids, tmp_path):
    paths = [tmp_path / "rows-0-2.jsonl", tmp_path / "rows-2-3.jsonl"]
    measured(model, ids, paths[0], layers=range(2))
    measured(model, ids, paths[1], layers=range(2, 3))
    assert read(paths)[1] == results[2]


def test_packed_rows_count_once_and_are_gone_on_from(results, model, ids, tmp_path):
    first = tmp_path / "rows-0-2.jsonl"
    measured(model, ids, first, layers=range(2))
    packed = tmp_path / "rows-0-2.jsonl.gz"
    packed.write_bytes(gzip.compress(first.read_bytes()))
    assert read([packed]) == read([first]) == read([first, packed])
    first.unlink()
    _, rest = measured(model, ids, tmp_path / "rows.jsonl")
    assert {r["layer"] for r in rest} == {2}
    assert read(files_of(tmp_path))[1] == results[2]


def test_workers_measure_the_same(results, model, ids, tmp_path):
    before = dict(os.environ)
    path = tmp_path / "rows.jsonl"
    assert measured(model, ids, path, workers=2)[1] == results[2]
    assert os.environ == before
    written = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    for layer in range(LAYERS):  # a layer's rows stand together and end with its mark
        at = [i for i, line in enumerate(written) if line["layer"] == layer]
        assert at == list(range(at[0], at[-1] + 1))
        assert written[at[-1]] == {"kind": "done", "layer": layer}


def test_another_runs_file_is_refused(results, model, ids, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(results[0].read_text())
    for name in ("rows.jsonl", "rows-0-1.jsonl"):  # the file itself, and one beside it
        with pytest.raises(ValueError, match="got another prompt_sha256"):
            measured(model, ids.flip(1), tmp_path / name)
    other = tmp_path / "other" / "rows.jsonl"
    measured(model, ids.flip(1), other, layers=range(1))
    with pytest.raises(ValueError, match="same model, prompt and plan"):
        read([path, other])


def test_what_cannot_be_measured_is_refused(model, ids, tmp_path):
    with pytest.raises(ValueError, match="expected one prompt"):
        measured(model, ids.expand(2, -1), tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="workers: expected at least 1"):
        measured(model, ids, tmp_path / "a.jsonl", workers=0)
    with pytest.raises(ValueError, match="a window of queries"):
        measured(model, ids, tmp_path / "b.jsonl", method=resolve("knorm"))
    with pytest.raises(ValueError, match="expected at least 42 tokens"):
        measured(model, ids[:, :40], tmp_path / "c.jsonl")


def test_tables_say_what_the_rows_say(results):
    _, header, records = results
    text = summary(header, records)
    assert max(map(len, text.splitlines())) <= 110
    every = [r for r in records if r["kind"] == "assumptions" and r["pool_size"] == 8]
    share = 100 * sum(r["c"] > 0 for r in every) / len(every)
    line = next(line for line in text.splitlines() if line.strip().startswith("lowest 8 "))
    assert f"{len(every):,}" in line
    assert f"{share:.1f} %" in line
    assert "the paper" in text.lower()


def test_tables_of_some_layers_say_so(results):
    _, header, records = results
    some = [r for r in records if r["layer"] != 1]
    assert summary(header, some).startswith("PARTIAL: 2 of 3 layers, 0, 2.\n")
    assert "PARTIAL" not in summary(header, records)


def test_the_page_of_plots_is_drawn(results, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib comes with the extra `plots`")
    page(results[1], results[2], tmp_path / "plots.png")
    assert (tmp_path / "plots.png").stat().st_size > 20_000


def test_the_command_reads_rows_back(results, tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text(results[0].read_text())
    cli.verify(out=tmp_path)
    assert (tmp_path / "tables.txt").read_text() == summary(results[1], results[2])
    assert "Realised ratio" in capsys.readouterr().out
    with pytest.raises(ValueError, match="got neither"):
        cli.verify(out=tmp_path / "empty")


@pytest.mark.parametrize(("option", "text"), [("pools", "16,x"), ("k", "0,2")])
def test_numbers_are_checked(option, text):
    with pytest.raises(ValueError, match=f"{option}: expected"):
        cli._numbers(option, text)


@pytest.mark.parametrize("text", ["3", "5:2", "a:b"])
def test_layer_spans_are_checked(text):
    with pytest.raises(ValueError, match="layers: expected FIRST:STOP"):
        cli._span(text)


@pytest.mark.model
def test_the_command_on_the_demo_model(model_path, tmp_path, capsys):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The needle is 7. " * 200, encoding="utf-8")
    cli.verify(
        out=tmp_path, model=model_path, prompt_file=prompt, question="What is the needle?", tokens=400, budget="0.1",
        pools="16,64", search=8, ks="2,3", layers="0:1", name="demo",
    )  # fmt: skip
    header, records = read([tmp_path / "rows-0-1.jsonl"])
    assert header["model"] == "demo"
    assert abs(header["tokens"] - 400) <= 2
    assert {r["layer"] for r in records} == {0}
    assert "demo: " in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected more than the"):
        cli.verify(out=tmp_path, model=model_path, prompt_file=prompt, question="Why? " * 99, tokens=50)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [1, 2])
def test_a_gpu_measures_the_same(model, ids, results, tmp_path, workers):
    _, records = measured(llama().cuda(), ids.cuda(), tmp_path / "rows.jsonl", workers=workers)
    assert len(records) == len(results[2])
    for here, there in zip(records, results[2], strict=True):
        for place in ("kind", "layer", "kv_head", "head", "row", "pool", "k", "selection"):
            assert here.get(place) == there.get(place)
        for field in ("epsilon", "c", "best", "shift"):
            if field in there:
                assert here[field] == pytest.approx(there[field], rel=0.02, abs=1e-6)
