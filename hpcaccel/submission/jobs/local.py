"""Jobs of the local backend: ``bash job.sbatch`` is started at once, detached from the submitting process.

The batch step (``node/batch.py``) replaces that bash by exec, and a requeue replaces the batch step, so that the job
keeps its process id. The process id is recorded together with the process's start time, because ids are reused.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcaccel.core.durable_files import atomic_write, read_json, write_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import ClusterError

__all__ = ["LocalProcess", "kill", "local_process", "new_job_id", "start", "start_array", "start_workers", "terminate"]

_JOB_SHAPE = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "SUBMITIT_", "TORCHELASTIC_")
_RANK_NAMES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
    "HPCACCEL_RUN_DIR", "HPCACCEL_ATTEMPT", "HPCACCEL_PROTOCOL", "HPCACCEL_DEADLINE", "HPCACCEL_LOCAL_JOB",
    "HPCACCEL_RESTART_COUNT", "HPCACCEL_BATCH", "HPCACCEL_KILLED", "HPCACCEL_EXPEDITE",
    "HPCACCEL_WORKER_JOB", "HPCACCEL_KILL_WAIT", "HPCACCEL_PROCTRACK", "HPCACCEL_WORKER_END", "HPCACCEL_NODES_CHECKED",
    "HPCACCEL_SLOT",
}  # fmt: skip
_KEPT = {"SLURM_CONF"}
_GATE = ("bash", "-c", 'IFS= read -r go || exit; exec "$@" < /dev/null', "bash")
"""Starts the job when a line arrives on stdin, which is sent once the job is recorded. If the submitting process is
killed before that, stdin ends and the job does not start."""


@dataclass(frozen=True, kw_only=True)
class LocalProcess:
    """The process of a local job. ``pid_start`` is in clock ticks since boot."""

    job_id: str
    host: str
    pid: int
    pid_start: int

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the process is alive; False for processes of other hosts, which cannot be checked."""
        return self.is_here and process_start(self.pid) == self.pid_start


def new_job_id() -> str:
    return f"local-{secrets.token_hex(4)}"


def start(run: RunDir, script: Path, job_id: str) -> None:
    """Start a run's script.

    Raises:
        ClusterError: there is no bash.
    """
    _launch(["bash", str(script)], job_id=job_id, log=run.slurm_log, owners=[run])


def start_array(parent: RunDir, script: Path, job_id: str, indices: Sequence[int]) -> None:
    """Start a process that runs the tasks of an array one after another.

    A task that has been stopped or cancelled before its turn exits at once. Raises the errors of :func:`start`.
    """
    atomic_write(parent.local_driver, _driver_text(parent, script, job_id, indices), mode=0o750)
    owners = [parent.task(index) for index in indices]
    _launch(["bash", str(parent.local_driver)], job_id=job_id, log=parent.slurm_log, owners=owners)


def start_workers(sweep: SweepDir, script: Path, indices: Sequence[int]) -> dict[int, str]:
    """Start the workers of a sweep, and return the job id of each. If one cannot be started, the others are killed."""
    job_id = new_job_id()
    started: dict[int, str] = {}
    try:
        for index in indices:
            worker = sweep.worker(index)
            started[index] = f"{job_id}_{index}"
            own = {"SLURM_ARRAY_TASK_ID": str(index)}
            command = ["bash", str(script)]
            _launch(command, job_id=started[index], log=worker.slurm_log, owners=[worker], variables=own)
    except BaseException:
        for index in started:
            kill(sweep.worker(index))
        raise
    return started


def _driver_text(parent: RunDir, script: Path, job_id: str, indices: Sequence[int]) -> str:
    tasks = shlex.quote(str(parent.tasks))
    return f"""#!/bin/bash
# The tasks of a local array, one after another.
for index in {" ".join(map(str, indices))}; do
    export SLURM_ARRAY_TASK_ID="$index" HPCACCEL_LOCAL_JOB={shlex.quote(job_id)}_"$index"
    bash {shlex.quote(str(script))} >> {tasks}/"$index"/{parent.slurm_log.name} 2>&1 < /dev/null
done
"""


def _launch(
    command: list[str], *, job_id: str, log: Path, owners: Sequence[RunDir], variables: Mapping[str, str] | None = None
) -> None:
    with log.open("ab") as output:
        try:
            process = subprocess.Popen(
                [*_GATE, *command],
                env={**_job_environment(os.environ, job_id), **(variables or {})},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_unblock_signals,
            )
        except FileNotFoundError:
            raise ClusterError("the local backend needs bash, which is not on PATH") from None
    process_record = LocalProcess(
        job_id=job_id, host=socket.gethostname(), pid=process.pid, pid_start=process_start(process.pid) or 0
    )
    try:
        for run in owners:
            write_json(run.local_process, asdict(process_record))
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    # Reap the job when it ends, because the submitting process may outlive it.
    threading.Thread(target=process.wait, daemon=True).start()


def _unblock_signals() -> None:
    # Reset the inherited signal mask: the submitting process blocks signals at this point.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _job_environment(base: Mapping[str, str], job_id: str) -> dict[str, str]:
    """``base`` plus the local job's id, minus the variables of a Slurm job or rank that this process may be part of."""
    kept = {
        name: value
        for name, value in base.items()
        if name in _KEPT or (name not in _RANK_NAMES and not name.startswith(_JOB_SHAPE))
    }
    return {**kept, "HPCACCEL_LOCAL_JOB": job_id}


def local_process(run: RunDir) -> LocalProcess | None:
    value = read_json(run.local_process)
    return None if value is None else LocalProcess(**value)


def terminate(run: RunDir) -> None:
    """Send SIGTERM to a local job.

    If there is no process to signal (the job runs on another host, or the task has not started), the request in the
    control directory has the same effect a little later.
    """
    process = local_process(run)
    if process is None or not process.is_alive:
        return
    if run.is_task:
        # The recorded process runs all tasks one after another; a task's own process is its supervisor.
        lease = read_json(run.lease)
        if lease is not None and process_start(lease["pid"]) == lease["pid_start"]:
            os.kill(lease["pid"], signal.SIGTERM)
        return
    # Signal the whole process group: bash alone would first wait for the setup line that it is running.
    os.killpg(process.pid, signal.SIGTERM)


def kill(run: RunDir, *, timeout_seconds: float = 5.0) -> None:
    """End a local job that has just been started, with all processes of its group: SIGTERM, then SIGKILL."""
    owner = (
        run if run.local_process.exists() else next((one for one in _tasks(run) if one.local_process.exists()), None)
    )
    process = local_process(owner) if owner is not None else None
    if process is None or not process.is_alive:
        return
    os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_seconds
    while process.is_alive and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.is_alive:
        os.killpg(process.pid, signal.SIGKILL)


def _tasks(parent: RunDir) -> list[RunDir]:
    return [RunDir(path) for path in parent.tasks.iterdir()] if parent.tasks.is_dir() else []
