"""A view as one HTML file that needs nothing else: no network, no server.

Kept tokens are one bit each for every method, layer and head. The numbers behind them are 16-bit and by layer, packed
with zlib; the page unpacks a layer when it is looked at. Where all layers' numbers would outgrow the file, evenly
spaced layers carry them and the page says so.
"""

from __future__ import annotations

import base64
import html
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

import numpy as np

from decantkv.lab.show.collect import Detail, View

DETAIL_BYTES = 24 * 2**20  # of numbers before packing


def render(view: View, *, detail_bytes: int = DETAIL_BYTES) -> str:
    """The page.

    Args:
        detail_bytes: how much room the numbers of single tokens may take before packing.
    """
    here = files("decantkv.lab.show")
    parts = {name: (here / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")}
    data = json.dumps(_data(view, detail_bytes), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    filled = {
        "title": html.escape(f"{view.model}: what {view.methods[0].short} kept"),
        "css": parts["page.css"],
        "js": parts["page.js"],
        "data": data,
    }
    # in one pass, so that what is filled in is never taken for the template
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: filled[mark[1]], parts["page.html"])


def _data(view: View, detail_bytes: int) -> dict[str, Any]:
    n = len(view.pieces)
    carried = detailed_layers(view, detail_bytes)
    return {
        "model": view.model,
        "pieces": view.pieces,
        "layers": view.layers,
        "heads": view.num_kv_heads,
        "budget": view.budget,
        "n_keep": view.n_keep,
        "full_answer": view.full_answer,
        "rank_bytes": _rank_type(n).itemsize,
        "methods": [
            {
                "name": m.name,
                "short": m.short,
                "answer": m.answer,
                "missed_share": m.missed_share,
                "missed": [[x.token, x.weight, x.layer, x.head, x.there] for x in m.missed],
                "missed_weight": _packed([quantised(m.missed_weight)]),
                "spans": [asdict(span) for span in m.spans],
                "kept": _pack(np.packbits(np.stack(m.kept), axis=-1, bitorder="little").tobytes()),
            }
            for m in view.methods
        ],
        "details": {str(i): _detail(view.details[i]) for i in carried},
    }


def detailed_layers(view: View, detail_bytes: int) -> list[int]:
    """Places in `view.layers` of the layers whose numbers the page carries: as many as fit, evenly spaced."""
    n, layers = len(view.pieces), len(view.layers)
    per_layer = view.num_kv_heads * n * (4 + len(view.methods) * (2 + _rank_type(n).itemsize))
    fit = max(1, min(layers, detail_bytes // max(per_layer, 1)))
    return sorted({round(i) for i in np.linspace(0, layers - 1, fit)})


def _detail(detail: Detail) -> dict[str, Any]:
    """A layer's arrays, head by head: weight, distance, then score and rank of each method."""
    arrays: list[tuple[np.ndarray, dict[str, Any] | None]] = []
    n = detail.weight.shape[1]
    for h in range(len(detail.weight)):
        arrays += [quantised(detail.weight[h]), quantised(detail.distance[h])]
        for score, rank in zip(detail.scores, detail.ranks, strict=True):
            arrays += [quantised(score[h]), (rank[h].astype(_rank_type(n)), None)]
    return _packed(arrays)


def quantised(values: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """[N] uint16 and how to read it: x = lo + (hi − lo)·q/65535, or for positive numbers 0 and exp of that from 1 on.

    On the logarithmic scale the error is (ln hi − ln lo)/131,068 of the number: under 0.1 % over 50 decades.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.size and bool((x >= 0).all()) and bool((x > 0).any()):
        positive = x > 0
        logs = np.log(x, where=positive, out=np.zeros_like(x))
        lo, hi = float(logs[positive].min()), float(logs[positive].max())
        step = (hi - lo) / 65534 or 1.0
        q = np.where(positive, 1 + np.round((logs - lo) / step), 0)
        return q.astype("<u2"), {"log": True, "lo": lo, "step": step}
    lo, hi = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
    step = (hi - lo) / 65535 or 1.0
    return np.round((x - lo) / step).astype("<u2"), {"log": False, "lo": lo, "step": step}


def _rank_type(n: int) -> np.dtype[Any]:
    return np.dtype("<u2") if n <= 2**16 else np.dtype("<u4")


def _packed(arrays: Sequence[tuple[np.ndarray, dict[str, Any] | None]]) -> dict[str, Any]:
    return {"scales": [s for _, s in arrays if s is not None], "bytes": _pack(b"".join(a.tobytes() for a, _ in arrays))}


def _pack(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")
