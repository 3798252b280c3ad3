"""How numbers and times are put into words."""

from __future__ import annotations

import pytest

from hpcaccel.core.formatting import clean, duration, number, rate, step_of


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0s"), (-3, "0s"), (59.4, "59s"), (59.6, "1m 00s"), (185, "3m 05s"), (7620, "2h 07m"), (4 * 86400, "4d 00h")],
)
def test_durations(seconds, said):
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
def test_numbers(value, said):
    assert number(value) == said


@pytest.mark.parametrize(("value", "said"), [(950, "950"), (12_345, "12.3k"), (4.1e6, "4.1M"), (3e9, "3.0G")])
def test_rates(value, said):
    assert rate(value) == said


def test_steps():
    assert step_of(None, 400) == "-"
    assert step_of(3, None) == "3"
    assert step_of(3, 400) == "3/400"


def test_control_characters_are_written_out():
    assert clean("a\x1b[2Jb\nc\r") == "a\\x1b[2Jb\\nc\\r"
    assert clean("naïve 東京") == "naïve 東京"
    assert clean("\u202eevil\ud800") == "\\u202eevil\\ud800"
