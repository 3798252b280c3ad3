from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.fake_slurm import FakeSlurm
from tests.sweeps.hosting import OPEN
from tests.sweeps.sweeping import Place


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty index and no profiles, and remove the variables of a surrounding job."""
    for name in os.environ:
        if name.startswith(("HPCACCEL_", "SBATCH_", "SLURM_")) and "TEST" not in name:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def place(own_home: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A directory with a sweep file, and an in-memory Slurm."""
    path = tmp_path / "project"
    path.mkdir()
    monkeypatch.chdir(path)
    return Place(path, FakeSlurm())


@pytest.fixture
def hosts_end(own_home: None) -> Iterator[None]:
    """Close the fake workers of the test at its end."""
    yield
    while OPEN:
        OPEN.pop().close()
