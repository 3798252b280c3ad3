"""docs/how-to: the commands of each recipe run on the local backend; a block that is not run says why."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from hpcaccel.spec import spec_from_values
from hpcaccel.spec.loading.workflow import read_jobs
from tests.test_readme import ROOT, run

FOLDER = ROOT / "docs" / "how-to"
RECIPES = [
    "queue-several-jobs", "kill-switch", "save-switch", "hang-watchdog", "low-disk-alerts", "forced-preemption",
    "faulty-nodes", "group-ownership", "crontab-emulation", "job-array-trains", "cpus-per-task", "inode-quotas",
]  # fmt: skip
JOB = """\
name: gpt
entrypoint: {script: train.py}
slurm: {ntasks_per_node: 1, time: "10:00"}
runtime: {stop: signals}
"""
TRAIN = """\
import pathlib, sys, time
mark = pathlib.Path("short")
time.sleep(0 if mark.exists() else 300)
"""


class Block(NamedTuple):
    language: str
    text: str
    reason: str
    """Why it is not run; empty if it is."""


def blocks(name: str) -> list[Block]:
    text = (FOLDER / f"{name}.md").read_text()
    found = re.findall(r"(?:^<!-- not run: (.*?) -->\n\n)?^```(\w+)\n(.*?)^```", text, re.M | re.S)
    return [Block(language, body, reason) for reason, language, body in found]


def commands(name: str) -> list[str]:
    shown = [one.text for one in blocks(name) if one.language == "console" and not one.reason]
    return [line.removeprefix("$ ") for text in shown for line in text.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable, place in (("XDG_CONFIG_HOME", "config"), ("HOME", "")):
        monkeypatch.setenv(variable, str(tmp_path / place))
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "train.py").write_text(TRAIN)
    several = [one.text for one in blocks("queue-several-jobs") if one.language == "yaml"]
    (tmp_path / "several.yaml").write_text(several[0])
    tmp_path.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("name", [name for name in RECIPES if commands(name)])
def test_commands_of_the_recipe_run(folder: Path, name: str) -> None:
    if name == "save-switch":  # a program that is stopped by signals has no checkpoints of hpcaccel
        (folder / "job.yaml").write_text(JOB.replace("signals", "cooperative"))
    if any("--wait" in command for command in commands(name)):
        (folder / "short").touch()
    try:
        for command in commands(name):
            answer = run(shlex.split(command), folder)
            assert answer.returncode == (85 if command == "hpcaccel wait gpt" else 0), f"{command}\n{answer.stdout}"
            if "cpus_per_task=8" in command:
                assert "#SBATCH --cpus-per-task=8" in answer.stdout
                assert "SRUN_CPUS_PER_TASK=8" in answer.stdout
            if "begin=" in command:
                assert "#SBATCH --begin=now+1day" in answer.stdout
    finally:
        if any("submit" in command and "dry-run" not in command for command in commands(name)):
            run(["hpcaccel", "cancel", "gpt"], folder)


@pytest.mark.parametrize("name", RECIPES)
def test_settings_of_the_recipe_are_valid(folder: Path, name: str) -> None:
    assert (FOLDER / f"{name}.md").read_text().startswith("# ")
    for block in blocks(name):
        assert block.language in ("console", "yaml", "text"), block
        if block.language != "yaml":
            continue
        values = yaml.safe_load(block.text)
        if "jobs" in values:
            assert [job.name for job in read_jobs(folder / "several.yaml")] == ["prepare", "train", "evaluate"]
            continue
        base = {"name": "gpt", "entrypoint": {"command": ["true"]}}
        spec = spec_from_values({**base, **values})
        assert values.keys() <= spec.model_dump().keys()


def test_every_recipe_of_the_list_has_a_page() -> None:
    assert all((FOLDER / f"{name}.md").is_file() for name in RECIPES)
    assert all(len(block.reason.split()) > 3 for name in RECIPES for block in blocks(name) if block.reason)
