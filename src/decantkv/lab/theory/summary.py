"""The results file's rows as the paper's tables, beside what the paper found on its own models."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from rich import box
from rich.table import Table

from decantkv.cli.console import Console
from decantkv.lab.theory.bounds import bound_factor
from decantkv.lab.theory.measure import Record, fields_of

Key = TypeVar("Key", str, int)
Titled = tuple[str, Table]

SELECTIONS = ("raw", "pooled", "attention")
GROUPS = ("early", "middle", "late")

SEARCHED = {
    ("row", "lowest"): "one row, the keys of least attention (the paper's setting)",
    ("row", "cut"): "one row, the keys around the budget's cut",
    ("window", "lowest"): "all rows of a window, the keys of least attention",
    ("window", "cut"): "all rows of a window, the keys around the budget's cut",
}

# Llama-3.1-8B-Instruct, Mistral-7B-512K, Qwen2.5-7B-1M at 128K tokens; the pools' sizes are not published
PAPER = {
    "cone": "91.2 / 91.1 / 76.5 %",
    "both": "89.1 / 87.5 / 73.4 %",
    "epsilon": "median 2.6e-6 to 4.3e-6, 95th percentile ≤ 1.2e-4",
    "factor": "median 10 to 12",
    "ratio": "median ≤ 1.16, 95th percentile ≤ 1.43, worst 1.82",
    "differs": "DropKV 1.03, attention 1.09 to 1.15",
}


def layer_group(layer: int, layers: int) -> str:
    """Which third of the model a layer is in."""
    return GROUPS[min(3 * layer // layers, 2)]


def ratio(record: Record, selection: str) -> float:
    """Realised over best shift; 1 where both are 0."""
    if record["best"] == 0:
        return 1.0 if record[selection] == 0 else math.inf
    return float(record[selection] / record["best"])


def factors(records: Iterable[Record], k: int) -> np.ndarray:
    """The bound's factor of every assumptions record at k; inf where a condition fails."""
    return np.array([bound_factor(r["c"], r["epsilon"], k) for r in records])


def summary(header: Record, records: Sequence[Record]) -> str:
    """All tables as plain text, 110 columns."""
    out = Console(file=io.StringIO(), width=110, color_system=None, highlight=False)
    plan = header["plan"]
    layers, measured = header["geometry"]["layers"], sorted({r["layer"] for r in records})
    if len(measured) < layers:
        out.print(f"PARTIAL: {len(measured)} of {layers} layers, {', '.join(map(str, measured))}.")
    out.print(
        f"{header['model']}: {header['tokens']:,} tokens, {header['dtype']} on {header['device']}, "
        f"{header['method']}, budget {header['budget']} = {plan['n_keep']:,} kept per head.\n"
        "The paper's figures stand beside ours for comparison. They are of other models (Llama-3.1-8B-Instruct,\n"
        "Mistral-7B-512K, Qwen2.5-7B-1M at 128K tokens) and of candidate pools whose size it does not give.\n",
        markup=False,
    )
    assumptions, ratios = fields_of(records, "assumptions"), fields_of(records, "ratio")
    for title, table in (
        _assumptions(assumptions, max(plan["ks"])),
        _by_group(assumptions, layers),
        *_ratios(ratios, layers),
        _differs(ratios),
        _tightness(ratios),
        _evictions(fields_of(records, "eviction")),
    ):
        out.print(title, markup=False)
        out.print(table)
    text: str = out.file.getvalue()  # type: ignore[attr-defined]  # the StringIO given above
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def _assumptions(records: Sequence[Record], k: int) -> Titled:
    title = (
        "Assumptions by candidate pool, one record per (layer, query head, row). Factor: 1/[c(1−ε)(1−kε)]; certified:\n"
        f"the most that the relaxed cone (µ) lets the ratio be; both at k = {k}.\n"
        f"The paper: cone {PAPER['cone']}; both conditions {PAPER['both']};\n"
        f"ε {PAPER['epsilon']}; factor {PAPER['factor']}; µ not estimated"
    )
    table = _table(
        "pool L", "records", "c* > 0", "+ kε < 1", "c* med.", "ε median", "ε 95 %", "ε max", "factor", "certified"
    )
    for name, group in _grouped(records, _pool_name):
        epsilon = np.array([r["epsilon"] for r in group])
        c = np.array([max(r["c"], 0.0) for r in group])
        factor = factors(group, k)
        certified = [r["certified"] is not None for r in group]
        table.add_row(
            name, f"{len(group):,}", _percent(c > 0), _percent(np.isfinite(factor)), f"{np.median(c):.3f}",
            f"{np.median(epsilon):.1e}", f"{np.quantile(epsilon, 0.95):.1e}", f"{epsilon.max():.1e}",
            _median(factor[np.isfinite(factor)]), _percent(certified),
        )  # fmt: skip
    return title, table


def _by_group(records: Sequence[Record], layers: int) -> Titled:
    table = _table("pool L", *GROUPS, "worst layer")
    for name, group in _grouped(records, _pool_name):
        thirds = [[r["c"] > 0 for r in group if layer_group(r["layer"], layers) == wanted] for wanted in GROUPS]
        by_layer = {layer: np.mean([r["c"] > 0 for r in g]) for layer, g in _grouped(group, lambda r: r["layer"])}
        worst = min(by_layer, key=lambda layer: by_layer[layer])
        table.add_row(name, *map(_percent, thirds), f"{100 * by_layer[worst]:.0f} % (layer {worst})")
    return "Share of records with c* > 0 by layer group", table


def _ratios(records: Sequence[Record], layers: int) -> Iterable[Titled]:
    """One table per scope and pool: by layer group, then by k."""
    for (scope, pool), what in SEARCHED.items():
        chosen = [r for r in records if r["scope"] == scope and r["pool"] == pool]
        if not chosen:
            continue
        title = (
            f"Realised ratio to the best set, {what}; |L| = {chosen[0]['pool_size']}:\n"
            f"median / 95 % / worst. The paper: {PAPER['ratio']}"
        )
        table = _table("cell", "records", "raw score", "pooled score", "attention")
        by_group = _grouped(chosen, lambda r: layer_group(r["layer"], layers) + " layers")
        by_k = _grouped(chosen, lambda r: f"k = {r['k']}")
        for name, group in [*by_group, *by_k, ("all", chosen)]:
            table.add_row(name, f"{len(group):,}", *(_spread([ratio(r, s) for r in group]) for s in SELECTIONS))
        yield title, table


def _differs(records: Sequence[Record]) -> Titled:
    title = f"Where the raw score and attention choose different sets: median ratios. The paper: {PAPER['differs']}"
    table = _table("scope, pool", "differ", "raw score", "attention", "raw better", "attention better")
    for name, group in _grouped(records, lambda r: f"{r['scope']}, {r['pool']}"):
        some = [r for r in group if r["differs"]]
        raw, attention = (np.array([ratio(r, s) for r in some]) for s in ("raw", "attention"))
        table.add_row(
            name, f"{len(some):,} of {len(group):,}", _median(raw), _median(attention),
            _percent(raw < attention), _percent(raw > attention),
        )  # fmt: skip
    return title, table


def _tightness(records: Sequence[Record]) -> Titled:
    title = (
        "The bound beside what happened, raw score, searched pools. A window's bound holds the √(g·w). Nearest: the\n"
        "largest share of its bound that a ratio reached. Relaxed: the tightest aperture's bound, for one row only"
    )
    table = _table("scope, pool", "finite", "bound median", "nearest", "relaxed median", "with outliers")
    for name, group in _grouped(records, lambda r: f"{r['scope']}, {r['pool']}"):
        finite = [r for r in group if r["bound"] is not None]
        relaxed = [r for r in group if r.get("relaxed_bound") is not None]
        share = [ratio(r, "raw") / r["bound"] for r in finite]
        table.add_row(
            name, _percent([r["bound"] is not None for r in group]), _median(r["bound"] for r in finite),
            f"{100 * max(share):.0f} %" if share else "-", _median(r["relaxed_bound"] for r in relaxed),
            _percent([r["outliers"] > 0 for r in relaxed]),
        )  # fmt: skip
    return title, table


def _evictions(records: Sequence[Record]) -> Titled:
    title = (
        "The eviction that really happens, one record per KV head: how far the window's outputs move over their\n"
        "length, the softmax weight that goes, and kε of the evicted set; where kε ≥ 1 the theorem is silent"
    )
    table = _table("selection", "records", "move median", "95 %", "worst", "weight median", "kε median", "kε < 1")
    for name, group in _grouped(records, lambda r: str(r["selection"])):
        moved = np.array([r["shift"] / r["output"] for r in group])
        k_epsilon = np.array([r["k_epsilon"] for r in group])
        table.add_row(
            name, f"{len(group):,}", f"{np.median(moved):.3f}", f"{np.quantile(moved, 0.95):.3f}",
            f"{moved.max():.3f}", f"{np.median([r['mass_median'] for r in group]):.3f}",
            _median(k_epsilon), _percent(k_epsilon < 1),
        )  # fmt: skip
    return title, table


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    return table


def _pool_name(record: Record) -> str:
    if record["pool"] == "evicted":
        return f"evicted {record['pool_size']:,}"
    return f"lowest {record['pool_size']:,}"


def _grouped(records: Iterable[Record], key: Callable[[Record], Key]) -> list[tuple[Key, list[Record]]]:
    """Records by key, in order of first appearance."""
    found: dict[Key, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return list(found.items())


def _percent(flags: Sequence[bool] | np.ndarray) -> str:
    return f"{100 * np.mean(flags):.1f} %" if len(flags) else "-"


def _median(values: Iterable[float]) -> str:
    found = list(values)
    return f"{np.median(found):.4g}" if found else "-"


def _spread(values: Sequence[float]) -> str:
    return f"{np.median(values):.2f} / {np.quantile(values, 0.95):.2f} / {max(values):.2f}"
