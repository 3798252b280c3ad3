"""The samplers of an attempt, one process a node: how the supervisor starts and ends them.

A sampler's failure or death affects nothing but the samples. Samplers start some seconds after the ranks, so that short
trials of a sweep cause no further steps.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from hpcaccel.core.durable_files import make_folder
from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.allocation import SHORT_STEP
from hpcaccel.node.failures.preflight import one_task_a_node
from hpcaccel.node.launchers import share_gpus
from hpcaccel.node.samples.node_sampler import interval_seconds

__all__ = ["Samplers"]

START_SECONDS = 10.0
"""How long the ranks run before the samplers start."""
LOG = "sampler.log"
"""Messages of the samplers. An empty file is removed at the end: a sweep has many trials, and file systems limit their
files."""
END_SECONDS = 0.5
"""How long the samplers may take to end after ``stop`` before the next attempt goes on without waiting for them."""

log = logging.getLogger(__name__)


class Samplers:
    """The samplers of one attempt.

    Args:
        nodes: the nodes of the ranks.
        avoid: the other nodes of the allocation.
    """

    def __init__(
        self, run: RunDir, launch: LaunchSpec, *, attempt: int, nodes: Sequence[str], avoid: Sequence[str] = ()
    ) -> None:
        self._run, self._launch, self._attempt = run, launch, attempt
        self._nodes, self._avoid = nodes, avoid
        self._process: subprocess.Popen[bytes] | None = None
        self._end_at = 0.0
        """When ``end`` no longer waits (monotonic clock)."""
        interval = interval_seconds()
        self._due: float | None = time.monotonic() + min(START_SECONDS, interval) if interval else None

    def start_when_due(self) -> None:
        """Start the samplers once the ranks have run for ``START_SECONDS``. Called about once a second."""
        if self._due is None or time.monotonic() < self._due:
            return
        self._due = None
        try:
            self._process = self._started()
        except OSError as error:
            log.warning("no samples of GPUs and CPUs in this attempt: the sampler did not start: %s", error)

    def stop(self) -> None:
        """Tell the samplers to end. They do so while the attempt's end is recorded."""
        self._due = None
        if self._process is not None:
            self._process.terminate()
            self._end_at = time.monotonic() + END_SECONDS

    def end(self) -> None:
        """Wait for the samplers after ``stop``. Slurm ends those that srun cannot reach at the end of the job."""
        if self._process is None:
            return
        try:
            self._process.wait(max(0.0, self._end_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            return  # srun is still ending its step
        log_file = self._run.samples(self._attempt) / LOG
        with suppress(OSError):
            if not log_file.stat().st_size:
                log_file.unlink()

    def _started(self) -> subprocess.Popen[bytes]:
        folder = self._run.samples(self._attempt)
        make_folder(folder, within=self._run.path)
        command = [sys.executable, str(self._run.node_program), "sample", str(self._run.path), str(self._attempt)]
        environment = dict(os.environ)
        number = signal.SIGKILL
        if not self._launch.local and list(self._nodes) != [os.environ.get("SLURMD_NODENAME")]:
            # Without share_gpus, the step would see one task's GPUs only.
            share_gpus(environment)
            command = ["srun", *one_task_a_node(self._nodes, self._avoid), SHORT_STEP, "--chdir=/", *command]
            number = signal.SIGTERM  # with which srun ends its step
        with (folder / LOG).open("ab") as output:
            return subprocess.Popen(
                command,
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=dying_with_us(number),
                start_new_session=True,
            )
