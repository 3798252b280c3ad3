"""``hpcaccel test`` on this machine: real ranks, the verdict, the exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

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
