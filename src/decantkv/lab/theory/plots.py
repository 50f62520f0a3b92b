"""The results file's rows as one page of six plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from decantkv.lab.theory.measure import Record, fields_of
from decantkv.lab.theory.summary import GROUPS, SELECTIONS, factors, layer_group, ratio

# Okabe and Ito's colours, told apart by every common kind of colour blindness; markers and dashes repeat the message
STYLES = (("#0072B2", "o", "-"), ("#E69F00", "s", "--"), ("#009E73", "^", "-."), ("#CC79A7", "D", ":"))


def page(header: Record, records: Sequence[Record], path: Path) -> None:
    """Write the page; the file's ending says whether as PNG, PDF or SVG.

    Raises:
        ModuleNotFoundError: matplotlib is missing; it comes with the extra `plots`.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("plots: expected matplotlib (pip install decantkv[plots]), got none") from error
    figure = Figure(figsize=(13, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).ravel()
    assumptions, ratios = fields_of(records, "assumptions"), fields_of(records, "ratio")
    layers = header["geometry"]["layers"]
    _prevalence(axes[0], assumptions)
    _epsilon(axes[1], assumptions)
    _factor(axes[2], assumptions, max(header["plan"]["ks"]))
    _ratio_curves(axes[3], [r for r in ratios if (r["scope"], r["pool"]) == ("window", "cut")])
    _by_k(axes[4], [r for r in ratios if (r["scope"], r["pool"]) == ("row", "lowest")], layers)
    _moves(axes[5], fields_of(records, "eviction"))
    kept = f"{header['tokens']:,} tokens, {header['plan']['n_keep']:,} kept per head"
    measured = len({r["layer"] for r in records})
    if measured < layers:
        kept += f"; PARTIAL: {measured} of {layers} layers"
    figure.suptitle(f"{header['model']}, {kept}\n{header['method']}", fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": None} if path.suffix == ".png" else None)


def _pools(assumptions: Sequence[Record]) -> list[tuple[str, list[Record]]]:
    found: dict[str, list[Record]] = {}
    for r in assumptions:
        found.setdefault(f"{r['pool']} {r['pool_size']:,}", []).append(r)
    return list(found.items())


def _prevalence(axis: Any, assumptions: Sequence[Record]) -> None:
    for (name, group), (color, marker, dash) in zip(_pools(assumptions), STYLES, strict=False):
        layers = sorted({r["layer"] for r in group})
        share = [100 * np.mean([r["c"] > 0 for r in group if r["layer"] == layer]) for layer in layers]
        axis.plot(layers, share, dash, color=color, marker=marker, markersize=4, label=name)
    axis.set(title="The cone holds (c* > 0)", xlabel="layer", ylabel="% of (head, row)", ylim=(-3, 103))
    axis.legend(title="pool L", fontsize=8)


def _epsilon(axis: Any, assumptions: Sequence[Record]) -> None:
    for (name, group), (color, _, dash) in zip(_pools(assumptions), STYLES, strict=False):
        _curve(axis, [r["epsilon"] for r in group], color, dash, name)
    axis.set(title="ε, the largest weight in the pool", xlabel="ε", ylabel="% of records below", xscale="log")
    axis.set_xlim(min(np.quantile([r["epsilon"] for r in group], 0.05) for _, group in _pools(assumptions)), 1.5)
    axis.legend(title="pool L", fontsize=8)


def _factor(axis: Any, assumptions: Sequence[Record], k: int) -> None:
    for (name, group), (color, _, dash) in zip(_pools(assumptions), STYLES, strict=False):
        factor = factors(group, k)
        finite = np.sort(factor[np.isfinite(factor)])
        if len(finite):
            axis.plot(finite, 100 * np.arange(1, len(finite) + 1) / len(factor), dash, color=color, label=name)
    axis.set(title=f"The bound 1/[c(1−ε)(1−kε)], k = {k}", xlabel="factor", ylabel="% below, of all", xscale="log")
    axis.set(ylim=(0, 103), xlim=(0.9, 1e3))
    axis.legend(title="pool L", fontsize=8)


def _ratio_curves(axis: Any, ratios: Sequence[Record]) -> None:
    for selection, (color, _, dash) in zip(SELECTIONS, STYLES, strict=False):
        _curve(axis, [ratio(r, selection) for r in ratios], color, dash, selection)
    axis.set(title="Window, keys around the cut, k of 20", xlabel="shift / best shift", ylabel="% of records below")
    axis.set_xlim(0.95, max(3.0, float(np.quantile([ratio(r, "pooled") for r in ratios], 0.99)) if ratios else 3.0))
    axis.legend(title="chosen by", fontsize=8)


def _by_k(axis: Any, ratios: Sequence[Record], layers: int) -> None:
    ks = sorted({r["k"] for r in ratios})
    for group, (color, marker, dash) in zip(GROUPS, STYLES, strict=False):
        cells = [
            [ratio(r, "raw") for r in ratios if r["k"] == k and layer_group(r["layer"], layers) == group] for k in ks
        ]
        if all(cells):
            axis.plot(ks, [np.median(x) for x in cells], dash, color=color, marker=marker, label=f"{group}: median")
            axis.plot(ks, [np.quantile(x, 0.95) for x in cells], dash, color=color, marker=marker, fillstyle="none",
                      linewidth=0.8, label="95 %")  # fmt: skip
    axis.set(title="One row, k of the 20 keys of least attention, raw", xlabel="k", ylabel="shift / best shift")
    axis.legend(fontsize=7, ncols=3, loc="upper center")
    axis.set_ylim(0.98, axis.get_ylim()[1] + 0.3 * (axis.get_ylim()[1] - 1))


def _moves(axis: Any, evictions: Sequence[Record]) -> None:
    selections = list(dict.fromkeys(r["selection"] for r in evictions))
    for selection, (color, marker, dash) in zip(selections, STYLES, strict=False):
        group = [r for r in evictions if r["selection"] == selection]
        layers = sorted({r["layer"] for r in group})
        moved = [np.median([r["shift"] / r["output"] for r in group if r["layer"] == layer]) for layer in layers]
        axis.plot(layers, moved, dash, color=color, marker=marker, markersize=4, label=selection)
    axis.set(title="The real eviction: outputs' move, median head", xlabel="layer", ylabel="move / output")
    axis.set_ylim(bottom=0)
    axis.legend(title="chosen by", fontsize=8)


def _curve(axis: Any, values: Sequence[float], color: str, dash: str, label: str) -> None:
    ordered = np.sort(values)
    axis.plot(ordered, 100 * np.arange(1, len(ordered) + 1) / max(len(ordered), 1), dash, color=color, label=label)
