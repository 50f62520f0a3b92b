"""Folders of results beside packers, joins, killed writers and other runs; what is no row is named by file and line."""

import gzip
import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest

from decantkv.base import json_lines
from decantkv.lab.bench import cases
from decantkv.lab.eval import results
from decantkv.lab.eval.results import ROWS, RUN, Cell, Store, join, pack, read_folder, taken
from decantkv.lab.eval.show import heading, print_tables
from decantkv.lab.eval.statistics import best_on_the_other_half
from decantkv.lab.report.build import bench_table
from decantkv.lab.theory import results as theory

CONFIGURATION = {"suite": "x"}


def opened(folder):
    return Store(folder, CONFIGURATION, {"begun": "now"})


def prompt(number):
    return {"row": "prompt", "prompt": f"p{number}"}


def answer(number, **more):
    return {"row": "answer", "prompt": f"p{number}", "regime": "any", "policy": "full", "budget": "1", **more}


def held(folder):
    return [row["prompt"] for row in read_folder(folder)[1]]


def test_rows_written_after_packing_are_kept(tmp_path):
    store = opened(tmp_path)
    for number in range(9):
        store.append([prompt(number)])
        if number % 3 == 2:
            assert pack(tmp_path).is_file()
            assert held(tmp_path) == [f"p{i}" for i in range(number + 1)]
    pack(tmp_path)
    pack(tmp_path)
    store.close()
    assert held(tmp_path) == [f"p{i}" for i in range(9)]


def test_packing_that_is_cut_short_loses_nothing(tmp_path, monkeypatch):
    opened(tmp_path).append([prompt(i) for i in range(5)])

    def interrupted(file, data):
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "_write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pack(tmp_path)
    monkeypatch.undo()
    assert len(held(tmp_path)) == 5
    (tmp_path / f"{ROWS}.gz").write_bytes(gzip.compress(b""))  # as written, the rows not yet unlinked
    opened(tmp_path).append([prompt(5)])
    assert len(held(tmp_path)) == 6


def test_joining_into_a_folder_that_is_written_to_keeps_every_row_once(tmp_path):
    store, part = opened(tmp_path / "whole"), Store(tmp_path / "part", CONFIGURATION, {"begun": "then"})
    store.append([prompt(0)])
    part.append([prompt(i) for i in range(4)])
    join(tmp_path / "whole", [tmp_path / "part"])
    store.append([prompt(i) for i in range(2, 6)])
    assert held(tmp_path / "whole") == [f"p{i}" for i in range(6)]


@pytest.mark.parametrize("gone", ["folder", "rows", "other session"])
def test_a_folder_that_changed_under_its_run_is_an_error(tmp_path, gone):
    store = opened(tmp_path / "out")
    store.append([prompt(0)])
    (tmp_path / "out" / ROWS).unlink()
    if gone == "folder":
        (tmp_path / "out" / RUN).unlink()
    if gone == "other session":
        (tmp_path / "out" / RUN).write_text(json.dumps({"configuration": CONFIGURATION, "sessions": [{"begun": "x"}]}))
    with pytest.raises(ValueError, match="results: expected"):
        store.append([prompt(1)])


RUN_OF = """
import sys, time
from pathlib import Path
from decantkv.lab.eval.results import Cell, Store
folder, name, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
store = Store(folder, {"suite": "x"}, {"begun": name})
left = [f"p{i}" for i in range(40)]
while left:
    later = []
    for prompt in left:
        if not store.claim(prompt):
            later.append(prompt)
            continue
        if Cell(prompt, "any", "full", "1") not in store.done:
            with (folder / f"measured-{name}").open("a") as log:
                log.write(prompt + chr(10))
            time.sleep(seconds)
            row = {"prompt": prompt, "regime": "any", "policy": "full", "budget": "1"}
            store.append([{"row": "prompt", "prompt": prompt}, {"row": "answer", **row}])
        store.release(prompt)
    left = later
    time.sleep(0.01)
"""


def start(folder, name, seconds):
    return subprocess.Popen([sys.executable, "-c", RUN_OF, str(folder), name, str(seconds)], env=dict(os.environ))


def measured(folder, name):
    file = folder / f"measured-{name}"
    return file.read_text().split() if file.exists() else []


def test_two_runs_of_one_folder_share_the_work(tmp_path):
    running = [start(tmp_path, name, 0.02) for name in "ab"]
    assert [process.wait() for process in running] == [0, 0]
    made = [measured(tmp_path, name) for name in "ab"]
    assert sorted(made[0] + made[1]) == sorted(f"p{i}" for i in range(40))
    assert len(held(tmp_path)) == 80


def test_what_a_killed_run_claimed_is_measured_by_the_other(tmp_path):
    stuck = start(tmp_path, "a", 600)
    while not measured(tmp_path, "a"):
        time.sleep(0.02)
    other = start(tmp_path, "b", 0)
    while len(measured(tmp_path, "b")) < 39:
        time.sleep(0.02)
    assert other.poll() is None
    stuck.send_signal(signal.SIGKILL)
    stuck.wait()
    assert other.wait() == 0
    assert measured(tmp_path, "b")[-1] == measured(tmp_path, "a")[0] == "p0"
    assert len(held(tmp_path)) == 80


def test_half_a_row_of_a_killed_neighbour_is_cut_off_before_the_next_row(tmp_path):
    store = opened(tmp_path)
    store.append([prompt(0)])
    with (tmp_path / ROWS).open("ab") as file:
        file.write(b'{"config":"caf')
    assert held(tmp_path) == ["p0"]
    store.append([prompt(1)])
    assert held(tmp_path) == ["p0", "p1"]


def test_an_append_that_fails_leaves_no_part_of_it(tmp_path, monkeypatch):
    store = opened(tmp_path)
    store.append([prompt(0)])
    before = (tmp_path / ROWS).read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json_lines.os, "fsync", full)
    with pytest.raises(ValueError, match=r"rows\.jsonl: No space left"):
        store.append([prompt(1)])
    monkeypatch.undo()
    assert (tmp_path / ROWS).read_bytes() == before
    store.append([prompt(1)])
    assert held(tmp_path) == ["p0", "p1"]


NAME = results.digest(CONFIGURATION)
UNCLEAN = {
    "no configuration": b'{"row":"prompt","prompt":"x"}',
    "no UTF-8": b'{"config":"\xff\xfe","row":"prompt","prompt":"x"}',
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "deep within": b'{"config":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
    "a list": b"[1]",
    "a list as prompt": f'{{"config":"{NAME}","row":"prompt","session":0,"prompt":["x"]}}'.encode(),
    "an object as row": f'{{"config":"{NAME}","row":{{}},"prompt":"x"}}'.encode(),
    "text as score": f'{{"config":"{NAME}","row":"prompt","session":0,"prompt":"x","score":"high"}}'.encode(),
    "no float": f'{{"config":"{NAME}","row":"prompt","session":0,"prompt":"x","length":1{"0" * 400}}}'.encode(),
    "a list as overlap": f'{{"config":"{NAME}","row":"prompt","session":0,"prompt":"x","overlap":[1]}}'.encode(),
    "another session": f'{{"config":"{NAME}","row":"prompt","prompt":"x","session":-1}}'.encode(),
    "zeros": bytes(40),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("line", UNCLEAN.values(), ids=UNCLEAN)
def test_an_unclean_row_is_named_by_file_and_line(tmp_path, line, packed):
    opened(tmp_path).append([prompt(0)])
    data = (tmp_path / ROWS).read_bytes() + line + b"\n"
    (tmp_path / ROWS).write_bytes(data)
    if packed:
        (tmp_path / f"{ROWS}.gz").write_bytes(gzip.compress(data))
        (tmp_path / ROWS).unlink()
    for use in (read_folder, opened, pack, lambda folder: join(tmp_path / "joined", [folder])):
        with pytest.raises(ValueError, match=r"results: .*rows\.jsonl(\.gz)? line 2: expected") as found:
            use(tmp_path)
        assert len(str(found.value).splitlines()) == 1
        assert len(str(found.value)) < 600


@pytest.mark.parametrize("broken", ["cut", "changed", "no gzip"])
def test_a_broken_archive_is_named_and_kept(tmp_path, broken):
    opened(tmp_path).append([prompt(i) for i in range(400)])
    packed = pack(tmp_path)
    data = packed.read_bytes()
    damaged = {"cut": data[: len(data) // 2], "changed": data[:-8] + b"\1" * 8, "no gzip": b"rows" * 20}[broken]
    packed.write_bytes(damaged)
    for use in (read_folder, opened):
        with pytest.raises(ValueError, match=r"rows\.jsonl\.gz line \d+: expected a file that can be read"):
            use(tmp_path)
        assert packed.read_bytes() == damaged


@pytest.mark.parametrize("text", ['{"configuration": 1, "sessions": []}', "[" * 100_000, "\udcff", "{}"])
def test_an_unclean_run_is_named(tmp_path, text):
    (tmp_path / RUN).write_bytes(text.encode("utf-8", "surrogateescape"))
    (tmp_path / ROWS).touch()
    with pytest.raises(ValueError, match=r"run\.json"):
        read_folder(tmp_path)


def test_rows_of_no_session_are_refused(tmp_path):
    opened(tmp_path / "part").append([prompt(0)])
    file = tmp_path / "part" / ROWS
    file.write_text(file.read_text().replace('"session":0', '"session":7'))
    with pytest.raises(ValueError, match=r"run\.json to hold session 7"):
        join(tmp_path / "whole", [tmp_path / "part"])


def test_text_that_utf8_cannot_hold_comes_back(tmp_path):
    opened(tmp_path).append([answer(0, answer="\ud83d half, \u2028, whole \U0001f600")])
    assert read_folder(tmp_path)[1][0]["answer"] == "\ud83d half, \u2028, whole \U0001f600"


def test_tables_say_what_they_take():
    rows = [{**prompt(0), "task": "vt", "length": 4}, *[answer(0, score=s, kept=1, bytes=1) for s in (0, 1)]]
    assert taken(rows) == "2 answers on 1 prompts; 1 of them measured again, of which the last counts"
    with pytest.raises(ValueError, match="for prompt 'p1', got none"):
        taken([*rows, answer(1)])
    with pytest.raises(ValueError, match="configuration with 'model'"):
        print_tables({"configuration": CONFIGURATION}, rows)
    with pytest.raises(ValueError, match=r"prompts that end in a number, .* got 'p0'"):
        best_on_the_other_half(rows)
    with pytest.raises(ValueError, match="whose yarn is a factor, got None"):
        heading({"suite": "x", "model": "x", "dtype": "x", "device": "x", "note": "", "yarn": None})
    assert Cell("p0", "any", "full", "1") == results.cell_of(rows[1])


def test_measurements_are_added_beside_others(tmp_path):
    out = tmp_path / "rows.jsonl"
    cases.append(out, {"a": 1})
    with out.open("a") as file:
        file.write('{"a": 2')  # another process is writing
    assert cases.resume(out) == [{"a": 1}]
    assert out.read_text().endswith('{"a": 2'), "reading changes nothing"
    cases.append(out, {"a": 3})
    assert cases.resume(out) == [{"a": 1}, {"a": 3}]
    out.write_bytes(b'{"a": "\xe2\x80\xa8"}\n\xff\n')
    for use in (cases.resume, bench_table):
        with pytest.raises(ValueError, match=r"rows\.jsonl line 2: expected a JSON object"):
            use(out)


def test_one_run_at_a_time_writes_a_file_of_the_theory(tmp_path):
    path = tmp_path / "rows.jsonl"
    with theory.only_run(path):
        with pytest.raises(ValueError, match="that no other run writes"), theory.only_run(path):
            pass
        with theory.only_run(tmp_path / "rows-0-1.jsonl"):
            pass
        with pytest.raises(ValueError, match="to stay while its run goes on"):
            theory.add(path, [{"kind": "done", "layer": 0}])
    with theory.only_run(path):
        path.write_bytes(b"\xff\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl line 1: expected a JSON object"):
        theory.read([path])


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"kind": "run"}, "model"),
        ({"kind": "done"}, "layer"),
        ({"kind": "ratio", "layer": 0, "scope": "row", "pool": "x", "kv_head": 0, "pool_size": []}, "pool_size"),
        ({"kind": ["run"], "layer": 0}, "kind"),
    ],
)
def test_an_unclean_record_of_the_theory_is_named(tmp_path, record, name):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"kind": "note", "layer": 0}) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(ValueError, match=rf"rows\.jsonl line 2: .* with its '{name}', got "):
        theory.read([path])


def test_a_header_that_a_killed_run_left_torn_is_written_anew(tmp_path):
    path, header = tmp_path / "rows.jsonl", {name: "" for name in theory._SAME} | {"kind": "run"}
    path.write_text('{"kind": "ru')
    assert theory.open_rows(path, header) == set()
    assert json.loads(path.read_text()) == header


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_rows_hold_no_number_that_json_has_not(tmp_path, number):
    file = tmp_path / "rows.jsonl"
    with pytest.raises(ValueError, match="results: expected finite numbers in every row, got"):
        json_lines.append(file, [{"row": "answer", "scores": [{"nll": number}]}])
    assert not file.exists()
