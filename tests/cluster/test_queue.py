"""Many commands share one squeue, on a real Slurm whose daemons are stopped meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .dev_cluster import Cluster, own_cluster, program, wait_until
from .scenario import Scenario

pytestmark = pytest.mark.chaos

RUNS = 6
WAITS_EACH = 3


@pytest.fixture(scope="module")
def own() -> Iterator[Cluster]:
    """A cluster whose daemons may be stopped."""
    with own_cluster("--nodes", "2") as cluster:
        yield cluster


class Counted:
    """A cluster whose squeue, sacct and scontrol record each call."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.asked_file = folder / "asked"
        self.path = folder / "programs"
        self.path.mkdir()
        for name in ("squeue", "sacct", "scontrol"):
            real = shutil.which(name)
            (self.path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {self.asked_file}\nexec {real} "$@"\n')
            (self.path / name).chmod(0o755)

    def taken(self) -> list[str]:
        """Names of the programs called since the last ``taken``."""
        words = [line.split()[0] for line in self.asked_file.read_text().splitlines()]
        self.asked_file.write_text("")
        return words


def test_commands_share_one_squeue_and_outages_are_shown_as_notes(own: Cluster, tmp_path: Path) -> None:
    counted = Counted(own, tmp_path)
    run = Scenario(own, tmp_path)
    run.env |= {"PATH": f"{counted.path}:{run.env['PATH']}", "HPCACCEL_QUEUE_SECONDS": "600"}
    ids = []
    for _ in range(RUNS):
        run.plain(slurm={"begin": "now+1hour"})
        ids.append(run.dir.run_id)
    counted.taken()

    wait = [sys.executable, "-m", "hpcaccel", "wait"]
    waits = [
        subprocess.Popen([*wait, run_id], env=run.env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        for run_id in ids * WAITS_EACH
    ]
    try:
        for one in waits:
            assert one.stderr is not None
            assert one.stderr.readline().startswith("pending: BeginTime")
        assert {one["state"] for one in json.loads(run.cli("list", "--json").stdout)} == {"pending"}
        assert counted.taken() == ["squeue"]

        for daemon in ("slurmdbd", "slurmctld"):
            program("fail", "--root", str(own.root), daemon)
        run.env["HPCACCEL_QUEUE_SECONDS"] = "1"
        listed = run.cli("list")
        assert listed.stdout.count("pending") == RUNS
        assert "note: Slurm does not respond" in listed.stderr
        assert "the states shown are from" in listed.stderr
        asked = set(counted.taken())
        assert asked == {"squeue"}
        assert all(one.poll() is None for one in waits)
    finally:
        for one in waits:
            one.terminate()
            one.communicate()
        for daemon in ("slurmdbd", "slurmctld"):  # slurmdbd first: slurmctld has no state files yet
            program("restore", "--root", str(own.root), daemon)
    wait_until(lambda: own.run("sinfo", check=False).returncode == 0, "slurmctld is back")
    run.cli("cancel", ids[0])
    states = [one["state"] for one in json.loads(run.cli("list", "--json").stdout)]
    assert sorted(states) == ["cancelled"] + ["pending"] * (RUNS - 1)
    for run_id in ids[1:]:
        run.cli("cancel", run_id)


def test_job_state_without_slurmdbd_comes_from_squeue_and_scontrol(own: Cluster, tmp_path: Path) -> None:
    run = Scenario(own, tmp_path)
    program("fail", "--root", str(own.root), "slurmdbd")
    try:
        run.plain("--until", "1")
        assert run.wait_until_over() == 0, run.story
        run.plain(slurm={"begin": "now+1hour"})
        assert run.status()["state"] == "pending"
        # A job that Slurm has never had: of a recent run, and of a run that is older than Slurm's memory.
        record = json.loads(run.dir.record.read_text())
        own.run("scancel", run.job_id)
        run.dir.record.write_text(json.dumps({**record, "job_ids": ["99999"]}))
        assert run.status()["state"] == "pending"
        assert "although it did recently" in run.status()["detail"]
        old = run.dir.record.stat().st_mtime - 3600
        os.utime(run.dir.record, (old, old))
        assert run.status()["state"] == "lost"
    finally:
        program("restore", "--root", str(own.root), "slurmdbd")
