"""The page: what it carries, that it needs nothing else, and that a browser shows the right numbers."""

import base64
import json
import re
import time
import zlib
from dataclasses import replace

import numpy as np
import pytest

from decantkv.lab.show.collect import Detail, MethodView, Missed, View
from decantkv.lab.show.page import detailed_layers, quantised, render
from decantkv.lab.show.spans import SpanCost

from .chromium import browse, needs_browser

LAYERS, HEADS = 4, 2


def make_view(tokens=700, layers=LAYERS, heads=HEADS, seed=0):
    """Numbers drawn at random; the first token holds what would break a careless page."""
    gen = np.random.default_rng(seed)
    pieces = ['</script><b>"&{{js}}', "", *(f" w{i}" + ("\n" if i % 12 == 0 else "") for i in range(tokens - 2))]

    def method(name):
        kept = tuple(gen.random((heads, tokens)) < 0.1 for _ in range(layers))
        missed = gen.random(tokens).astype(np.float32) / tokens
        return MethodView(
            name=f"{name}(window=8)", short=name, kept=kept, answer=f"{name} says <i>so</i>",
            missed=(Missed(5, float(missed[5]), layers - 1, 1, 0.25), Missed(3, float(missed[3]), 0, 0, 0.125)),
            missed_weight=missed, missed_share=0.25, spans=(SpanCost("sinks", 0, 4, 1.5, 0.1, 0.01),),
        )  # fmt: skip

    def detail():
        scores = tuple(np.exp(10 * gen.standard_normal((heads, tokens))).astype(np.float32) for _ in range(2))
        ranks = tuple(np.argsort(np.argsort(-s, -1), -1).astype(np.uint32) for s in scores)
        weight = gen.random((heads, tokens)).astype(np.float32) ** 8
        return Detail(weight, 1 + gen.random((heads, tokens)).astype(np.float32), scores, ranks)

    methods = (method("dropkv"), method("snapkv"))
    details = tuple(detail() for _ in range(layers))
    return View("tiny <model>", tuple(pieces), tuple(range(layers)), heads, "0.1", 70, "full & whole", methods, details)


@pytest.fixture(scope="module")
def view():
    return make_view()


@pytest.fixture(scope="module")
def page(view):
    return render(view)


@pytest.mark.parametrize("name", ["{{data}}", "{{js}}", "{{css}}", "{{title}}", "\\\\1 {{other}}"])
def test_a_models_name_is_never_taken_for_the_template(view, page, name):
    other = render(replace(view, model=name))
    assert embedded(other)["model"] == name
    assert other.count("<script") == page.count("<script")
    assert f"<title>{name}: what dropkv kept</title>" in other


def embedded(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL).group(1))


def test_the_text_survives(view, page):
    assert tuple(embedded(page)["pieces"]) == view.pieces
    assert page.count("</script>") == 2  # the data's and the code's own ends; the prompt's is escaped


def test_nothing_outside_is_named(page):
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://|import\s*\(""", page)
    assert "default-src 'none'" in page


def test_kept_bits_are_the_kept_tokens(view, page):
    for method, packed in zip(view.methods, embedded(page)["methods"], strict=True):
        raw = np.frombuffer(zlib.decompress(base64.b64decode(packed["kept"])), dtype=np.uint8)
        bits = np.unpackbits(raw.reshape(LAYERS, HEADS, -1), axis=-1, bitorder="little")[..., : len(view.pieces)]
        assert (bits.astype(bool) == np.stack(method.kept)).all()


@pytest.mark.parametrize("values", [[0.0, 1e-30, 3.0, 1e4], [-5.0, 0.0, 2.5], [0.0, 0.0], [7.0], [2.0, 2.0]])
def test_sixteen_bits_are_enough(values):
    q, scale = quantised(np.array(values))
    x = q.astype(float)
    back = (
        np.where(x == 0, 0, np.exp(scale["lo"] + (x - 1) * scale["step"]))
        if scale["log"]
        else scale["lo"] + x * scale["step"]
    )
    assert np.allclose(back, values, rtol=1e-3, atol=1e-4 if min(values) < 0 else 0)


def test_numbers_that_outgrow_the_page_are_thinned(view):
    assert detailed_layers(view, 10**9) == [0, 1, 2, 3]
    per_layer = HEADS * 700 * 12
    assert detailed_layers(view, 2 * per_layer) == [0, 3]
    assert detailed_layers(view, 0) == [0]
    assert list(embedded(render(view, detail_bytes=2 * per_layer))["details"]) == ["0", "3"]


def shown(view, method, layer, head, token):
    """A row of the token's table as the page must write it."""
    detail = view.details[layer]

    def number(x):
        x = float(x)
        if x != 0 and (abs(x) < 1e-3 or abs(x) >= 1e5):
            return pytest.approx(x, rel=6e-3)
        return pytest.approx(x, rel=6e-3)

    kept = "kept" if view.methods[method].kept[layer][head, token] else "dropped"
    rank = int(detail.ranks[method][head, token]) + 1
    numbers = [number(a[head, token]) for a in (detail.weight, detail.distance, detail.scores[method])]
    return [str(head), *numbers, f"{rank:,}", kept]


def same(row, expected):
    return [row[0], *(float(x) for x in row[1:4]), *row[4:]] == expected


@needs_browser
def test_a_browser_switches_layers_heads_and_methods(view, page, tmp_path):
    script = """
      const first = cells();
      await press("]");
      const second = cells();
      await press(".");
      const third = cells();
      await press("m");
      const fourth = cells();
      await press("ArrowRight");
      return { first, second, third, fourth, fifth: cells(), where: location.hash, layer: value("layer") };
    """
    found = browse(page, tmp_path, script, fragment="#layer=1&token=300")
    (name, rows) = found["first"][0]
    assert name == "dropkv"
    assert all(same(row, shown(view, 0, 1, h, 300)) for h, row in enumerate(rows))
    assert len(rows) == HEADS
    assert all(same(row, shown(view, 0, 2, h, 300)) for h, row in enumerate(found["second"][0][1]))
    assert found["layer"] == "2"
    assert [len(t[1]) for t in found["third"]] == [1]
    assert same(found["third"][0][1][0], shown(view, 0, 2, 0, 300))
    assert found["fourth"][0][0] == "snapkv"
    assert same(found["fourth"][0][1][0], shown(view, 1, 2, 0, 300))
    assert same(found["fifth"][0][1][0], shown(view, 1, 2, 0, 301))
    assert found["where"] == "#method=1&layer=2&head=0&token=301"


@needs_browser
def test_ink_is_the_share_of_heads_that_keep(view, page, tmp_path):
    script = """
      const all = inked();
      await press("b");
      await press("]");
      await press(".");
      return {
        all, other: value("other"), compared: inked(), map: document.getElementById("heat").width,
        text: document.querySelector('span.t[data-i="0"]').textContent,
        answers: document.getElementById("answers").textContent,
        missed: document.querySelectorAll(".missed").length,
      };
    """
    found = browse(page, tmp_path, script)
    assert found["text"] == view.pieces[0]
    share = np.stack(view.methods[0].kept).mean((0, 1))
    assert len(found["all"]) >= 256
    for i, name, background in found["all"]:
        assert ("none" in name.split()) == (share[i] == 0)
        alpha = re.search(r"([\d.]+)\)$", background)
        assert (float(alpha.group(1)) if alpha else 0.0) == pytest.approx(
            0.22 + 0.58 * share[i] if share[i] else 0.0, abs=2e-3
        )
    assert found["other"] == "0"  # beside itself: every token the same
    assert {name.split()[1] for _, name, _ in found["compared"]} <= {"both", "none", "special"}
    assert "<i>so</i>" in found["answers"]
    assert found["missed"] == 2
    assert found["map"] > 300


@needs_browser
def test_methods_side_by_side_differ_by_line_not_only_by_colour(view, page, tmp_path):
    found = browse(page, tmp_path, "return inked();", fragment="#other=1&layer=0&head=0")
    a, b = (m.kept[0][0] for m in view.methods)
    for i, name, _ in found:
        expected = {(True, True): "both", (True, False): "a", (False, True): "b", (False, False): "none"}
        assert expected[bool(a[i]), bool(b[i])] in name.split()


@needs_browser
def test_a_layer_without_numbers_says_so(view, tmp_path):
    page = render(view, detail_bytes=2 * HEADS * 700 * 12)
    script = 'return document.getElementById("token-body").textContent;'
    assert "carries the numbers of layers 0, 3" in browse(page, tmp_path, script, fragment="#layer=1&token=4")


@needs_browser
def test_a_hundred_thousand_tokens_stay_usable(tmp_path):
    page = render(make_view(tokens=100_000, layers=28, heads=2))
    assert len(page) < 40e6
    script = """
      await press("[");
      const near = document.querySelectorAll("span[data-i]").length;
      await press("ArrowRight");
      return { near, regions: document.querySelectorAll(".region").length, cells: cells() };
    """
    began = time.monotonic()
    found = browse(page, tmp_path, script, fragment="#layer=1&token=70000")
    took = time.monotonic() - began
    assert found["regions"] == 196
    assert found["near"] < 10_000  # only what is near the view is in the document
    assert len(found["cells"][0][1]) == 2
    assert took < 60, f"opening, one layer and one token took {took:.0f} s"
