"""The loader shield: DataLoader workers survive the SIGTERM that Slurm sends to all processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcaccel.submission.code.package import LOADER_SHIELD, write_sitecustomize

PROGRAM = (Path(__file__).parent / "programs" / "slow_loader.py").read_text()


@pytest.fixture
def shield(tmp_path: Path) -> Path:
    write_sitecustomize(tmp_path, LOADER_SHIELD)
    return tmp_path / LOADER_SHIELD


def start(folder: Path, path: list[Path]) -> subprocess.Popen[str]:
    (folder / "program.py").write_text(PROGRAM)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(map(str, path)), OMP_NUM_THREADS="1")
    return subprocess.Popen(
        [sys.executable, str(folder / "program.py")],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def signal_all(process: subprocess.Popen[str]) -> list[int]:
    """Send SIGTERM to the process group, as Slurm does to all processes of a step. Returns the workers' pids."""
    assert process.stdout is not None
    workers = [int(pid) for pid in process.stdout.readline().split()[1:]]
    os.killpg(process.pid, signal.SIGTERM)
    return workers


@pytest.fixture
def started(tmp_path: Path, shield: Path) -> Iterator[subprocess.Popen[str]]:
    process = start(tmp_path, [shield])
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_workers_survive_sigterm_and_end_with_their_program(started: subprocess.Popen[str]) -> None:
    workers = signal_all(started)
    out, errors = started.communicate(timeout=120)
    assert (started.returncode, out) == (0, "saved\n"), errors
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_workers_without_the_shield_die_and_fail_the_program(tmp_path: Path) -> None:
    process = start(tmp_path, [])
    signal_all(process)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "killed by signal: Terminated" in errors


def test_workers_of_a_killed_program_exit(started: subprocess.Popen[str]) -> None:
    assert started.stdout is not None
    workers = [int(pid) for pid in started.stdout.readline().split()[1:]]
    started.kill()
    started.communicate(timeout=120)
    end = time.monotonic() + 60
    while [pid for pid in workers if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_other_forked_processes_receive_sigterm(tmp_path: Path, shield: Path) -> None:
    code = (
        "import os, signal, time\n"
        "pid = os.fork()\n"
        "if not pid: time.sleep(60)\n"
        "time.sleep(0.2); os.kill(pid, signal.SIGTERM); print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    environment = dict(os.environ, PYTHONPATH=str(shield))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "-15\n"


def test_sitecustomize_of_the_environment_runs_too(tmp_path: Path, shield: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import builtins\nbuiltins.theirs = 'ran'\n")
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(shield), str(theirs)]))
    command = [sys.executable, "-c", "import sitecustomize; print(theirs, sitecustomize.__file__)"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["ran", str(theirs / "sitecustomize.py")]
    assert done.stderr == ""
