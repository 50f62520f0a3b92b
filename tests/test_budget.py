"""Counts come from whole numbers and exact fractions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decantkv.cache.files import settings_as_dict, settings_from_dict
from decantkv.selection.budget import Budget, count, fixed_spans
from decantkv.settings import Settings


@pytest.mark.parametrize(
    ("budget", "length", "keeps"),
    [
        (0.05, 131_072, 6_553),
        (0.1, 500, 50),
        (0.1, 1_000_000, 100_000),
        (0.3, 10, 3),
        (1.0, 7, 7),
        (300, 4, 4),
        (5, 9, 5),
    ],
)
def test_a_share_is_floored_and_exact(budget, length, keeps):
    assert Budget.parse(budget).n_keep(length, fixed=0) == keeps


@given(st.fractions(Fraction(1, 10_000), 1), st.integers(1, 10**7), st.integers(0, 100))
def test_kept_is_between_protection_and_length(share, length, fixed):
    kept = Budget.parse(share).n_keep(length, fixed)
    assert kept == min(length, max(share.numerator * length // share.denominator, fixed, 1))


@pytest.mark.parametrize("budget", [0, -1, 1.5, -0.1, 0.0, float("nan"), float("inf")])
def test_budgets_out_of_range(budget):
    with pytest.raises(ValueError, match="budget: expected"):
        Budget.parse(budget)


@pytest.mark.parametrize(
    ("text", "same"),
    [("0.05", 0.05), ("5%", 0.05), (" 5 % ", 0.05), ("0.5%", 0.005), ("100%", 1.0), ("512", 512), ("512 tokens", 512),
     ("1/20", 0.05), ("1e-2", 0.01), ("1.0", 1.0), ("1", 1.0)],
)  # fmt: skip
def test_text_is_read_as_the_number_it_names_everywhere(text, same):
    from decantkv.cli.generate import parse_budget as on_the_command_line
    from decantkv.lab.eval.engine.policy import parse_budget as in_a_table

    wanted = Budget.parse(same)
    assert Budget.parse(text) == on_the_command_line(text) == in_a_table(text) == wanted
    assert Settings.parse("dropkv", budget=text).budget == wanted


def test_one_is_everything_and_one_token_is_one_token():
    assert Budget.parse(1) == Budget.parse(1.0) == Budget.parse("1")
    one = Budget.parse("1 token")
    assert (one.n_keep(50, 0), str(one)) == (1, "1 token")
    settings = Settings.parse("knorm", budget="1 token")
    assert settings_from_dict(settings_as_dict(settings)) == settings


@pytest.mark.parametrize("text", ["x", "", "0", "0%", "120%", "1.5", "-5%", "nan", "inf", "0.5 tokens", "1/0", "5 %%"])
def test_text_that_is_no_budget(text):
    with pytest.raises(ValueError, match="budget: expected"):
        Budget.parse(text)


def test_a_float_of_less_precision_is_the_decimal_it_prints_as():
    assert Budget.parse(np.float32(0.7)).n_keep(10, 0) == 7
    assert Budget.parse(np.float16(0.1)).n_keep(500, 0) == 50


@pytest.mark.parametrize("budget", [None, True, [0.1]])
def test_budgets_that_are_no_numbers(budget):
    with pytest.raises(TypeError, match="budget: expected"):
        Budget.parse(budget)


def test_protected_tokens_are_a_union():
    spans = fixed_spans(100, window=10, sinks=4, protect=((2, 8), (95, 100), (50, 60), (60, 61)))
    assert spans == ((0, 8), (50, 61), (90, 100))
    assert count(spans) == 29
    assert fixed_spans(5, window=8, sinks=4, protect=()) == ((0, 5),)


def test_a_budget_in_tokens_below_what_is_protected_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"at least 12.*window 8 and sinks 4.*got 11"):
        Settings.parse("dropkv", budget=11, sinks=4)
    settings = Settings.parse("dropkv", budget=12, sinks=4, protect=[(20, 25)])
    with pytest.raises(ValueError, match=r"at least 17.*got 12"):
        settings.n_keep([100])


def test_protection_raises_a_share_and_says_so():
    settings = Settings.parse("dropkv", budget=0.01, sinks=4)
    assert settings.n_keep([100]) == [12]
    assert settings.prompt_budget([100]).raised
    assert not settings.prompt_budget([10_000]).raised


@pytest.mark.parametrize(
    ("protect", "error"),
    [([(5, 5)], ValueError), ([(7, 3)], ValueError), ([(-1, 3)], ValueError), (["ab"], TypeError), ("0:3", TypeError)],
)
def test_bad_spans(protect, error):
    with pytest.raises(error, match="protect"):
        Settings.parse("dropkv", budget=0.1, protect=protect)


def test_spans_outside_the_prompt():
    with pytest.raises(ValueError, match=r"protect: expected spans inside the prompt's 50 tokens, got \(40, 60\)"):
        Settings.parse("dropkv", budget=0.5, protect=[(40, 60)]).n_keep([50])
