"""Masking of secret values in messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcaccel.core.log import Mask
from hpcaccel.core.run_dir import RunDir

KEY = "-----BEGIN KEY-----\nMIIEvQIBADANBg\n-----END KEY-----\n"


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("ValueError: bad token hf_abcdef", "ValueError: bad token ***"),
        ("hf_abcdefgh is the longer one, hf_abcdef the shorter", "*** is the longer one, *** the shorter"),
        ("a line of MIIEvQIBADANBg alone", "a line of *** alone"),
        ("ends in the middle of it: hf_abc", "ends in the middle of it: ***"),
        ("a.c? is no pattern, and abc is not it", "*** is no pattern, and abc is not it"),
        ("1 is too short to be one: on", "1 is too short to be one: on"),
        ("nothing here", "nothing here"),
    ],
)
def test_each_secret_value_is_masked(text: str, masked: str) -> None:
    assert Mask(["hf_abcdef", "hf_abcdefgh", KEY, "1", "on", "a.c?", ""])(text) == masked


def test_mask_takes_names_from_the_spec_and_values_from_the_environment(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    assert Mask.of(run, {"TOKEN": "abcdef"})("abcdef") == "abcdef"
    run.spec.write_text(json.dumps({"spec": {"environment": {"secrets": ["TOKEN", "ABSENT"]}}}))
    assert Mask.of(run, {"TOKEN": "abcdef", "OTHER": "ghijkl"})("abcdef ghijkl") == "*** ghijkl"
