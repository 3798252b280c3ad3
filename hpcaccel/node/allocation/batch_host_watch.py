"""A watch over the node of the batch step, for jobs that may outlive the loss of a node (``sbatch --no-kill``).

If such a job loses the node of its batch step, Slurm removes that node from the job and leaves the rest running without
a batch step, until the time limit (seen on 22.05, where this is kill_running_job_by_node_name in slurmctld; the source
of 26.05.3 does the same in _foreach_kill_running_job_by_node). A step on another node of the job therefore polls the
job's state, and requeues it in this case. The job then starts again with all of its nodes. If Slurm refuses the
requeue, the step cancels the job, because no program uses its nodes any more.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from hpcaccel.core.log import set_log_file
from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.node.allocation import SHORT_STEP
from hpcaccel.slurm import hostlist
from hpcaccel.slurm.commands import Slurm

__all__ = ["BatchHostWatch", "watch_batch_host"]

LOOK_SECONDS = 30.0
"""Interval of the queries to Slurm."""
RESTART_SECONDS = 60.0
"""Shortest interval between two starts of the watching step."""
_IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a user may send to all processes of the job. SIGTERM ends this process: otherwise the end of each job
would wait for Slurm's SIGKILL."""

log = logging.getLogger(__name__)


class BatchHostWatch:
    """The supervisor's handle to the step that watches. The step's death affects nothing else; it is started again.

    Args:
        job_id: the job; for a task of an array, ``46_3``.
        restart_count: how often Slurm has restarted the job.
    """

    def __init__(self, run: RunDir, *, job_id: str, restart_count: int) -> None:
        self._run, self._job_id, self._restart_count = run, job_id, restart_count
        self._process: subprocess.Popen[bytes] | None = None
        self._due = 0.0

    def look(self, nodes: Sequence[str]) -> None:
        """Start the step unless it is running, on the last of ``nodes`` that is not this one. Called about once a
        second."""
        here = os.environ.get("SLURMD_NODENAME")
        others = [node for node in nodes if node != here]
        if not others or time.monotonic() < self._due:
            return
        if self._process is not None and self._process.poll() is None:
            return
        self._due = time.monotonic() + RESTART_SECONDS
        command = [
            *("srun", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", f"--nodelist={others[-1]}", SHORT_STEP),
            *("--export=ALL", "--chdir=/", "--input=none", "--output=/dev/null", "--error=/dev/null"),
            *(sys.executable, str(self._run.node_program), "watch-batch-host", str(self._run.path)),
            *(self._job_id, str(self._restart_count)),
        ]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                preexec_fn=dying_with_us(signal.SIGTERM),  # with which srun ends its step
                start_new_session=True,
            )
        except OSError as error:
            log.warning("if this node fails, nothing will requeue the job: the watching step did not start: %s", error)


def watch_batch_host(run: RunDir, job_id: str, restart_count: int) -> int:
    """Look at the job until this start of it is over. Requeue it if it has lost the node of its batch step. Returns 0.

    This is the program of the watching step.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    slurm = Slurm()
    while True:
        time.sleep(LOOK_SECONDS)
        try:
            job = slurm.job(job_id)
        except SlurmCommandError:
            continue  # the controller is away
        if job is None or not job.state.is_running or job.restarts > restart_count:
            return 0
        if job.batch_host and job.nodes and job.batch_host not in hostlist.expand(job.nodes):
            set_log_file(run.slurm_log)
            _start_again(slurm, job_id, job.batch_host)


def _start_again(slurm: Slurm, job_id: str, lost: str) -> None:
    """Requeue the job, or cancel it if Slurm does not allow a requeue. If Slurm does not respond, the next look tries
    again."""
    what = f"node {lost}, on which the batch step ran, has failed"
    try:
        try:
            if slurm.requeue(job_id):
                log.warning("%s: the job is requeued", what)
        except ClusterError as error:
            log.error("%s, and Slurm refuses to requeue the job, which is therefore cancelled: %s", what, error)
            slurm.cancel(job_id)
    except SlurmCommandError as error:
        log.warning("%s, and the job is not requeued yet: %s", what, error)
