"""Signals to process groups and processes whose numbers others may have by now."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcaccel.core.process_identity import process_start
from hpcaccel.node.launchers import process_groups
from hpcaccel.node.launchers.process_groups import KnownProcesses, ProcessGroups


def leader(command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", "-c", command], start_new_session=True)


def is_alive(pid: int) -> bool:
    return process_start(pid) is not None


def test_group_that_outlives_its_leader_is_killed_and_an_empty_one_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with leader(f"sleep 600 & echo $! > {tmp_path}/left") as leaves, leader("exit 3") as empty:
        groups = ProcessGroups([leaves, empty])
        assert (leaves.wait(), empty.wait()) == (0, 3)
        groups.look()
        signalled, killpg = [], os.killpg
        monkeypatch.setattr(os, "killpg", lambda group, number: (signalled.append(group), killpg(group, number)))
        groups.send(signal.SIGKILL)
        left = int((tmp_path / "left").read_text())
        for _ in range(500):
            if not is_alive(left):
                break
            time.sleep(0.02)
        assert not is_alive(left)
    assert set(signalled) == {leaves.pid}  # the other number may be that of a group of somebody else


def test_running_leaders_are_signalled() -> None:
    with leader("sleep 600") as running:
        groups = ProcessGroups([running])
        groups.look()
        groups.send(signal.SIGTERM)
        assert running.wait(timeout=60) == -signal.SIGTERM


def test_process_with_the_number_of_an_ended_one_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        known = KnownProcesses()
        known.add([process.pid])
        assert known.alive() == [process.pid]
        start = process_start(process.pid)
        monkeypatch.setattr(process_groups, "process_start", lambda pid: (start or 0) + 100)
        assert known.alive() == []
        monkeypatch.undo()
        process.communicate(b"\n")
    assert known.alive() == []
