"""The search for the largest batch; what fits a GPU needs one."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from decantkv.lab.bench import capacity
from tests.bench.test_generation import command, made


@pytest.mark.parametrize("guess", [1, 7, 32, 64])
@pytest.mark.parametrize("true", [0, 1, 6, 7, 31, 63, 64])
def test_the_largest_number_is_found_from_any_guess(true, guess):
    asked = []

    def fits(number):
        asked.append(number)
        return number <= true

    assert capacity.largest(fits, most=64, guess=guess) == true
    assert len(asked) == len(set(asked)), "none is tried twice"
    assert all(1 <= number <= 64 for number in asked)
    if guess == true:
        assert len(asked) <= 2


def test_a_method_ends_where_its_own_memory_does(monkeypatch):
    ends = {None: 3, "dropkv": 9, "h2o": 7}
    now = []

    class Llama:
        device = torch.device("cpu")

    def contender(llama, name, budget, *, method=None):
        assert name == ("dynamic" if method is None else "ours")
        now[:] = [method]
        return nullcontext(), {}

    def warm(llama, ids, *, others):
        (method,) = now
        assert others == (100 if method is None else 5), "the other layers' room is taken"
        if len(ids) > ends[method]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(capacity, "contender", contender)
    monkeypatch.setattr(capacity, "warm", warm)
    monkeypatch.setattr(capacity, "prompts", lambda llama, batch, length: torch.zeros(batch, length))
    rows = made(capacity.capacity(Llama, lengths=[100], methods=["dropkv", "h2o"], budget=0.05, most=16))
    assert [(row["method"], row["largest_batch"]) for row in rows] == [("none", 3), ("dropkv", 9), ("h2o", 7)]
    for row in rows:
        fitted = {int(batch) for batch, fits in row["tried"].items() if fits}
        assert max(fitted) == row["largest_batch"]
        assert str(row["largest_batch"] + 1) in row["tried"], "the next one was seen not to fit"


def test_the_capacity_command(capsys, tmp_path):
    arguments = ["capacity", "--lengths", "40", "--methods", "dropkv,knorm", "--most", "3"]
    _, rows = command(capsys, tmp_path / "rows.jsonl", *arguments)
    assert [(row["method"], row["largest_batch"], row["budget"]) for row in rows] == [
        ("none", 3, None), ("dropkv", 3, 0.05), ("knorm", 3, 0.05),
    ]  # fmt: skip


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"methods: expected some of .*, got 'dropout'"):
        list(capacity.capacity(object, lengths=[8], methods=["dropout"], budget=0.05, most=2))
