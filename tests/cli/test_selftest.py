"""``hpcaccel test`` on this machine: real ranks, the verdict, the exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcaccel.cli import selftest_ranks
from hpcaccel.cli.selftest import _ranks_inside
from hpcaccel.launch import gpus
from hpcaccel.submission.submit.salloc import SallocAllocation

pytestmark = pytest.mark.torch


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without free space."""
    folder = tmp_path / "full"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=1m", "hpcaccel-test", str(folder)]
    mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"this machine does not allow a mount: {mounted.stderr.strip()}")
    with (folder / "data").open("wb", buffering=0) as file:
        file.write(bytes(2 << 20))  # a partial write
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_ranks_on_this_machine_pass(shell):
    result = shell("test", "--json", "--num-processes", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads(result.stdout)
    (node,) = document["nodes"].values()
    assert (document["verdict"], node["ranks"]) == ("ok", [0, 1])
    assert document["checks"]["checkpoint"]["states"] == {"ok": 2}
    assert [link["ranks"] for link in document["links"]] == [[0, 1]]
    assert result.stderr.startswith("testing this machine with 2 ranks")
    assert "  rendezvous\n" in result.stderr
    assert list(shell.folder.iterdir()) == [], "nothing is left behind"


def test_full_runs_directory_is_bad_and_named(shell, full_disk):
    result = shell("test", "--num-processes", "1", "--runs-dir", str(full_disk))
    assert result.returncode == 1, result.stderr
    assert f"cannot write 8.4 MB to {full_disk}" in result.stdout
    assert "to do: free space" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("bad: ")


def test_ranks_that_cannot_start_are_bad_and_their_output_is_shown(shell):
    broken = shell.write("broken/torch/__init__.py", "raise ImportError('libcudart.so.12 is missing')\n").parent.parent
    shell.environment["PYTHONPATH"] = f"{broken}:{shell.environment['PYTHONPATH']}"
    result = shell("test", "--num-processes", "1")
    assert result.returncode == 1, result.stderr
    assert "rank 0 of 1 left no result" in result.stdout
    assert "libcudart.so.12 is missing" in result.stderr


def test_interrupted_test_leaves_no_rank(shell):
    command = [sys.executable, "-m", "hpcaccel", "test", "--num-processes", "2"]
    testing = subprocess.Popen(
        command, cwd=shell.folder, env=shell.environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert testing.stderr is not None
    assert "testing this machine" in testing.stderr.readline()
    assert "environment" in testing.stderr.readline()
    ours = ranks_of(shell)
    assert len(ours) == 4, "two ranks, each a process and the child in which its checks run"
    testing.send_signal(signal.SIGINT)
    testing.communicate(timeout=60)
    assert testing.returncode == 130
    end = time.monotonic() + 10
    while ranks_of(shell) and time.monotonic() < end:
        time.sleep(0.1)
    assert ranks_of(shell) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_ended_test_leaves_no_rank_and_no_folder(shell, number):
    hangs = shell.write("hangs/torch/__init__.py", "import time\ntime.sleep(60)\n").parent.parent
    shell.environment["PYTHONPATH"] = f"{hangs}:{shell.environment['PYTHONPATH']}"
    for name in ("tmp", "runs"):
        (shell.folder / name).mkdir()
    shell.environment["TMPDIR"] = str(shell.folder / "tmp")
    command = [sys.executable, "-m", "hpcaccel", "test", "--num-processes", "2", "--runs-dir", "runs"]
    testing = subprocess.Popen(command, cwd=shell.folder, env=shell.environment, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(ranks_of(shell)) == 4)
    folders = [*shell.folder.glob("tmp/hpcaccel-test-*"), *shell.folder.glob("runs/selftest-*")]
    assert len(folders) == 2
    testing.send_signal(number)
    assert testing.wait(timeout=30) == (-number if number == signal.SIGKILL else 128 + number)
    wait_for(lambda: ranks_of(shell) == [])
    if number != signal.SIGKILL:
        assert not any(folder.exists() for folder in folders)


def wait_for(condition: Callable[[], bool], *, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not within the time limit"
        time.sleep(0.05)


def ranks_of(shell) -> list[int]:
    """Processes that run the self-test's program in the folder of ``shell``."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes()
            here = os.readlink(entry / "cwd")
        except OSError:
            continue
        if b"hpcaccel.runtime.selftest" in words and here == str(shell.folder):
            found.append(int(entry.name))
    return found


AROUND = SallocAllocation(job_id="7", nodes=("n1", "n2"), cpus_per_node=(8, 8), partition="gpu")


@pytest.mark.parametrize(
    ("variables", "allocated", "expected"),
    [
        ({"SLURM_GPUS_ON_NODE": "4", "SLURMD_NODENAME": "n1"}, "", "slurm.gpus_per_node=4"),
        ({"SLURMD_NODENAME": "n1"}, "", "slurm.ntasks_per_node=1"),
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, "", "slurm.gpus_per_node=4"),
        ({}, "cpu=16,node=2,gres/gpu=8", "slurm.gpus_per_node=4"),
        ({}, "cpu=16,node=2", "slurm.ntasks_per_node=1"),
    ],
)
def test_shell_of_an_allocation_runs_a_rank_on_each_gpu(monkeypatch, variables, allocated, expected):
    """The shell of salloc runs on a login node, where Slurm sets no SLURM_GPUS_ON_NODE."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("hpcaccel.slurm.Slurm.job_record", lambda *_: {"AllocTRES": allocated})
    assert _ranks_inside(AROUND) == expected


def test_gpus_of_all_vendors_are_counted(monkeypatch):
    for name in gpus._VISIBLE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpus, "_nvidia", lambda: 0)
    monkeypatch.setattr(gpus, "_amd", lambda system: 8)
    assert selftest_ranks._gpu_count() == 8
    monkeypatch.setenv("ZE_AFFINITY_MASK", "0,1")
    assert selftest_ranks._gpu_count() == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-processes", "2", "--nodes", "2"], "--num-processes 2 is for a test on this machine"),
        (["slurm.partition=gpu"], "'slurm.partition=gpu' sets a value of a job's spec"),
        (["--cluster", "nowhere"], "nowhere"),
        (["--report", "no-such-run"], "no-such-run"),
        (["--num-processes", "0"], "Invalid value for '--num-processes'"),
    ],
)
def test_invalid_use_is_an_error_of_one_line(shell, words, message):
    result = shell("test", *words)
    assert (result.returncode, message in result.stderr, "Traceback" in result.stderr) == (2, True, False)


def test_report_of_another_run_is_refused(shell):
    shell.write("job.yaml", "name: other\nentrypoint: {command: [echo, hi]}\nslurm: {ntasks_per_node: 1, time: 10}\n")
    submitted = shell("submit", "job.yaml", "--cluster", "local", "--json", "--wait")
    assert submitted.returncode == 0, submitted.stderr
    result = shell("test", "--report", "other")
    assert (result.returncode, "is not a self-test: it runs echo hi" in result.stderr) == (2, True), result.stderr
