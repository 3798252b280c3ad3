# ruff: noqa: E501  (error messages are not wrapped)
from __future__ import annotations

import math

import pytest

from hpcaccel.spec import yaml12
from hpcaccel.spec.yaml12 import PlainScalar, SourceLocation, parse_value, parse_yaml


def value(text: str) -> object:
    document = parse_yaml(f"key: {text}\n", "f.yaml")
    assert document.problems == []
    return document.value["key"]


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "yes",
        "on",
        "Off",
        "10:00",
        "1:30:00",
        "2026-11-20",
        "1_000",
        "0b11",
        "0o8",
        "0xg",
        "1e",
        "++1",
        "tRue",
        ".",
        "<<x",
    ],
)
def test_scalar_not_special_in_yaml_1_2_is_text(text: str) -> None:
    assert value(text) == text


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0123", 123),
        ("0o17", 15),
        ("0x1F", 31),
        ("-3", -3),
        ("1e-3", 0.001),
        ("3.0e-4", 3e-4),
        (".5", 0.5),
        ("1.", 1.0),
    ],
)
def test_numbers_keep_their_spelling(text: str, number: float) -> None:
    assert value(text) == PlainScalar(text, number)


def test_booleans_null_and_infinity_are_parsed() -> None:
    assert value("TRUE") == PlainScalar("TRUE", True)
    assert value("~") is None
    assert value("") is None
    assert value("-.inf") == PlainScalar("-.inf", -math.inf)


def test_quoted_and_str_tagged_scalars_are_text() -> None:
    assert [value(text) for text in ("'1'", '"true"', "!!str 7", "'~'")] == ["1", "true", "7", "~"]


def test_a_number_too_long_for_python_is_text() -> None:
    assert value("9" * 6000) == "9" * 6000


def test_anchors_and_merge_keys_are_resolved() -> None:
    text = "a: &a {x: one, y: two}\nb: &b {z: three}\nc:\n  <<: [*a, *b]\n  y: own\nd: *b\n"
    document = parse_yaml(text, "f.yaml")
    assert document.problems == []
    assert document.value["c"] == {"x": "one", "y": "own", "z": "three"}
    assert document.value["d"] == {"z": "three"}
    assert document.places["c", "y"] == SourceLocation("f.yaml", 5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "a: 1\nb: {c: 2,\n    c: 3}\na: 2\n",
            ["f.yaml:3: b.c is set twice (first on line 2)", "f.yaml:4: a is set twice (first on line 1)"],
        ),
        ("a: 1\n'a': 2\n", ["f.yaml:2: a is set twice (first on line 1)"]),
        (
            "a: [1\nb: 2\n",
            ["f.yaml:2: not valid YAML: while parsing a flow sequence, expected ',' or ']', but got ':'"],
        ),
        ("a: *b\n", ["f.yaml:1: not valid YAML: found undefined alias 'b'"]),
        ("a: &a [*a]\n", ["f.yaml:1: not valid YAML: an alias is inside its own value"]),
        ("a: &a\n  <<: *a\n", ["f.yaml:1: not valid YAML: an alias is inside its own value"]),
        ("a:\n  <<: text\n", ["f.yaml:2: '<<' needs a mapping (an alias such as *defaults) or a list of mappings"]),
        ("? [a]\n: b\n", ["f.yaml:1: a key must be a string"]),
        ("a: !!python/name:os.system x\n", ["f.yaml:1: 'x' cannot have the tag !!python/name:os.system"]),
        ("a: !!int x\n", ["f.yaml:1: 'x' cannot have the tag !!int"]),
        (
            "a: b\n---\nc: d\n",
            ["f.yaml:2: not valid YAML: expected a single document in the stream, but found another document"],
        ),
        ("a: \x07\n", ["f.yaml:1: the character U+0007 is not allowed in YAML"]),
        (
            "a:\n- b\u2028c\n",
            [
                'f.yaml:2: U+2028 is a line break for some YAML parsers and not for others: write "\\u2028" in double quotes'
            ],
        ),
    ],
)
def test_yaml_errors_name_the_line(text: str, problem: list[str]) -> None:
    assert sorted(str(found) for found in parse_yaml(text, "f.yaml").problems) == problem


@pytest.mark.parametrize("double", ["&a{0} [*a{1}, *a{1}]", "&a{0} {{<<: [*a{1}, *a{1}]}}"])
def test_exponentially_expanding_aliases_are_refused(double: str) -> None:
    lines = ["a0: &a0 {x: y}", *(f"a{i}: " + double.format(i, i - 1) for i in range(1, 40))]
    (problem,) = parse_yaml("\n".join(lines), "f.yaml").problems
    assert "more than 100000 values" in problem.message


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    (problem,) = parse_yaml("a: " + "[" * 5000 + "]" * 5000, "f.yaml").problems
    assert str(problem) == "f.yaml:1: nested too deeply"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-3", PlainScalar("1e-3", 0.001)),
        ("no", "no"),
        ("a: b # c", "a: b # c"),
        ("*x", "*x"),
        ("", None),
        (" hi ", " hi "),
        ("'1'", "1"),
    ],
)
def test_override_value_is_parsed_as_one_scalar(text: str, expected: object) -> None:
    assert parse_value(text, SourceLocation("command line")).value == expected


def test_override_value_may_be_a_flow_collection() -> None:
    assert parse_value("[a, {b: c}]", SourceLocation("command line")).value == ["a", {"b": "c"}]


def test_long_text_parsed_by_libyaml_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        f"  KEY_{index}: {value}"
        for index, value in enumerate(["007", "yes", "1e-3", "'a b'", "~", '"\\u00e9"'] * 2000)
    ]
    text = "\n".join(
        ["# a comment", "env:", *entries, "list: [1, {a: b}]", "merged: &m {x: 1}", "on: {<<: *m, y: 2}", ""]
    )
    fast = parse_yaml(text, "job.yaml")
    monkeypatch.setattr(yaml12, "_LONG_TEXT", len(text))
    slow = parse_yaml(text, "job.yaml")
    assert (fast.value, fast.places, fast.problems) == (slow.value, slow.places, slow.problems)
    assert len(fast.value["env"]) == 12_000


def test_deeply_nested_long_text_is_refused() -> None:
    for text in ("[" * 60_000, "- " * 60_000, "{a: " * 30_000):
        assert parse_yaml(text, "job.yaml").problems
