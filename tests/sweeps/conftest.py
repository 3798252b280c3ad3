from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcaccel.slurm.fake import FakeSlurm
from tests.sweeps.sweeping import Place


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """A folder with a sweep in it; nobody's index, profiles or runs."""
    for name in os.environ:
        if name.startswith(("HPCACCEL_", "SBATCH_", "SLURM_")) and "TEST" not in name:
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "project"
    path.mkdir()
    monkeypatch.chdir(path)
    return Place(path, FakeSlurm())
