"""Start of the program: help texts, and imports limited to what a command needs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import hpcaccel
from hpcaccel.cli.main import program
from hpcaccel.cli.root_help import OPTIONS, SECTIONS, root_page

COMMANDS = [
    "init", "schema", "validate", "render", "plan", "submit", "run", "status", "list", "logs", "wait", "explain",
    "report", "stacks", "shell", "stop", "resume", "cancel", "pull", "clean", "sweep", "cluster", "checkpoint",
]  # fmt: skip

HEAVY = ("torch", "optuna", "fabric", "numpy", "submitit")

RUN_AND_LIST = """
import json, sys
from hpcaccel.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(sys.modules)))
"""


TYPERS_PROGRAM = """
import sys
from hpcaccel.cli.main import main
main(sys.argv[1:])
"""


def modules_after(shell, *arguments):
    result = shell(*arguments, python=RUN_AND_LIST)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_help_names_every_command(shell):
    result = shell("--help")
    assert result.returncode == 0
    shown = [line.split()[0] for line in result.stdout.splitlines() if re.match(r"  [a-z]", line)]
    assert [word for word in shown if word in COMMANDS] == COMMANDS


def test_help_has_groups_whole_summaries_and_examples(shell):
    text = shell("--help").stdout
    titles = [line.rstrip(":") for line in text.splitlines() if re.fullmatch(r"[A-Z][a-z]+:", line)]
    groups = ["Submit", "Launch", "Watch", "Steer", "Sweep", "Cluster", "Checkpoint", "Help", "Training"]
    assert titles == ["Options", *groups, "Examples"]
    assert "..." not in text.partition("Submit:")[2].replace("hpcaccel.submit(function, ...)", "")
    words = " ".join(text.split())
    assert "Show where in the code the ranks of a run are, grouped by stack, outliers first." in words
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("group", ["sweep", "cluster", "checkpoint"])
def test_help_of_a_group_truncates_no_summary(shell, group):
    text = shell(group, "--help").stdout
    assert "Commands:" in text
    assert "..." not in text.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("merge-weights", "hpcaccel checkpoint convert SRC DST"),
    ],
)
def test_accelerate_commands_are_refused_with_their_replacement(shell, refused, command, instead):
    said = refused(shell(command, "--multi_gpu", "train.py"))
    assert f"hpcaccel has no command '{command}'" in said
    assert instead in said


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command):
    result = CliRunner().invoke(program(), [command, "--help"])
    assert result.exit_code == 0
    assert "Usage:" in result.stdout


def test_help_imports_no_heavy_packages(shell):
    loaded = modules_after(shell, "--help")
    for name in (*HEAVY, "rich", "pydantic", "jinja2", "yaml"):
        assert name not in loaded


def test_help_page_has_the_summaries_and_options_of_typers_program():
    root: Any = typer.main.get_command(program())
    page = " ".join(root_page(1000).split())
    for name, command in root.commands.items():
        if not command.hidden:
            summary = " ".join(command.help.split("\n\n")[0].split())
            assert f"{name} {summary}" in page
    described = [one.get_help_record(root.make_context("hpcaccel", [], resilient_parsing=True)) for one in root.params]
    assert [*described, ("-h, --help", "Show this message and exit.")] == list(OPTIONS)
    shown = {name for names in SECTIONS.values() for name in names}
    assert shown == {name for name, command in root.commands.items() if not command.hidden}


def test_help_page_and_plain_render_import_no_command_line_library(shell, spec):
    quick = RUN_AND_LIST.replace("hpcaccel.cli.main import main", "hpcaccel.__main__ import main").replace(
        "main(sys.argv[1:])", "main()"
    )
    for words in (["--help"], ["render", "job.yaml", "nodes=2"]):
        result = shell(*words, python=quick)
        assert result.returncode == 0, result.stderr
        assert "typer" not in json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "words", [["job.yaml"], ["job.yaml", "nodes=2"], ["job.yaml", "nodse=2"], ["absent.yaml"], ["broken.yaml"], ["-"]]
)
def test_plain_render_prints_what_typers_program_prints(shell, spec, words):
    (spec.parent / "broken.yaml").write_text("name: [")
    quick, whole = (shell("render", *words, python=code) for code in (None, TYPERS_PROGRAM))
    assert (quick.returncode, quick.stdout, quick.stderr) == (whole.returncode, whole.stdout, whole.stderr)
    assert quick.stdout or quick.stderr


def test_render_imports_no_training_or_submission_packages(shell, spec):
    loaded = modules_after(shell, "render", "job.yaml")
    assert "jinja2" in loaded
    for name in (*HEAVY, "rich"):
        assert name not in loaded


def test_version_option_prints_the_version(shell):
    assert shell("--version").stdout == f"hpcaccel {hpcaccel.__version__}\n"


def test_unknown_command_is_refused_with_the_closest_match(shell, refused):
    assert "Did you mean 'submit'" in refused(shell("sumbit"))


def test_a_command_imports_no_other_commands_module(shell, spec):
    loaded = modules_after(shell, "render", "job.yaml")
    assert "hpcaccel.cli.spec" in loaded
    assert not {"hpcaccel.cli.sweep", "hpcaccel.cli.launch", "hpcaccel.cli.runs"} & set(loaded)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], 2, "Usage: hpcaccel [OPTIONS] COMMAND"),
        (["-h"], 0, "Usage: hpcaccel [OPTIONS] COMMAND"),
        (["--help", "submit"], 0, "Usage: hpcaccel [OPTIONS] COMMAND"),
        (["--version", "submit"], 0, f"hpcaccel {hpcaccel.__version__}"),
        (["help"], 2, "No such command 'help'"),
        (["--hlep"], 2, "No such option"),
        (["--hlep", "submit"], 2, "No such option"),
        (["--", "render", "absent.yaml"], 2, "absent.yaml: no such file"),
        (["cluster"], 2, "Usage: hpcaccel cluster [OPTIONS] COMMAND"),
        (["cluster", "chekc"], 2, "No such command 'chekc'"),
        (["list_"], 2, "No such command 'list_'"),
    ],
)
def test_what_is_not_a_command_first(shell, words, code, said):
    result = shell(*words)
    assert (result.returncode, said in result.stdout + result.stderr) == (code, True)
