"""The committed rows as a picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from decantkv.lab.bench.rows import Row


def draw(rows: Sequence[Row], image: Path) -> None:
    """GPU time of scoring over prompt length, a line a contender, and the time to read K and V once."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    floor: dict[int, float] = {}
    first = rows[0]["geometry"]["name"]
    for row in rows:
        if row["geometry"]["name"] != first or "gpu_us" not in row or row["step"] != "score":
            continue
        lines[row["contender"]].append((row["kv_len"], row["gpu_us"]["p50"]))
        g = row["geometry"]
        floor[row["kv_len"]] = 1e6 * 4 * g["num_kv_heads"] * g["head_dim"] * row["kv_len"] / row["roof_bytes_per_s"]
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    axes.plot(*zip(*sorted(floor.items()), strict=True), "k--", label="K and V read once")
    axes.set(xscale="log", yscale="log", xlabel="prompt length (keys)", ylabel="GPU time of scoring one layer (µs)")
    axes.set_title(f"{first} geometry, {rows[0]['device']}, bf16, window {rows[0]['geometry']['window']}, batch 1")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=150)
