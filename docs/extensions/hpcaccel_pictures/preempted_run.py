"""The session in the README's terminal: ``jobs/gpt`` on the development cluster, preempted once by another job."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hpcaccel_pictures.recorder import Recorder
from hpcaccel_pictures.recording import Recording

__all__ = ["record_preempted_run"]

ROOT = Path(__file__).resolve().parents[3]
CLUSTER = str(ROOT / "docker" / "cluster")
SPEC = "jobs/gpt/job.yaml"
COLUMNS, ROWS = 92, 40
SHOWN_FOLDER = "/scratch/ada"
PREEMPT_AFTER = 0.45
"""Fraction of the steps after which the other job comes."""
URGENT_SECONDS = 15
LOOK_SECONDS = 2.0
LONGEST_SECONDS = 900


def record_preempted_run() -> Recording:
    """Start a cluster of two nodes, submit the job, preempt it, and record the terminal until the run has completed.

    Raises:
        RuntimeError: the run did not complete in two attempts without a lost step, or the output names this machine.
    """
    with _cluster() as (folder, environment):
        title = f"hpcaccel submit {SPEC} --wait"
        recorder = Recorder(columns=COLUMNS, rows=ROWS, title=title, folder=ROOT, environment=environment)
        recorder.run(f"hpcaccel validate {SPEC}")
        other = threading.Thread(target=_preempt, args=(recorder, folder, environment), daemon=True)
        other.start()
        code = recorder.run(f"hpcaccel submit {SPEC} --wait")
        recorder.prompt()
        status = _status(environment)
        if (code, status.get("attempts"), status.get("steps_lost")) != (0, 2, 0):
            raise RuntimeError(f"the run was to complete in two attempts: exit code {code}, {status}")
        recording = recorder.recording.with_replaced({str(folder): SHOWN_FOLDER, str(ROOT): "~/hpcaccel"})
        if any(re.search(rf"\b{re.escape(socket.gethostname())}\b", text) for _, _, text in recording.events):
            raise RuntimeError(f"the output has the name of this machine, {socket.gethostname()}")
        return recording


@contextmanager
def _cluster() -> Iterator[tuple[Path, dict[str, str]]]:
    """A cluster in a folder of its own; the environment of a shell that uses it."""
    folder = Path(tempfile.mkdtemp(prefix="hpcaccel-pictures-", dir="/var/tmp"))
    folder.chmod(0o755)  # munge requires that its socket is accessible to all users
    root = ["--root", str(folder / "cluster")]
    try:
        subprocess.run([CLUSTER, "up", *root, "--nodes", "2"], check=True)
        exports = subprocess.run([CLUSTER, "env", *root], check=True, capture_output=True, text=True).stdout
        pairs = (shlex.split(line)[1].partition("=") for line in exports.splitlines())
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {
            **os.environ,
            "PATH": path,
            **{name: value.replace("$PATH", path) for name, _, value in pairs},
            "HPCACCEL_RUNS_DIR": str(folder / "runs"),
            "XDG_STATE_HOME": str(folder / "state"),
            "XDG_CONFIG_HOME": str(folder / "config"),
            "OMP_NUM_THREADS": "1",
        }
        yield folder, environment
    finally:
        subprocess.run([CLUSTER, "down", *root], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _preempt(recorder: Recorder, folder: Path, environment: Mapping[str, str]) -> None:
    """Submit a job of a higher priority to the run's node once the run is on its way."""
    deadline = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < deadline:
        status = _status(environment)
        if (status.get("step") or 0) >= PREEMPT_AFTER * (status.get("total_steps") or float("inf")):
            break
        time.sleep(LOOK_SECONDS)
    squeue = ["squeue", "--noheader", "--partition=gpu", "--states=running", "--format=%N"]
    node = subprocess.run(squeue, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    command = f"sbatch --partition=urgent --nodelist={node} --exclusive --wrap 'sleep {URGENT_SECONDS}'"
    recorder.typed_elsewhere(command)
    subprocess.run(shlex.split(command), cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)


def _status(environment: Mapping[str, str]) -> dict[str, Any]:
    """What ``hpcaccel status`` tells about the run; empty before it exists."""
    command = ["hpcaccel", "status", "gpt", "--json"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found: dict[str, Any] = json.loads(answer.stdout) if answer.returncode == 0 else {}
    return found
