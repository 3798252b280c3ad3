"""StepCounter: the last step of rank 0, written at each step, without a system call on local file systems."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcaccel.core import durable_files, step_counter
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.step_counter import StepCounter, read_counter

KILLED = """
import os, signal, sys
from pathlib import Path
from hpcaccel.core.step_counter import StepCounter
counter = StepCounter(Path(sys.argv[1]))
for step in range(1, 2001):
    counter.write(step)
os.kill(os.getpid(), signal.SIGKILL)
"""


class Writes:
    """Counts calls of pwrite."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._pwrite = 0, os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, fd: int, data: bytes, offset: int) -> int:
        self.count += 1
        return self._pwrite(fd, data, offset)


def made(path: Path) -> RunDir:
    run = RunDir(path)
    run.create()
    return run


def written(run: RunDir, steps: int) -> int | None:
    counter = StepCounter(run.step_counter(1))
    for step in range(1, steps + 1):
        counter.write(step)
    found = read_counter(run, 1)
    counter.close()
    assert read_counter(run, 1) == found
    return None if found is None else found[0]


def test_local_disk_needs_a_system_call_for_the_first_step_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_counter, "file_system", lambda device: "ext4")
    calls = Writes(monkeypatch)
    assert written(made(tmp_path / "run"), 1000) == 1000
    assert calls.count == 1


@pytest.mark.parametrize("kind", ["nfs4", "lustre", None])
def test_other_file_systems_get_a_write_call_for_each_step(
    kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An I/O error there would kill a process that has mapped the file."""
    monkeypatch.setattr(step_counter, "file_system", lambda device: kind)
    calls = Writes(monkeypatch)
    assert written(made(tmp_path / "run"), 100) == 100
    assert calls.count == 100


def test_counter_is_written_where_the_file_cannot_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(19, "No such device")

    monkeypatch.setattr(step_counter, "file_system", lambda device: "overlay")
    monkeypatch.setattr(mmap, "mmap", refused)
    assert written(made(tmp_path / "run"), 100) == 100


def test_file_system_type_is_found_by_device() -> None:
    assert durable_files.file_system(os.stat("/dev/shm").st_dev) == "tmpfs"
    assert durable_files.file_system(os.makedev(4095, 7)) is None


def test_killed_process_has_written_its_last_step(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    ended = subprocess.run([sys.executable, "-c", KILLED, run.step_counter(1)], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    found = read_counter(run, 1)
    assert found is not None
    assert found[0] == 2000
