"""A quarter of the architectures in all ten settings, another one every day; `make sweep` runs all of them."""

from __future__ import annotations

import datetime
import os

import pytest

from tests.sweep.architectures import names
from tests.sweep.rows import rows_of

QUARTERS = 4
QUARTER = int(
    os.environ.get("DECANTKV_SWEEP_QUARTER", datetime.datetime.now(datetime.UTC).timetuple().tm_yday % QUARTERS)
)


@pytest.mark.parametrize("name", names()[QUARTER::QUARTERS])
def test_equal_to_the_judge_or_refused_by_name(name):
    rows = rows_of(name)
    faults = {row["setting"]: row["outcome"] for row in rows if row["outcome"].startswith("fault")}
    assert not faults, f"run again with DECANTKV_SWEEP_QUARTER={QUARTER}, or python -m tests.sweep {name!r} --out FILE"
