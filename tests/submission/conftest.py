from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core import progress_notes
from hpcaccel.core.run_dir import RunDir
from hpcaccel.submission.jobs import local
from hpcaccel.submission.runs.run_handle import Run, RunArray
from hpcaccel.submission.submit.api import submit, submit_prepared
from hpcaccel.submission.submit.prepare import prepare
from tests.slurm.fake_slurm import FakeSlurm
from tests.view.conftest import hand_made as hand_made

ROOT = Path(__file__).parents[2]

SPEC = """\
name: demo
entrypoint:
  script: train.py
  args: {lr: 3.0e-4}
slurm:
  ntasks_per_node: 2
  time: 10
runtime: {stop: signals}
resilience: {restart_in_place: 0, requeue: false}
"""

SCRIPT = """\
import os, pathlib, sys, time
print("rank", os.environ["RANK"], *sys.argv[1:], flush=True)
while pathlib.Path("hold").exists():
    time.sleep(0.05)
"""


class Project:
    """A user's project folder with a spec and a script; the current directory of the test."""

    def __init__(self, path: Path, slurm: FakeSlurm) -> None:
        self.path = path
        self.slurm: Any = slurm
        self.runs = path / "runs"

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def queue(self, *overrides: str, grid: list[str] | None = None, **options: object) -> Run | RunArray:
        """Submit to the in-memory Slurm."""
        prepared = prepare("job.yaml", cluster="slurm", overrides=overrides, grid=grid, slurm=self.slurm, **options)  # type: ignore[arg-type]
        return submit_prepared(prepared)

    def start(self, *overrides: str, grid: list[str] | None = None) -> Run | RunArray:
        """Submit to the local backend."""
        return submit("job.yaml", cluster="local", overrides=overrides, grid=grid)

    def hold(self) -> None:
        """Keep scripts running until :meth:`release`."""
        self.write("hold", "")

    def release(self) -> None:
        (self.path / "hold").unlink()

    def left(self) -> list[str]:
        """All paths in the runs folder."""
        return sorted(str(path.relative_to(self.path)) for path in self.runs.rglob("*"))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without the user's index, profiles and runs."""
    for name in [
        name for name in os.environ if name.startswith(("HPCACCEL_", "SBATCH_", "SLURM_")) and "TEST" not in name
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


@pytest.fixture
def slurm() -> FakeSlurm:
    return FakeSlurm()


@pytest.fixture
def project(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    path = tmp_path / "project"
    path.mkdir()
    monkeypatch.chdir(path)
    project = Project(path, slurm)
    project.write("job.yaml", SPEC)
    project.write("train.py", SCRIPT)
    yield project
    for file in project.runs.rglob("local.json"):
        local.kill(RunDir(file.parent))


@pytest.fixture
def told() -> Iterator[list[str]]:
    """Progress notes shown to the user."""
    found: list[str] = []
    token = progress_notes.SHOW_NOTE.set(found.append)
    yield found
    progress_notes.SHOW_NOTE.reset(token)


def eventually(question: Callable[[], object], *, patience_seconds: float = 60.0) -> None:
    deadline = time.monotonic() + patience_seconds
    while not question():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


@pytest.fixture(name="eventually")
def eventually_fixture() -> Callable[[Callable[[], object]], None]:
    return eventually
