"""The page: complete, self-contained, and looked at in a real browser, wide and narrow."""

import base64
import gzip
import json
import random
import re
import shutil
import subprocess

import pytest
import typer
from typer.testing import CliRunner

from decantkv.eval.results import Store
from decantkv.report.chart import Line, Point, chart
from decantkv.report.cli import report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
app = typer.Typer()
app.command()(report)
CONFIGURATION = {
    "suite": "ruler", "model": "tiny-<b>model</b>", "weights": "abc", "note": "4-bit GGUF, dequantised",
    "dtype": "float32", "device": "cpu", "yarn": 1.0,
}  # fmt: skip
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
                for policy in ("dropkv", "snapkv"):
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


def test_every_number_stands_under_its_regime_and_beside_its_interval(page):
    text = page.read_text()
    assert text.count('<span class="regime">aware</span>') >= 2
    assert text.count('<span class="regime">agnostic</span>') >= 2
    assert len(re.findall(r"<td>\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\]</td>", text)) == 2 * 4
    assert "4-bit GGUF, dequantised" in text
    assert "decantkv eval --x" in text
    assert "below 0.3: cwe 0.10" in text
    assert "6.4 MB" in text  # 5 % of 128 MB
    assert "tiny-&lt;b&gt;model&lt;/b&gt;" in text
    for mark, low, high in re.findall(
        r'<td( class="clear")?>-?\d\.\d{3} \[(-?[\d.]+), (-?[\d.]+)\]</td><td>\w+ \d', text
    ):
        assert bool(mark) == (float(low) > 0 or float(high) < 0)


def test_nothing_is_loaded_from_elsewhere(page):
    text = page.read_text()
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text)
    assert "http" not in text.split("<script type", 1)[0].replace("http-equiv", "")
    assert EVIL not in text


def test_every_point_and_line_leads_to_its_rows(page):
    text = page.read_text()
    links = set(re.findall(r'href="#(run-0-cell-\d+)"', text))
    held = dict(re.findall(r'<script type="application/gzip" id="([^"]+)">([^<]+)</script>', text))
    assert links == set(held)
    assert len(held) == 8
    for data in held.values():
        rows = json.loads(gzip.decompress(base64.b64decode(data)))
        assert len(rows) == 24
        assert {row[3] for row in rows} == {EVIL}


def test_a_chart_puts_larger_values_higher_and_more_bytes_to_the_right():
    points = tuple(Point(x, y, y - 0.1, y + 0.05, "id", "t") for x, y in ((0.05, 0.2), (0.5, 0.9)))
    svg = chart([Line("m", 0, points)], label="score", full=0.95)
    (x0, y0), (x1, y1) = (tuple(map(float, p)) for p in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', svg))
    assert x0 < x1
    assert y0 > y1
    assert chart([], label="score") == ""


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
  location.hash = "#run-0-cell-3"; await new Promise(r => setTimeout(r, 400));
  const box = document.getElementById("rows"), svg = document.querySelector("svg").getBoundingClientRect();
  const wide = [...document.body.children].filter(e => e.getBoundingClientRect().right > innerWidth + 1).length;
  document.body.dataset.seen = JSON.stringify({open: box.className, rows: box.querySelectorAll("tr").length,
    overflow: document.documentElement.scrollWidth - innerWidth, wide, svg: [svg.width, svg.height], width: innerWidth,
    errors: window.seenErrors, title: document.title, first: box.querySelectorAll("td")[3].textContent});
});</script>"""
CATCH = '<script>window.seenErrors=[];addEventListener("error",e=>seenErrors.push(e.message))</script>'


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine (apt-get install chromium)")
@pytest.mark.parametrize("width", [500, 1280])  # headless chromium's windows are no narrower than 500
def test_a_browser_shows_it_whole_on_a_phone_and_a_desk(page, width, tmp_path):
    looked = tmp_path / "looked.html"
    looked.write_text(page.read_text().replace("<head>", "<head>" + CATCH).replace("</body>", LOOK + "</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    place = [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", looked.as_uri()]
    run = subprocess.run([CHROMIUM, *flags, *place], capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'data-seen="([^"]+)"', run.stdout)
    assert found, run.stdout[-500:]
    seen = json.loads(found.group(1).replace("&quot;", '"').replace("&lt;", "<").replace("&gt;", ">"))
    assert seen["errors"] == []
    assert seen["open"] == "open"
    assert seen["rows"] == 25
    assert seen["first"] == EVIL
    assert seen["title"] == "decantkv results"
    assert seen["overflow"] <= 0
    assert seen["wide"] == 0
    assert min(760, seen["width"] - 100) <= seen["svg"][0] <= seen["width"]
    assert seen["svg"][1] > 200
