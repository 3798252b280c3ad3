"""The tutorials of docs/tutorials: their files are saved, their commands run in order, and their output is compared.

A paragraph "Save this as `FILE`" comes before each file, and "Change `FILE`:" before each diff. A pause of the training
is shortened.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_readme import ROOT, assert_shown

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TUTORIALS = ROOT / "docs" / "tutorials"
NOT_RUN_HERE = {
    "pip install '.[train]'": "tests/test_wheel.py installs the package",
    "pip install '.[train,sweep]'": "tests/test_wheel.py installs the package",
    "pip install '.[train]' accelerate": "tests/test_wheel.py installs the package",
}


def parts_of(page: str) -> Iterator[tuple[str, str, str]]:
    """What the reader does, in order: ``save`` FILE, ``change`` FILE or ``run`` COMMAND, each with its block's text."""
    text = (TUTORIALS / page).read_text()
    end = 0
    for block in re.finditer(r"^```(\w+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        asked = re.findall(r"([Ss]ave this as|Change)\s`([\w./]+)`", text[end : block.start()])
        end = block.end()
        if block[1] == "console":
            for part in re.split(r"^\$ ", block[2], flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                yield "run", command, output
        elif asked:
            word, name = asked[-1]
            yield "change" if word == "Change" else "save", name, block[2]


def files_of(page: str) -> dict[str, str]:
    """The files that the reader saves."""
    return {name: text for action, name, text in parts_of(page) if action == "save"}


def commands_of(page: str) -> list[tuple[str, str]]:
    """Each command with the output that the page shows, in order."""
    return [(command, output) for action, command, output in parts_of(page) if action == "run"]


def changed(text: str, diff: str) -> str:
    """``text`` with the changes of a diff, whose parts are separated by lines ``@@``."""
    for part in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = part.splitlines(keepends=True)
        old, new = ("".join(line[1:] or "\n" for line in lines if line[0] in (" ", sign, "\n")) for sign in "-+")
        assert text.count(old) == 1, f"the page changes lines that the file does not have once:\n{old}"
        text = text.replace(old, new)
    return text


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


def wait_until_it_trains(name: str, folder: Path) -> None:
    """Wait for the first step of the run ``name``, as the pages advise."""
    deadline = time.monotonic() + 120
    while not json.loads(run(f"hpcaccel status {name} --json", folder).stdout)["step"]:
        assert time.monotonic() < deadline, run(f"hpcaccel status {name}", folder).stdout
        time.sleep(0.2)


def follow(page: str, folder: Path, codes: dict[str, list[int]]) -> int:
    """Save and change the files of a page, run its commands, and compare what they print.

    Args:
        codes: exit codes of a command each time that the page shows it; 0 for others.

    Returns:
        the number of commands that were run.
    """
    ran = 0
    for action, name, text in parts_of(page):
        file = folder / name
        if action == "save":
            file.write_text(text)
        elif action == "change":
            file.write_text(changed(file.read_text(), text))
        elif name not in NOT_RUN_HERE:
            run_and_compare(name, text, folder, codes)
            ran += 1
    return ran


def run_and_compare(command: str, shown: str, folder: Path, codes: dict[str, list[int]]) -> None:
    if command.startswith("hpcaccel stop "):
        wait_until_it_trains(command.split()[-1], folder)
    answer = run(command, folder)
    expected = codes[command].pop(0) if codes.get(command) else 0
    assert answer.returncode == expected, f"$ {command}\n{answer.stdout}"
    if shown:
        assert_shown(answer.stdout, shown)


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


@pytest.mark.chaos
def test_from_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    assert follow("from-accelerate.md", tmp_path, {"hpcaccel wait moved": [85, 0]}) == 9


@pytest.mark.chaos
def test_from_submitit(tmp_path: Path) -> None:
    assert follow("from-submitit.md", tmp_path, {"hpcaccel wait fit": [85, 0]}) == 10


@pytest.mark.chaos
def test_from_sbatch(tmp_path: Path) -> None:
    codes = {"hpcaccel wait fit": [85, 0], "hpcaccel validate job.yaml slurm.time=soon nodes=0": [2]}
    assert follow("from-sbatch.md", tmp_path, codes) == 11


@pytest.mark.parametrize("page", sorted(path.name for path in TUTORIALS.glob("f*-*.md")))
def test_tutorial_has_files_or_commands(page: str) -> None:
    assert commands_of(page)


def test_changes_of_the_tutorials_fit_their_files() -> None:
    for page in ("from-accelerate.md", "from-sbatch.md"):
        files: dict[str, str] = {}
        for action, name, text in parts_of(page):
            if action != "run":
                files[name] = text if action == "save" else changed(files[name], text)
        compile(files["train.py"], page, "exec")
