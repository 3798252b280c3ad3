"""The tutorials of docs/tutorials: their files are saved, their commands run in order, and their output is compared.

A paragraph "Save this as `FILE`" comes before each file. A pause of the training is shortened.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.test_readme import ROOT, assert_shown

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TUTORIALS = ROOT / "docs" / "tutorials"
NOT_RUN_HERE = {
    "pip install '.[train]'": "tests/test_wheel.py installs the package",
    "pip install '.[train,sweep]'": "tests/test_wheel.py installs the package",
}


def files_of(page: str) -> dict[str, str]:
    """The files that the reader saves."""
    text = (TUTORIALS / page).read_text()
    found = re.findall(r"Save this as `([\w./]+)`.*?^```\w+\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return dict(found)


def commands_of(page: str) -> list[tuple[str, str]]:
    """Each command with the output that the page shows, in order."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", (TUTORIALS / page).read_text(), re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a line of a page in a shell, as a reader does."""
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CONFIG_HOME": str(folder / "config"),
        "OMP_NUM_THREADS": "1",
    }
    env.pop("HPCACCEL_RUNS_DIR", None)
    line = ["bash", "-c", command.replace("args.pause=0.05", "args.pause=0.005")]
    return subprocess.run(
        line, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )


def save_files(page: str, folder: Path) -> None:
    for name, text in files_of(page).items():
        (folder / name).write_text(text)


def wait_until_it_trains(folder: Path) -> None:
    """Wait for the first step of the run ``first``, as the page advises."""
    deadline = time.monotonic() + 120
    while not json.loads(run("hpcaccel status first --json", folder).stdout)["step"]:
        assert time.monotonic() < deadline, run("hpcaccel status first", folder).stdout
        time.sleep(0.2)


def follow(page: str, folder: Path, codes: dict[str, list[int]]) -> int:
    """Save the files of a page, run its commands, and compare what they print. Returns the number of commands.

    Args:
        codes: exit codes of a command each time that the page shows it; 0 for others.
    """
    save_files(page, folder)
    ran = 0
    for command, shown in commands_of(page):
        if command in NOT_RUN_HERE:
            continue
        if command == "hpcaccel stop first":
            wait_until_it_trains(folder)
        answer = run(command, folder)
        expected = codes[command].pop(0) if codes.get(command) else 0
        assert answer.returncode == expected, f"$ {command}\n{answer.stdout}"
        if shown:
            assert_shown(answer.stdout, shown)
        ran += 1
    return ran


@pytest.mark.chaos
def test_first_run(tmp_path: Path) -> None:
    codes = {
        "hpcaccel wait first": [85, 0],
        "hpcaccel submit job.yaml args.lr=fast --cluster local --wait": [1],
        "hpcaccel validate job.yaml slurm.nodes=0": [2],
    }
    assert follow("first-run.md", tmp_path, codes) == 11


@pytest.mark.chaos
def test_first_sweep(tmp_path: Path) -> None:
    save_files("first-run.md", tmp_path)
    assert follow("first-sweep.md", tmp_path, {}) == 6
    assert "script:" in (tmp_path / "best.yaml").read_text()


@pytest.mark.parametrize("page", sorted(path.name for path in TUTORIALS.glob("first-*.md")))
def test_tutorial_has_files_or_commands(page: str) -> None:
    assert commands_of(page)
