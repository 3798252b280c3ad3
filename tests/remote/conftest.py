from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .login_node import LoginNode, why_no_sshd

STAND_IN = Path(__file__).with_name("stand_in_slurm.py")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[LoginNode]:
    """A login node with a queue that accepts jobs and starts none."""
    if (reason := why_no_sshd()) is not None:
        pytest.skip(f"no login node: {reason}")
    queue = tmp_path / "queue"
    queue.mkdir()
    (queue / "jobs").touch()
    commands = tmp_path / "slurm"
    commands.mkdir()
    program = commands / "stand_in"
    program.write_text(f"#!{os.path.realpath(sys.executable)} -S\n{STAND_IN.read_text()}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    for name in ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "sacct", "sacctmgr", "srun"):
        (commands / name).symlink_to(program)
    made = LoginNode(tmp_path / "login", path=str(commands), env={"STAND_IN_QUEUE": str(queue)})
    made.start()
    yield made
    made.stop()


@pytest.fixture
def client(node: LoginNode, monkeypatch: pytest.MonkeyPatch) -> LoginNode:
    """The login node, with this process as the client."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "XDG_", "SSH_", "HPCACCEL_RUNS"))]:
        monkeypatch.delenv(name)
    for name, value in node.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(node.client)
    return node
