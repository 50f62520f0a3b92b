"""Tables of results in a terminal of any width."""

from __future__ import annotations

import io

import pytest

from decantkv.cli.console import Console
from decantkv.lab.eval.show import fitted

NAMES = ["method", "budget", "bytes", "score [95 %]", "Δ length", "n"]
METHODS = [f"dropkv[allocation=ada,pool=avg,window={w}]+protect" for w in (1, 8, 16, 32, 320)]
ROWS = [[name, "0.05", "5.2%", "0.462 [0.431, 0.493]", "+3.1", str(i)] for i, name in enumerate(METHODS)]


@pytest.mark.parametrize("width", [180, 120, 100, 90, 80])
def test_a_methods_name_is_never_cut(width):
    console = Console(file=io.StringIO(), width=width, markup=False)
    console.print(fitted(NAMES, ROWS, ("Δ length", "n", "bytes"), width, title="regime: aware"))
    text = console.file.getvalue()
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    for name, row in zip(METHODS, ROWS, strict=True):
        (line,) = (line for line in text.splitlines() if name in line)
        assert row[3].split()[0] in line
    gone = [name for name in NAMES if f" {name} " not in text.splitlines()[2]]
    assert ("no room for: " + ", ".join(x for x in ("Δ length", "n", "bytes") if x in gone) in text) == bool(gone)
    assert bool(gone) == (width < 110)


def test_where_even_the_name_is_too_long_it_is_folded():
    console = Console(file=io.StringIO(), width=40, markup=False)
    console.print(fitted(NAMES, ROWS[:1], ("Δ length", "n", "bytes"), 40, title=""))
    text = console.file.getvalue()
    assert "…" not in text
    cells = [line.split("│")[1].strip() for line in text.splitlines() if "│" in line]
    assert METHODS[0] in "".join(cells)
