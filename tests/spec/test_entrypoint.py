# ruff: noqa: E501  (error messages are not wrapped)
from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcaccel.spec.job.quantities import format_number


def test_args_become_flags_in_file_order(load) -> None:
    spec = load(
        "entrypoint: {script: train.py, args: {lr: 3.0e-4, depth: 4, compile: true, old: false, tag: null, b: [1, x]}}"
    )
    assert spec.arguments() == ["--lr", "3e-4", "--depth", "4", "--compile", "--b", "1", "x"]


def test_string_args_are_passed_unchanged(load) -> None:
    spec = load(
        """entrypoint: {script: train.py, args: {a: "$(x) `y` ' \\" # é \\t\\u2028", b_c: no, d: 0123, e: '007', f: ''}}"""
    )
    assert spec.arguments() == [
        "--a",
        "$(x) `y` ' \" # é \t\u2028",
        "--b_c",
        "no",
        "--d",
        "0123",
        "--e",
        "007",
        "--f",
        "",
    ]


def test_args_list_is_passed_as_written(load) -> None:
    spec = load("entrypoint: {script: train.py, args: [--lr, 3.0e-4, -v, true, 1.10]}")
    assert spec.arguments() == ["--lr", "3.0e-4", "-v", "true", "1.10"]


def test_key_value_style_writes_every_value_in_hydra_syntax(load) -> None:
    spec = load("""
entrypoint:
  module: pkg.train
  args_style: key=value
  args: {lr: 1e-3, on: true, off: false, none: null, model: {depth: 4, name: a b}, l: [1, x, "a,b", "it's"], +new: 1}
""")
    assert spec.arguments() == [
        "lr=1e-3", "on=true", "off=false", "none=null", "model.depth=4", "model.name=a b", "l=[1,x,'a,b','it\\'s']", "+new=1",
    ]  # fmt: skip


EQUALS = """
entrypoint:
  script: train.py
  args_style: equals
  args: {lr: 3.0e-4, compile: false, wandb_log: true, tag: null, out: a b, betas: [0.9, 0.95], names: [a, "it's", true],
         optimizer: {name: adamw, fused: false}, raw: "false", empty: "", big: 12345678901234567890123, inf: .inf}
"""


def test_equals_style_writes_one_argument_per_value_in_python_syntax(load) -> None:
    assert load(EQUALS).arguments() == [
        "--lr=3e-4", "--compile=False", "--wandb_log=True", "--out=a b", "--betas=[0.9,0.95]", """--names=['a',"it's",True]""",
        "--optimizer.name=adamw", "--optimizer.fused=False", "--raw=false", "--empty=", "--big=12345678901234567890123", "--inf=inf",
    ]  # fmt: skip


def test_nanogpt_configurator_reads_equals_style(load, tmp_path: Path) -> None:
    """nanoGPT's configurator accepts a value only if ``literal_eval`` gives the type of the default."""
    (tmp_path / "nano.py").write_text(NANOGPT)
    spec = load(
        "entrypoint: {script: nano.py, args_style: equals, args: {compile: false, learning_rate: 3e-4, max_iters: 5}}",
        "args.out_dir=a b",
        "args.wandb_log=true",
    )
    said = subprocess.run(
        [sys.executable, str(tmp_path / "nano.py"), *spec.arguments()], capture_output=True, text=True, check=True
    )
    assert said.stdout.split("|") == ["False", "0.0003", "5", "'a b'", "True\n"]


NANOGPT = (Path(__file__).parent / "programs" / "nanogpt_configurator.py").read_text()


def test_numbers_beyond_float_range_or_precision_are_passed_exactly(load) -> None:
    spec = load("entrypoint: {script: train.py, args: {a: .inf, b: 1e999, c: 12345678901234567890123}}")
    assert spec.arguments() == ["--a", "inf", "--b", "1e999", "--c", "12345678901234567890123"]


@pytest.mark.parametrize(
    ("entrypoint", "kind", "mode"),
    [
        ("{script: train.py}", "script", "cooperative"),
        ("{module: pkg.train}", "module", "cooperative"),
        ("{command: [bash, -c, 'exit 3']}", "command", "signals"),
    ],
)
def test_entrypoint_kind_sets_the_default_stop_mode(load, entrypoint: str, kind: str, mode: str) -> None:
    spec = load(f"entrypoint: {entrypoint}")
    assert (spec.entrypoint.kind, spec.stop_mode) == (kind, mode)
    other = load(f"entrypoint: {entrypoint}\nruntime: {{stop: signals}}")
    assert other.stop_mode == "signals"


def test_command_with_a_slash_is_relative_to_the_file(load, tmp_path: Path) -> None:
    (tmp_path / "run.sh").touch()
    assert load("entrypoint: {command: [./run.sh, ./data]}").entrypoint.command == [str(tmp_path / "run.sh"), "./data"]


@pytest.mark.parametrize(
    ("entrypoint", "problem"),
    [
        ("{}", "entrypoint must have one of script, module, command"),
        ("{script: train.py, module: a}", "entrypoint.module conflicts with script: set only one of script, module, command"),
        ("{module: train.py}", "entrypoint.module 'train.py' is not a module name (such as pkg.train, without .py)"),
        ("{module: a-b}", "entrypoint.module 'a-b' is not a module name (such as pkg.train, without .py)"),
        ("{command: ./run --fast}", "entrypoint.command './run --fast' must be a list of the program and its arguments: [./run, --fast]"),
        ("{command: []}", "entrypoint.command must name a program: [./program, --flag]"),
        ("{script: nope.py}", "entrypoint.script '{tmp}/nope.py' is not a file"),
        ("{command: [./nope]}", "entrypoint.command '{tmp}/nope' is not a file"),
        ("{function: f}", "entrypoint.function can be set only by hpcaccel.submit() in Python: use script, module or command"),
        ("{script: train.py, args: 5}", "entrypoint.args 5 must be a mapping (lr: 3e-4) or a list ([--lr, 3e-4])"),
        ("{script: train.py, args: {--lr: 1}}", "entrypoint.args has the key --lr: write it without the dashes (lr), or write all args as a list"),
        ("{script: train.py, args: {a b: 1}}", "entrypoint.args has the key 'a b': a key must not be empty or contain white space, control characters or '='"),
        ("{script: train.py, args: {a: [[1]]}}", "entrypoint.args a: item 1 must be a string, a number, true or false, not a list"),
        ('{script: train.py, args: {a: "x\\ny"}}', "entrypoint.args a: contains a line break: a value must be on one line"),
        ('{script: train.py, args: ["x\\0y"]}', "entrypoint.args item 1 contains a NUL character, which cannot be passed to a program"),
        ("{script: train.py, args: {a: {b: 1}}}", "entrypoint.args.a is a mapping, which args_style: flags does not support. Write a.<name>: …, or set args_style: equals or key=value"),
        ("{script: train.py, args_style: hydra}", "entrypoint.args_style 'hydra' is not valid (allowed: flags, equals, key=value)"),
    ],
)  # fmt: skip
def test_invalid_entrypoint_is_reported_with_its_line(problems, tmp_path: Path, entrypoint: str, problem: str) -> None:
    assert f"job.yaml:2: {problem.replace('{tmp}', str(tmp_path))}" in problems(f"entrypoint: {entrypoint}")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3e-4, "3e-4"), (0.001, "1e-3"), (0.05, "0.05"), (0.1, "0.1"), (1.0, "1.0"), (1500.0, "1500.0"), (-2.5e-5, "-2.5e-5"),
        (1e16, "1e16"), (1.5e300, "1.5e300"), (0.0, "0.0"), (-0.0, "-0.0"), (123, "123"), (0.00015, "1.5e-4"), (0.0123, "0.0123"),
    ],
)  # fmt: skip
def test_format_number_uses_the_short_decimal_or_exponent_form(value: float, text: str) -> None:
    assert format_number(value) == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_format_number_round_trips(value: float) -> None:
    text = format_number(value)
    assert float(text) == value
    assert math.copysign(1, float(text)) == math.copysign(1, value)
    assert format_number(float(text)) == text


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ('{lr: 1,\n  bad: "a\\nb",\n  last: 2}', 3),
        ("{lr: 1,\n  betas: [1,\n    {a: 2}],\n  last: 2}", 4),
        ('{lr: 1,\n  deep: {x: 1,\n    y: "a\\nb"}}', 4),
        ("{lr: 1,\n  --dashes: 1}", 3),
        ('[--lr, 1,\n  "a\\nb"]', 3),
    ],
)
def test_error_in_args_has_the_line_of_the_argument(problems, args: str, line: int) -> None:
    found = problems(f"name: x\nentrypoint: {{command: [echo], args_style: equals, args: {args}}}\n", whole=True)
    assert [problem.partition(" ")[0] for problem in found] == [f"job.yaml:{line}:"]
