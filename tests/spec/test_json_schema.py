from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from hpcaccel.spec import schema, sweep_schema

JOBS = Path(__file__).resolve().parents[2] / "jobs"


def properties(node: dict[str, Any], name: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(f"{name}.{key}", value) for key, value in node.get("properties", {}).items()]
    return found + [item for key, value in node.get("$defs", {}).items() for item in properties(value, key)]


def test_schema_is_valid_draft_2020_12() -> None:
    assert schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("made", [schema, sweep_schema])
def test_every_schema_key_has_a_description(made: Callable[[], dict[str, Any]]) -> None:
    every = properties(made())
    assert len(every) > 80
    assert [name for name, value in every if len(value.get("description", "")) < 10] == []


def test_schema_uses_the_key_names_of_the_file() -> None:
    defs = schema()["$defs"]
    assert "copy" in defs["CodeSection"]["properties"]
    assert "function" not in defs["EntrypointSection"]["properties"]
    assert "extends" in schema()["properties"]


@pytest.mark.parametrize("path", sorted(JOBS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(JOBS)))
def test_example_files_match_the_schema(path: Path) -> None:
    values = yaml.safe_load(path.read_text())
    fitting = sweep_schema() if "sweep" in values else schema()
    assert list(jsonschema.Draft202012Validator(fitting).iter_errors(values)) == []


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ({"name": "a", "entrypoint": {"script": "x"}}, True),
        ({"extends": "base.yaml", "slurm": {"nodes": 4, "time": "10:00", "mem": 1.5}}, True),
        (
            {
                "name": "a",
                "entrypoint": {"command": ["x"], "args": ["--lr", 3e-4]},
                "environment": {"env": None},
                "srun": None,
            },
            True,
        ),
        (
            {"name": "a", "entrypoint": {"script": "x"}, "checkpoint": {"keep": "${env:KEEP}", "every_minutes": None}},
            True,
        ),
        ({"name": "a"}, False),
        ({"name": "a/b", "entrypoint": {"script": "x"}}, False),
        ({"name": "a", "entrypoint": {"script": "x"}, "slurm": {"partitoin": "gpu"}}, False),
        ({"name": "a", "entrypoint": {"script": "x"}, "checkpoint": {"keep": 0}}, False),
        ({"name": "a", "entrypoint": {"script": "x"}, "runtime": {"strategy": "x"}}, False),
    ],
)
def test_schema_accepts_valid_specs_and_rejects_invalid_ones(values: dict[str, Any], fits: bool) -> None:
    assert jsonschema.Draft202012Validator(schema()).is_valid(values) is fits
