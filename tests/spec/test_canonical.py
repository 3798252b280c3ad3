# ruff: noqa: E501  (error messages are not wrapped)
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcaccel.errors import SpecError
from hpcaccel.spec import JobSpec, from_json, load_spec, spec_from_values, spec_hash, to_json, to_yaml

TEXT = st.text(st.characters(exclude_characters="\0\n\r", exclude_categories=["Cs"]), max_size=60)
WORD = TEXT.filter(lambda text: text.strip() != "" and not text.startswith("~/"))
ODD = st.sampled_from(["no", "1e3", "0o17", "0x1F", "1_0", "10:00:00", "~", "null", "", "${env:X}", "$${env:X}", "$X", "'", '"', "<<", "=", "\x85", "\u2028", " a ", "\t", "# c", "- x", "~x", "a~/b"])  # fmt: skip
VALUE = (TEXT | ODD).filter(lambda text: not text.startswith("~/"))
SCALAR = (
    VALUE | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | st.booleans() | st.none()
)
KEY = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,10}", fullmatch=True)
ARGS = st.dictionaries(KEY, SCALAR | st.lists(SCALAR.filter(lambda value: value is not None), max_size=3), max_size=5)
NAME = st.from_regex(r"X[A-Z0-9_]{1,8}", fullmatch=True)

SPECS = st.builds(
    lambda args, env, comment, modules, setup, keep, style, extra: {
        "name": "gpt",
        "entrypoint": {"module": "pkg.train", "args": args, "args_style": style},
        "slurm": {"comment": comment, "extra": {"bb": extra}},
        "environment": {"modules": modules, "setup": setup, "env": env},
        "checkpoint": {"every_steps": None, "keep": keep},
    },
    ARGS | st.lists(VALUE, max_size=4),
    st.dictionaries(NAME, VALUE, max_size=3),
    WORD,
    st.lists(WORD, max_size=2),
    st.lists(WORD, max_size=2),
    st.integers(1, 9) | st.none(),
    st.sampled_from(["flags", "equals", "key=value"]),
    VALUE,
)


def test_equal_specs_have_equal_json_and_hash(load) -> None:
    first, second = load("slurm: {time: 60, mem: 40960}"), load("slurm: {mem: 40G, time: '1:00:00'}\nruntime: {}")
    assert to_json(first) == to_json(second)
    assert spec_hash(first) == spec_hash(second)
    assert first == second
    assert len({first, second}) == 1
    assert spec_hash(load("slurm: {time: 61}")) != spec_hash(first)


def test_argument_order_changes_the_hash(load) -> None:
    first = load("entrypoint: {script: train.py, args: {a: 1, b: 2}}")
    second = load("entrypoint: {script: train.py, args: {b: 2, a: 1}}")
    assert spec_hash(first) != spec_hash(second)


def test_json_contains_every_default_but_not_the_source_path(load) -> None:
    values = json.loads(to_json(load("")))
    assert values["code"] == {"copy": True, "include": [], "exclude": []}
    assert values["resilience"]["stop_timeout_seconds"] == 300
    assert "source" not in values
    assert values == load("").model_dump(mode="json")


@given(SPECS)
def test_spec_survives_json_round_trip(values: dict[str, Any]) -> None:
    spec = JobSpec.model_validate(values)
    again = from_json(to_json(spec))
    assert again == spec
    assert again.arguments() == spec.arguments()
    assert to_json(again) == to_json(spec)


@given(values=SPECS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_spec_survives_yaml_round_trip(tmp_path: Path, values: dict[str, Any]) -> None:
    spec = JobSpec.model_validate(values)
    (tmp_path / "spec.yaml").write_text(to_yaml(spec), encoding="utf-8")
    again = load_spec(tmp_path / "spec.yaml")
    assert again == spec
    assert again.arguments() == spec.arguments()


def test_yaml_omits_empty_settings_but_keeps_a_null_that_overrides_a_default(load) -> None:
    text = to_yaml(load("checkpoint: {every_steps: null}"))
    assert "every_steps: null" in text
    assert "modules" not in text
    assert "account" not in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "spec.json is not valid JSON: "),
        ('{"name": "a"}', "spec.json: entrypoint is missing. "),
        ("[]", "spec.json: the file must be a mapping"),
    ],
)
def test_json_that_is_not_a_spec_is_refused(text: str, problem: str) -> None:
    with pytest.raises(SpecError) as caught:
        from_json(text)
    assert caught.value.problems[0].startswith(problem)


def test_function_entrypoint_survives_json_round_trip() -> None:
    spec = spec_from_values({"name": "a", "entrypoint": {"function": "train"}})
    assert from_json(to_json(spec)).entrypoint.function == "train"
