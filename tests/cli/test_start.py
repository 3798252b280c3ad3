"""How the program starts: quickly, with plain help, and without what a command does not need."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import hpcaccel
from hpcaccel.cli.main import app

COMMANDS = [
    "init", "schema", "validate", "render", "plan", "submit", "run", "logs", "pull", "shell", "status", "list", "wait",
    "explain", "clean", "report", "stop", "resume", "cancel", "stacks", "cluster", "sweep", "checkpoint",
]  # fmt: skip

HEAVY = ("torch", "optuna", "fabric", "numpy", "submitit")

RUN_AND_LIST = """
import json, sys
from hpcaccel.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(sys.modules)))
"""


def modules_after(shell, *arguments):
    result = shell(*arguments, python=RUN_AND_LIST)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_help_names_every_command(shell):
    result = shell("--help")
    assert result.returncode == 0
    listed = [line.split()[0] for line in result.stdout.partition("Commands:")[2].splitlines() if line.strip()]
    assert listed == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_help_imports_next_to_nothing(shell):
    loaded = modules_after(shell, "--help")
    for name in (*HEAVY, "rich", "pydantic", "jinja2", "yaml"):
        assert name not in loaded


def test_render_imports_nothing_that_trains_or_submits(shell, spec):
    loaded = modules_after(shell, "render", "job.yaml")
    assert "jinja2" in loaded
    for name in (*HEAVY, "rich"):
        assert name not in loaded


def test_the_version(shell):
    assert shell("--version").stdout == f"hpcaccel {hpcaccel.__version__}\n"


def test_a_command_that_is_none_is_refused_with_the_closest_one(shell, refused):
    assert "Did you mean 'submit'" in refused(shell("sumbit"))
