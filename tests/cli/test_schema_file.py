"""The JSON schemas in docs/, and the example files that name them in their header."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from hpcaccel.spec import schema, sweep_schema

ROOT = Path(__file__).resolve().parent.parent.parent
SCHEMA = ROOT / "docs" / "job.schema.json"
SWEEP_SCHEMA = ROOT / "docs" / "sweep.schema.json"
HEADER = "# yaml-language-server: $schema="
EXAMPLES = sorted(path for path in (ROOT / "jobs").rglob("*.yaml"))


def test_schema_files_are_up_to_date():
    assert json.loads(SCHEMA.read_text()) == schema(), "run: hpcaccel schema > docs/job.schema.json"
    assert json.loads(SWEEP_SCHEMA.read_text()) == sweep_schema(), (
        "run: hpcaccel schema --sweep > docs/sweep.schema.json"
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_names_its_schema_and_is_valid_against_it(path):
    first = path.read_text().splitlines()[0]
    assert first.startswith(HEADER)
    values = yaml.safe_load(path.read_text())
    expected = SWEEP_SCHEMA if "sweep" in values else SCHEMA
    assert (path.parent / first.removeprefix(HEADER)).resolve() == expected

    jsonschema.Draft202012Validator(json.loads(expected.read_text())).validate(values)
