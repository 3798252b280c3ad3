"""Formatting of numbers, durations, rates and steps for display."""

from __future__ import annotations

import pytest

from hpcaccel.core.formatting import clean, duration, number, rate, shortened, step_of


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0s"), (-3, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (185, "3m 05s"), (7620, "2h 07m"), (4 * 86400, "4d 00h")],
)
def test_duration_is_shown_in_at_most_two_units(seconds, said):
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (2.41349, "2.413"),
        (0.0003, "0.0003"),
        (1.2e-7, "1.2e-07"),
        (0, "0"),
        (123456.7, "123,457"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_number_is_rounded_for_display(value, said):
    assert number(value) == said


@pytest.mark.parametrize(("value", "said"), [(950, "950"), (12_345, "12.3k"), (4.1e6, "4.1M"), (3e9, "3.0G")])
def test_rate_has_a_suffix_for_large_values(value, said):
    assert rate(value) == said


def test_step_is_shown_with_its_total_if_known():
    assert step_of(None, 400) == "-"
    assert step_of(3, None) == "3"
    assert step_of(3, 400) == "3/400"


def test_long_lists_of_names_are_shortened():
    assert shortened([], 2) == ""
    assert shortened(["a", 1], 2) == "a, 1"
    assert shortened(["a", "b", "c", "d"], 2) == "a, b and 2 more"


def test_control_characters_are_escaped():
    assert clean("a\x1b[2Jb\nc\r") == "a\\x1b[2Jb\\nc\\r"
    assert clean("naïve 東京") == "naïve 東京"
    assert clean("\u202eevil\ud800") == "\\u202eevil\\ud800"
