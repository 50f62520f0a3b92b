"""The page: complete, self-contained, and looked at in a real browser, wide and narrow."""

import base64
import gzip
import json
import random
import re
import shutil
import subprocess
from urllib.parse import unquote

import pytest
import typer
from typer.testing import CliRunner

from decantkv.lab.eval.results import Store
from decantkv.lab.report.cli import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
app = typer.Typer()
app.command()(report)
CONFIGURATION = {
    "suite": "ruler", "model": "tiny-<b>model</b>", "weights": "abc", "note": "4-bit GGUF, dequantised",
    "dtype": "float32", "device": "cpu", "yarn": 1.0,
}  # fmt: skip
RIVAL = "snapkv:shared[window=1,pool=max,kernel_size=11,allocation=ada,reduce=max,weigh=output]"  # wider than a phone
EVIL = "</script><script>document.title='broken'</script>"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "run"
    circumstances = {"command": "decantkv eval --x", "begun": "now", "device": "cpu", "versions": {"torch": "2"},
                     "policies": {"dropkv": "dropkv(window=8)"}}  # fmt: skip
    store = Store(folder, CONFIGURATION, circumstances)
    rng = random.Random(0)
    for task in ("niah_single_1", "vt", "cwe"):
        for i in range(8):
            prompt = f"ruler/{task}/4096/{i}"
            store.append([{"row": "prompt", "prompt": prompt, "task": task, "length": 4096, "tokens": 4000,
                           "kv_bytes": 2**27, "references": ["4417"]}])  # fmt: skip
            best = 0.1 if task == "cwe" else 1.0
            answer = {"row": "answer", "prompt": prompt, "kept": 1.0, "bytes": 1.0, "new_tokens": 9, "answer": EVIL}
            store.append([{**answer, "regime": "any", "policy": "full", "budget": "1", "score": best}])
            for regime in ("aware", "agnostic"):
                for policy in ("dropkv", RIVAL):
                    for budget in ("0.05", "0.3"):
                        share = float(budget)
                        score = best * (rng.random() < share * 3)
                        store.append([{**answer, "regime": regime, "policy": policy, "budget": budget,
                                       "kept": share, "bytes": share, "score": score}])  # fmt: skip
    store.close()
    return folder


@pytest.fixture(scope="module")
def page(results, tmp_path_factory):
    out = tmp_path_factory.mktemp("page") / "report.html"
    found = CliRunner().invoke(app, [str(results.parent), "-o", str(out)])
    assert found.exit_code == 0, found.output + repr(found.exception)
    return out


def held(page):
    """What the page holds, by id: the sections, and the answers of each folder and length."""
    found = re.findall(r'<script type="application/gzip" id="([^"]+)">([^<]+)</script>', page.read_text())
    return {name: json.loads(gzip.decompress(base64.b64decode(data))) for name, data in found}


def test_every_number_stands_under_its_regime_and_beside_its_interval(page):
    (section,) = held(page)["sections"]
    assert section["title"].startswith("ruler on tiny-<b>model</b>")
    assert section["about"].startswith("ruler, tiny-<b>model</b>, float32, cpu, 4-bit GGUF, dequantised")
    assert section["sessions"][0]["command"] == "decantkv eval --x"
    assert section["methods"] == ["dropkv", RIVAL]
    assert [(panel["length"], panel["regime"]) for panel in section["panels"]] == [(4096, "aware"), (4096, "agnostic")]
    for panel in section["panels"]:
        assert panel["left_out"] == "cwe 0.10"
        assert panel["full"] == 1.0
        assert panel["tasks"] == {"niah_single_1": 1.0, "vt": 1.0}
        assert {(p["method"], p["budget"]) for p in panel["points"]} == {
            (method, budget) for method in ("dropkv", RIVAL) for budget in ("0.05", "0.3")
        }
        for point in panel["points"]:
            size, memory, score, against, worst, *_ = point["texts"]
            assert (size, memory) == (("5.0%", "6.4 MB") if point["budget"] == "0.05" else ("30.0%", "38.4 MB"))
            assert score == "{:.3f} [{:.3f}, {:.3f}]".format(*point["score"])
            assert point["score"][1] <= point["score"][0] <= point["score"][2]
            assert point["score"][0] == pytest.approx(sum(s[0] for s in point["by_task"].values()) / 2, abs=1e-3)
            assert re.fullmatch(r"\w+ \d\.\d\d of 1\.00", worst)
            assert bool(against) == (point["method"] == RIVAL)
            ends = re.fullmatch(r"-?\d\.\d{3} \[(-?[\d.]+), (-?[\d.]+)\]", against)
            assert point["clear"] == bool(ends and (float(ends[1]) > 0 or float(ends[2]) < 0))


def test_methods_are_set_against_each_other_both_ways(page):
    for panel in held(page)["sections"][0]["panels"]:
        assert [budget for budget, _, _ in panel["versus"]] == ["0.05", "0.3"]
        for budget, names, ((own, there), (back, _)) in panel["versus"]:
            assert names == ["dropkv", RIVAL]
            assert own == ""
            assert float(there.strip("*")) == -float(back.strip("*"))
            (snapkv,) = (p for p in panel["points"] if (p["method"], p["budget"]) == (RIVAL, budget))
            assert float(back.strip("*")) == float(snapkv["texts"][3].split()[0])
            assert back.endswith("*") == there.endswith("*") == snapkv["clear"]


def test_nothing_is_loaded_from_elsewhere(page):
    text = page.read_text()
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # a name, not a place
    assert EVIL not in text


def test_every_point_and_line_leads_to_its_rows(page):
    data = held(page)
    answers = data["answers-run-0-4096"]
    assert answers["wanted"] == ["4417"] * 24
    assert answers["tasks"] == [key.split("/")[1] for key in answers["prompts"]]
    for panel in data["sections"][0]["panels"]:
        for point in panel["points"]:
            cell = answers["cells"].index([panel["regime"], point["method"], point["budget"]])
            given = [which[cell] for which in answers["given"]]
            assert [texts[i] for texts, i in zip(answers["answers"], given, strict=True)] == [EVIL] * 24
            scores = {task: [] for task in point["by_task"]}
            for task, values, i in zip(answers["tasks"], answers["values"], given, strict=True):
                scores.get(task, []).append(values[i])
            for task, (mean, _, _) in point["by_task"].items():
                assert mean == pytest.approx(sum(scores[task]) / 8, abs=6e-4)


def test_a_page_of_many_methods_grows_by_few_bytes_a_row(tmp_path):
    rng = random.Random(1)
    store = Store(tmp_path / "run", CONFIGURATION, {"command": "x", "begun": "now", "device": "cpu"})
    rows = 0
    for i in range(40):
        prompt, wanted = f"ruler/vt/4096/{i}", f"{rng.randrange(10**7)}"
        said = [(f" {wanted}.", 1.0)] + [(f" The number is {rng.randrange(10**7)}.", 0.0) for _ in range(3)]
        cells = [("any", "full", "1")]
        cells += [(r, f"m{m}", b) for r in ("aware", "agnostic") for m in range(22) for b in ("0.05", "0.1", "0.3")]
        made = [{"row": "prompt", "prompt": prompt, "task": "vt", "length": 4096, "references": [wanted]}]
        for regime, policy, budget in cells:
            answer, score = said[0] if policy == "full" else rng.choice(said)
            made.append({"row": "answer", "prompt": prompt, "regime": regime, "policy": policy, "budget": budget,
                         "kept": 0.1, "bytes": 0.1, "new_tokens": 9, "answer": answer, "score": score})  # fmt: skip
        store.append(made)
        rows += len(made)
    store.close()
    out = tmp_path / "x.html"
    assert CliRunner().invoke(app, [str(tmp_path / "run"), "-o", str(out)]).exit_code == 0
    assert rows == 40 * 134
    answers = re.search(r'id="answers-run-0-4096">([^<]+)<', out.read_text())[1]
    assert len(answers) < 1.0 * rows  # two bits of chance in each row, and base64
    assert out.stat().st_size < 15 * rows


def test_what_is_not_finite_leaves_the_page_readable(results, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(results, copy)
    lines = (copy / "rows.jsonl").read_text().splitlines()
    broken = [re.sub(r'"score":[\d.]+', '"score":NaN', line) if RIVAL in line else line for line in lines]
    (copy / "rows.jsonl").write_text("\n".join(broken) + "\n")
    assert CliRunner().invoke(app, [str(copy), "-o", str(tmp_path / "x.html")]).exit_code == 0
    data = held(tmp_path / "x.html")
    assert "NaN" not in json.dumps(data)
    for point in data["sections"][0]["panels"][0]["points"]:
        assert (point["score"] == [None] * 3) == (point["method"] == RIVAL)
        assert (point["texts"][2] == "nan [nan, nan]") == (point["method"] == RIVAL)


def test_what_is_no_folder_of_results_is_refused(tmp_path, results):
    found = CliRunner().invoke(app, [str(tmp_path), "-o", str(tmp_path / "x.html")])
    assert "run.json" in str(found.exception)
    copy = tmp_path / "copy"
    shutil.copytree(results, copy)
    with (copy / "rows.jsonl").open("a") as file:
        file.write("{broken\n")
    found = CliRunner().invoke(app, [str(copy), "-o", str(tmp_path / "x.html")])
    assert re.search(r"rows\.jsonl line \d+", str(found.exception))
    assert not (tmp_path / "x.html").exists()


def test_measured_times_stand_beside(results, tmp_path):
    (tmp_path / "bench.jsonl").write_text('{"contender": "ours", "gpu_us": {"p50": 12.5}}\n')
    out = tmp_path / "x.html"
    found = CliRunner().invoke(app, [str(results), "-o", str(out), "--bench", str(tmp_path / "bench.jsonl")])
    assert found.exit_code == 0
    assert "gpu_us.p50" in out.read_text()
    (tmp_path / "bench.jsonl").write_text("{}\nno\n")
    found = CliRunner().invoke(app, [str(results), "-o", str(out), "--bench", str(tmp_path / "bench.jsonl")])
    assert "line 2" in str(found.exception)


LOOK = """<script>addEventListener("load", async () => {
  const wait = () => new Promise(r => setTimeout(r, 400)), seen = { errors: window.seenErrors };
  await wait();
  const link = a => a.getAttribute("href");
  const read = (selector, of = e => e.textContent) => [...document.querySelectorAll(selector)].map(of);
  const change = (id, value) => { at(id).value = value; at(id).dispatchEvent(new Event("change")); return wait(); };
  seen.opened = { title: read("h2")[0], what: read("#what")[0], lines: read("#chart g").length,
    rows: read("#table td:nth-child(5)"), left: read("#left-out")[0], links: read("#chart a", link) };
  await change("regime", "agnostic");
  seen.other = { what: read("#what")[0], rows: read("#table td:nth-child(5)") };
  await change("task", "vt");
  seen.task = { what: read("#what")[0], rows: read("#table td:nth-child(5)"), lines: read("#chart g").length };
  document.querySelector("#legend input").click();
  seen.off = read("#chart g").length;
  ["repeat", "by-task", "versus"].forEach(id => { at(id).open = true; });
  await wait();
  const [charts, versus, repeat] = [read("#by-task svg").length, read("#versus td").length, read("#repeat pre")[0]];
  seen.folded = { charts, versus, repeat };
  location.hash = read("#chart a", link)[0];
  await wait();
  seen.some = read("#answers tr").length;
  location.hash = seen.opened.links[3];
  await wait();
  const box = at("answers"), drawn = document.querySelector("#chart svg").getBoundingClientRect();
  const spot = path => [path.getBoundingClientRect().x, path.getBoundingClientRect().y];
  const points = [[0.05, 0.2], [0.5, 0.9]].map(([x, y]) => ({ x, score: [y, y - 0.1, y + 0.05], link: "#" }));
  at("chart").append(chart([{ name: "m", number: 0, points }], "score", 0.95, 500));
  seen.spots = read("#chart svg:last-child a path", spot);
  seen.bare = chart([], "score", null, 500).querySelectorAll("a").length;
  Object.assign(seen, { open: box.className, rows: box.querySelectorAll("tr").length, width: innerWidth,
    overflow: document.documentElement.scrollWidth - innerWidth, svg: [drawn.width, drawn.height],
    wide: [...document.querySelectorAll("body > *, #legend *, .key")]
      .filter(e => e.getBoundingClientRect().right > innerWidth + 1).length,
    column: document.querySelector("#table td").getBoundingClientRect().width,
    pageTitle: document.title, first: read("#answers td").slice(1, 6) });
  document.body.dataset.seen = encodeURIComponent(JSON.stringify(seen));
});</script>"""
CATCH = """<script>window.seenErrors = [];
addEventListener("error", e => seenErrors.push(e.message));
addEventListener("unhandledrejection", e => seenErrors.push(`${e.reason}`));</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (apt-get install chromium)")
@pytest.mark.parametrize("width", [500, 1280])  # headless chromium's windows are no narrower than 500
def test_a_browser_shows_it_whole_on_a_phone_and_a_desk(page, width, tmp_path):
    looked = tmp_path / "looked.html"
    looked.write_text(page.read_text().replace("<head>", "<head>" + CATCH).replace("</body>", LOOK + "</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=9000", "--dump-dom"]
    place = [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", looked.as_uri()]
    run = subprocess.run([CHROMIUM, *flags, *place], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-seen="([^"]+)"', run.stdout)
    assert found, run.stdout[-500:]
    seen = json.loads(unquote(found.group(1)))
    aware, agnostic = held(page)["sections"][0]["panels"]
    assert seen["errors"] == []
    assert seen["opened"]["title"].startswith("ruler on tiny-<b>model</b>")
    assert seen["opened"]["what"] == "4,096 tokens, all tasks aware"
    assert seen["opened"]["rows"] == [point["texts"][2] for point in aware["points"]]
    assert (seen["opened"]["lines"], len(seen["opened"]["links"])) == (2, 4)
    assert seen["opened"]["left"].endswith("below 0.3: cwe 0.10")
    assert seen["other"]["what"] == "4,096 tokens, all tasks agnostic"
    assert seen["other"]["rows"] == [point["texts"][2] for point in agnostic["points"]]
    assert seen["task"]["what"] == "4,096 tokens, vt agnostic"
    of_task = [point["by_task"]["vt"] for point in agnostic["points"]]
    assert seen["task"]["rows"] == ["{:.3f} [{:.3f}, {:.3f}]".format(*score) for score in of_task]
    assert (seen["task"]["lines"], seen["off"]) == (2, 1)
    assert seen["folded"]["charts"] == 2
    assert seen["folded"]["versus"] == 2 * 4
    assert "decantkv eval --x" in seen["folded"]["repeat"]
    assert "dropkv: dropkv(window=8)" in seen["folded"]["repeat"]
    assert seen["some"] == 1 + 8
    assert seen["open"] == "open"
    assert seen["rows"] == 1 + 24
    assert seen["first"] == ["0", "1", EVIL, EVIL, "4417"]  # the largest change
    assert seen["pageTitle"] == "decantkv results"
    assert seen["overflow"] <= 0
    assert seen["wide"] == 0
    assert seen["column"] <= 0.45 * seen["width"]
    assert min(740, seen["width"] - 100) <= seen["svg"][0] <= seen["width"]
    assert seen["svg"][1] > 200
    (x0, y0), (x1, y1) = seen["spots"]  # larger values higher, more bytes to the right
    assert x0 < x1
    assert y0 > y1
    assert seen["bare"] == 0
