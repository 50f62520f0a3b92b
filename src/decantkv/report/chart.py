"""Line charts as SVG: a point per method and budget, its interval, a link to its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 12, 50
COLOURS = 12  # of the page's palette; beyond it a colour comes again with another mark
MARKS = ("circle", "square", "diamond", "triangle")


@dataclass(frozen=True)
class Point:
    """One measured value.

    Attributes:
        x: share of the cache's bytes, above 0.
        y, low, high: the value and its interval.
        link: id of the cell whose rows stand behind it.
        title: what a reader sees on hovering.
    """

    x: float
    y: float
    low: float
    high: float
    link: str
    title: str


@dataclass(frozen=True)
class Line:
    """A method's points and its number on the page, which decides colour and mark."""

    name: str
    colour: int
    points: tuple[Point, ...]


def chart(lines: Sequence[Line], *, label: str, full: float | None = None, full_name: str = "full cache") -> str:
    """The SVG of some lines over the share of bytes kept (logarithmic).

    Args:
        label: of the vertical axis.
        full: drawn as a dashed line when given.
    """
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    low_x = min(0.04, *(p.x for p in points)) * 0.9
    top = max([p.high for p in points] + ([full] if full is not None else []))
    top = 1.0 if 0.5 < top <= 1.0 else _rounded_up(top)

    def at_x(x: float) -> float:
        return LEFT + (math.log(x) - math.log(low_x)) / -math.log(low_x) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return TOP + (1 - min(max(y, 0.0), top) / top) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)} against bytes kept">']
    parts += _axes(at_x, at_y, low_x, top, label)
    if full is not None:
        y = at_y(full)
        parts.append(f'<line class="full" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="note" x="{LEFT + 4}" y="{y - 4 if y > 24 else y + 14:.1f}">{full_name} {full:.2f}</text>'
        )
    for line in lines:
        placed = sorted(line.points, key=lambda p: p.x)
        path = " ".join(f"{at_x(p.x):.1f},{at_y(p.y):.1f}" for p in placed)
        parts.append(f'<g class="line c{line.colour % COLOURS} m{line.colour}"><polyline points="{path}"/>')
        for p in placed:
            x, y = at_x(p.x), at_y(p.y)
            bar = f'<line class="bar" x1="{x:.1f}" x2="{x:.1f}" y1="{at_y(p.low):.1f}" y2="{at_y(p.high):.1f}"/>'
            mark = _mark(MARKS[(line.colour + line.colour // COLOURS) % len(MARKS)], x, y)
            parts.append(f'{bar}<a href="#{p.link}"><title>{escape(p.title)}</title>{mark}</a>')
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def _axes(
    at_x: Callable[[float], float], at_y: Callable[[float], float], low_x: float, top: float, label: str
) -> list[str]:
    parts = []
    for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0):
        if share >= low_x:
            x = at_x(share)
            parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
            parts.append(
                f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" '
                f'text-anchor="{"end" if share == 1 else "middle"}">{share:.0%}</text>'
            )
    for i in range(5):
        value = top * i / 4
        y = at_y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">share of the cache’s bytes kept</text>'
    )
    parts.append(
        f'<text class="axis" transform="translate(14 {(HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(label)}</text>'
    )
    return parts


def _rounded_up(x: float) -> float:
    """The next number whose quarters read well."""
    if x <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(x))
    return next(step * power for step in (1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10) if step * power >= x)


def _mark(kind: str, x: float, y: float) -> str:
    if kind == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    if kind == "square":
        return f'<rect x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"/>'
    if kind == "diamond":
        return f'<path d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"/>'
    return f'<path d="M{x:.1f} {y - 6:.1f}l6 10h-12z"/>'
