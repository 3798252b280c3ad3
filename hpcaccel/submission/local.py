"""The local backend's queue, which is none: ``bash job.sbatch`` starts at once, detached from whoever submitted it.

The batch step (``node/batch.py``) replaces that bash and a requeue replaces the batch step, so one process id stands
for the job as long as it lives. It is written down with its start time, since a process id alone is used again.
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

from hpcaccel.core.process_identity import process_start
from hpcaccel.core.run_dir import RunDir, SweepDir, atomic_write, read_json, write_json
from hpcaccel.errors import ClusterError

__all__ = ["LocalProcess", "kill", "local_process", "new_job_id", "start", "start_array", "start_workers", "terminate"]

_JOB_SHAPE = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI_", "PMIX_", "SUBMITIT_", "TORCHELASTIC_")
_RANK_NAMES = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
    "HPCACCEL_RUN_DIR", "HPCACCEL_ATTEMPT", "HPCACCEL_PROTOCOL", "HPCACCEL_DEADLINE", "HPCACCEL_LOCAL_JOB",
    "HPCACCEL_RESTART_COUNT", "HPCACCEL_BATCH", "HPCACCEL_KILLED", "HPCACCEL_EXPEDITE",
    "HPCACCEL_WORKER_JOB", "HPCACCEL_KILL_WAIT", "HPCACCEL_WORKER_END", "HPCACCEL_NODES_CHECKED", "HPCACCEL_SLOT",
}  # fmt: skip
_KEPT = {"SLURM_CONF"}
_GATE = ("bash", "-c", 'IFS= read -r go || exit; exec "$@" < /dev/null', "bash")
"""Begins the job once it is written down. Where whoever submits it is killed before, its standard input ends, and no
job runs that nobody knows of."""


@dataclass(frozen=True, kw_only=True)
class LocalProcess:
    """Which process is a local job. ``pid_start`` counts clock ticks since boot."""

    job_id: str
    host: str
    pid: int
    pid_start: int

    @property
    def is_here(self) -> bool:
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether it lives, as far as this host can tell: of another host's processes nothing is known."""
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
    """Start tasks of an array, one after another. A task that must not run any more ends by itself at once."""
    atomic_write(parent.local_driver, _driver_text(parent, script, job_id, indices), mode=0o750)
    owners = [parent.task(index) for index in indices]
    _launch(["bash", str(parent.local_driver)], job_id=job_id, log=parent.slurm_log, owners=owners)


def start_workers(sweep: SweepDir, script: Path, indices: Sequence[int]) -> dict[int, str]:
    """Start workers of a sweep, all at the same time; the job id of each. When one cannot be started, none is."""
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
            raise ClusterError("the local backend needs bash, and there is none on PATH") from None
    who = LocalProcess(
        job_id=job_id, host=socket.gethostname(), pid=process.pid, pid_start=process_start(process.pid) or 0
    )
    try:
        for run in owners:
            write_json(run.local_process, asdict(who))
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.close()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    # Whoever submitted may live long: it must not keep the job as a zombie once that has ended.
    threading.Thread(target=process.wait, daemon=True).start()


def _unblock_signals() -> None:
    # Whoever submits holds signals back meanwhile, and a mask is inherited.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _job_environment(base: Mapping[str, str], job_id: str) -> dict[str, str]:
    """What the job inherits: nothing of a job or a rank that we may ourselves be."""
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
    """SIGTERM to a local job, which is this backend's scancel.

    Where nothing can be signalled (it runs on another host, or is a task that has not begun), the request in its
    control folder does the same, a little later.
    """
    process = local_process(run)
    if process is None or not process.is_alive:
        return
    if run.is_task:
        # The process is that of all tasks; this one's own is its supervisor.
        lease = read_json(run.lease)
        if lease is not None and process_start(lease["pid"]) == lease["pid_start"]:
            os.kill(lease["pid"], signal.SIGTERM)
        return
    # The whole group: while a setup line is at work, bash alone would let that finish first, however long it takes.
    os.killpg(process.pid, signal.SIGTERM)


def kill(run: RunDir, *, patience_seconds: float = 5.0) -> None:
    """End a local job that was started a moment ago, with everything that it started."""
    owner = (
        run if run.local_process.exists() else next((one for one in _tasks(run) if one.local_process.exists()), None)
    )
    process = local_process(owner) if owner is not None else None
    if process is None or not process.is_alive:
        return
    os.killpg(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + patience_seconds
    while process.is_alive and time.monotonic() < deadline:
        time.sleep(0.05)
    if process.is_alive:
        os.killpg(process.pid, signal.SIGKILL)


def _tasks(parent: RunDir) -> list[RunDir]:
    return [RunDir(path) for path in parent.tasks.iterdir()] if parent.tasks.is_dir() else []
