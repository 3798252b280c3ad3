"""Edits of a spec's YAML text by the form, and the fields that the form has."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("dash")

from hpcaccel.errors import UserError
from hpcaccel.service.page.submit_fields import form_sections
from hpcaccel.service.page.submit_form import input_value, spec_value
from hpcaccel.service.page.submit_yaml import values_of, with_value
from hpcaccel.spec import schema

TEXT = """\
name: gpt    # kept
entrypoint:
  script: train.py
  args: {lr: 3.0e-3, depth: 4}

slurm:
  nodes: 1
  # a note
  time: "00:30:00"
"""


@pytest.mark.parametrize(
    ("path", "value", "old", "new"),
    [
        ("name", "other", "name: gpt  ", "name: other  "),
        ("slurm.nodes", 2, "nodes: 1", "nodes: 2"),
        ("slurm.time", None, '  time: "00:30:00"\n', ""),
        ("entrypoint.args.lr", None, "{lr: 3.0e-3, depth: 4}", "{depth: 4}"),
        ("entrypoint.args.width", 8, "depth: 4}", "depth: 4, width: 8}"),
        ("slurm.partition", "no", 'time: "00:30:00"\n', 'time: "00:30:00"\n  partition: "no"\n'),
        ("runtime.seed", 1, 'time: "00:30:00"\n', 'time: "00:30:00"\n\nruntime:\n  seed: 1\n'),
    ],
)
def test_edit_changes_one_value_and_keeps_the_rest(path: str, value: object, old: str, new: str) -> None:
    assert with_value(TEXT, tuple(path.split(".")), value) == TEXT.replace(old, new)


def test_last_key_of_a_section_takes_the_section_along() -> None:
    assert with_value("name: a\nslurm:\n  nodes: 1\n", ("slurm", "nodes"), None) == "name: a\n"


def test_text_with_anchors_is_written_anew_if_an_edit_would_change_two_values() -> None:
    text = with_value("name: a\nentrypoint:\n  args: {a: &x [1], b: *x}\n", ("entrypoint", "args", "b"), [2])
    assert values_of(text) == {"name": "a", "entrypoint": {"args": {"a": [1], "b": [2]}}}


def test_text_that_is_no_yaml_is_not_edited() -> None:
    with pytest.raises(UserError, match="the YAML is not valid"):
        with_value("name: [", ("name",), "b")


def test_every_value_of_an_example_comes_back_from_its_field() -> None:
    values = values_of((Path(__file__).parents[2] / "jobs" / "gpt" / "job.yaml").read_text())
    assert values is not None
    fields = {one.key: one for section in form_sections(schema()) for one in section.fields}
    assert len(fields) > 90
    for key in (
        "name",
        "entrypoint.args",
        "slurm.nodes",
        "slurm.time",
        "runtime.deterministic",
        "checkpoint.every_steps",
    ):
        shown = input_value(fields[key], values)
        section, _, name = key.partition(".")
        assert spec_value(fields[key], shown) == (values[section][name] if name else values[section])
    with pytest.raises(UserError, match="is not a number"):
        spec_value(fields["runtime.seed"], "many")
