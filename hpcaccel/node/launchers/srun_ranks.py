"""Ranks as the tasks of one srun step, and signals to a step."""

from __future__ import annotations

import logging
import math
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import SlurmCommandError
from hpcaccel.node.allocation import OVERLAP
from hpcaccel.node.batch import shell_code
from hpcaccel.node.environment.containers import Wrapped
from hpcaccel.node.launchers.srun_messages import SrunMessages
from hpcaccel.node.warm.warm_ranks import AFTER_FAILURE_SECONDS
from hpcaccel.slurm import hostlist
from hpcaccel.slurm.commands import Slurm

__all__ = ["STEP_FILE", "STEP_WAIT_SECONDS", "SrunRanks", "end_lost_step", "signal_step"]

log = logging.getLogger(__name__)

STEP_WAIT_SECONDS = 300
"""How long srun tries to start a step: long enough for a restart of the controller, but limited if nodes stay busy."""
STEP_FILE = "step.json"
EARLIEST_STOP_SECONDS = (2.0, 10.0)
"""When a stop that is requested during the start is sent, in seconds after the first task has written the step file.
srun drops a signal to a task whose start it has not noticed (22.05), and SIGUSR2 kills a task that has not blocked it
yet. It is sent twice, because the tasks of a large step do not start at the same time."""
STEP_END_SECONDS = 60
"""How long a step may take to end after SIGKILL."""


class SrunRanks:
    """One srun step: with the launcher srun it has one task for each rank, with torchrun one task for each node.

    Args:
        overlap: whether the step may use resources that Slurm has assigned to other steps.
    """

    def __init__(
        self,
        run: RunDir,
        launch: LaunchSpec,
        wrapped: Wrapped,
        *,
        attempt: int,
        avoid: Sequence[str] = (),
        overlap: bool = False,
    ) -> None:
        self._cooperative = launch.cooperative
        self._step_file = run.attempt(attempt) / STEP_FILE
        tasks_per_node = 1 if launch.launcher == "torchrun" else launch.ranks_per_node
        output = _output(run, launch, attempt)
        # Without these options srun would also pass on what the ranks write.
        self._messages = SrunMessages(cooperative=launch.cooperative) if output else None
        command = [
            "srun",
            "--unbuffered",
            "--kill-on-bad-exit=1",
            "--wait=60",
            f"--immediate={STEP_WAIT_SECONDS}",
            "--export=ALL",
            f"--nodes={launch.nodes}",
            f"--ntasks={launch.nodes * tasks_per_node}",
            f"--ntasks-per-node={tasks_per_node}",
            f"--chdir={launch.workdir}",
            *output,
            *([f"--exclude={hostlist.compress(avoid)}"] if avoid else []),
            *(OVERLAP if overlap else []),
            *launch.srun,
            *wrapped.srun,
            *wrapped.command,
        ]
        # Slurm ends all steps with the batch step, but the supervisor, a child of the batch step, may be killed alone.
        # In that case the kernel sends SIGTERM to srun, which ends its step.
        self._srun = subprocess.Popen(
            command,
            env=wrapped.env,
            stdin=subprocess.DEVNULL,
            stderr=None if self._messages is None else self._messages.output,
            preexec_fn=dying_with_us(signal.SIGTERM),
            start_new_session=True,
        )
        self._kills = 0
        self._kill_at: float | None = None
        """When the ranks that are left are killed, because another one has failed (monotonic clock)."""
        self._stop_requested = False
        self._started: float | None = None
        """When the step file was first seen (monotonic clock)."""
        self._stop_at: list[float] = []
        """Those of ``EARLIEST_STOP_SECONDS`` at which a requested stop is still to be sent."""

    def poll(self) -> int | None:
        seconds = self._seconds_since_start()
        if self._stop_at and seconds > self._stop_at[0]:
            self._send_stop(seconds)
        code = self._srun.poll()
        failure = "" if self._messages is None else self._messages.forward()
        if code is None:
            if not self._stop_requested:
                self._end_after(failure)
            return None
        if self._messages is not None:
            self._messages.close()
        return shell_code(code)

    def _end_after(self, failure: str) -> None:
        """Kill the ranks that are left some time after one has failed by itself.

        Args:
            failure: srun's message about that rank, if it is new; else empty.
        """
        now = time.monotonic()
        if failure and self._kill_at is None:
            log.info(
                "%s: ranks that are left are killed in %g s, unless a stop is requested", failure, AFTER_FAILURE_SECONDS
            )
            self._kill_at = now + AFTER_FAILURE_SECONDS
        if self._kill_at is not None and now > self._kill_at:
            self._kill_at = math.inf
            self._signal_step("KILL")

    def request_stop(self) -> None:
        self._stop_requested = True
        if self._cooperative:
            seconds = self._seconds_since_start()
            if seconds > EARLIEST_STOP_SECONDS[0]:
                self._send_stop(seconds)
            else:
                self._stop_at = list(EARLIEST_STOP_SECONDS)
        else:
            self._signal_step("TERM")

    def forget_stop(self) -> None:
        self._stop_at = []

    def kill(self) -> None:
        self._kills += 1
        self._signal_step("KILL")
        if self._kills > 1:
            self._srun.kill()

    def dump(self) -> None:
        signal_step(self._step_file, "URG", without="some stacks will be missing")

    def wake(self) -> None:
        signal_step(self._step_file, "CONT", without="some stacks will be missing")

    def _send_stop(self, seconds: float) -> None:
        """Send the stop now, ``seconds`` after the first task's start, and later if tasks may still be starting."""
        # srun itself forwards this signal to its tasks, without a request to the controller
        self._srun.send_signal(signal.SIGUSR2)
        self._stop_at = [later for later in EARLIEST_STOP_SECONDS if later > seconds]

    def _seconds_since_start(self) -> float:
        """Seconds since the first task wrote the step file; 0 if it has not."""
        if self._started is None and self._step_file.exists():
            self._started = time.monotonic()
        return 0.0 if self._started is None else time.monotonic() - self._started

    def _signal_step(self, name: str) -> None:
        if signal_step(self._step_file, name, without="terminating the step through srun") is None:
            # If no rank has started yet, only srun itself runs; on SIGTERM it gives up the step.
            self._srun.terminate()


def _output(run: RunDir, launch: LaunchSpec, attempt: int) -> list[str]:
    """srun options that send slurmstepd's messages, and output from before the shim starts, to the ranks' logs.

    The shim opens the rank's log itself. slurmstepd on the task's own node opens a file named by %t, so only one node
    appends to a log: on NFS the lines of two nodes would be mixed up. No options are returned if %t is not the rank's
    number; the lines then stay in srun's output. This is so in heterogeneous jobs (26.11: %t is one too low), and if
    several nodes run one torchrun each, for several ranks.
    """
    tasks_are_nodes = launch.launcher == "torchrun" and launch.nodes > 1 and launch.ranks_per_node > 1
    if launch.components or tasks_are_nodes:
        return []
    folder = str(run.attempt(attempt)).replace("%", "%%")  # srun expands %-patterns in file names
    return [f"--output={folder}/%t.log", "--open-mode=append"]


def signal_step(step_file: Path, name: str, *, without: str) -> bool | None:
    """Send a signal to all processes of the step that ``step_file`` describes. The step's first task writes this file.

    Args:
        name: the signal's name without ``SIG``.
        without: the consequence if Slurm does not respond, for the log.

    Returns:
        True if the signal was sent, False if the step is over, None if no task has started or Slurm did not respond.
    """
    step = read_json(step_file)
    if step is None:
        return None
    try:
        return Slurm().signal_step(step["job_id"], step["step_id"], name)
    except SlurmCommandError as error:
        log.warning(f"{error}; {without}")
        return None


def end_lost_step(run: RunDir, attempt: int) -> None:
    """Kill the ranks of an attempt of this job after its supervisor was killed; wait up to a minute for them to exit.

    srun ends its step when the supervisor dies, so this is needed only if srun has died, too.
    """
    step_file = run.attempt(attempt) / STEP_FILE
    end = time.monotonic() + STEP_END_SECONDS
    while signal_step(step_file, "KILL", without="the ranks of the last attempt may still be running"):
        if time.monotonic() > end:
            log.warning(f"the ranks of attempt {attempt} have not exited {STEP_END_SECONDS} s after SIGKILL")
            return
        time.sleep(1.0)
