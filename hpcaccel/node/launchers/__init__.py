"""Launching the ranks as an srun step or as local processes, behind one protocol.

``RankProcesses`` is the interface that the supervisor and the stop sequence use. The image import, staging
and the wait for free disk space implement it, too, so that they are watched, stopped and killed in the same way.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hpcaccel.core.durable_files import read_json
from hpcaccel.core.free_port import free_port
from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import SlurmCommandError
from hpcaccel.node.allocation import SHORT_STEP
from hpcaccel.node.batch import shell_code
from hpcaccel.node.environment.containers import Wrapped, into_container
from hpcaccel.node.environment.staging import STAGE_DIR
from hpcaccel.node.launchers.local_ranks import LocalAgent, LocalRanks
from hpcaccel.slurm import hostlist
from hpcaccel.slurm.commands import Slurm

__all__ = [
    "STEP_WAIT_SECONDS",
    "RankProcesses",
    "SrunRanks",
    "end_lost_step",
    "rank_command",
    "run_on_each_node",
    "share_gpus",
    "signal_step",
    "start_ranks",
]

log = logging.getLogger(__name__)

STEP_WAIT_SECONDS = 300
"""How long srun tries to start a step: long enough for a restart of the controller, but limited if nodes stay busy."""
STEP_END_SECONDS = 60
"""How long a step may take to end after SIGKILL."""


class RankProcesses(Protocol):
    def poll(self) -> int | None:
        """The common exit code of all ranks (128 + n for signal n), or None while any rank runs."""
        ...

    def request_stop(self) -> None:
        """Send every rank the signal that requests a stop."""
        ...

    def kill(self) -> None:
        """Kill every rank."""
        ...

    def dump(self) -> None:
        """Send every rank SIGURG. The runtime then writes the stacks of all threads; other programs ignore SIGURG."""
        ...

    def wake(self) -> None:
        """Send SIGCONT to ranks that are stopped (SIGSTOP)."""
        ...


def start_ranks(
    run: RunDir,
    launch: LaunchSpec,
    *,
    attempt: int,
    nodes: Sequence[str],
    env: Mapping[str, str],
    avoid: Sequence[str] = (),
) -> RankProcesses:
    """Start the ranks on ``nodes``. ``avoid`` lists the other nodes of the allocation, which srun must not choose."""
    environment = {
        # Prefix of the files to which torch's flight recorder dumps the last collectives; torch appends the rank.
        "TORCH_FR_DUMP_TEMP_FILE": str(run.attempt(attempt) / "flight_recorder_"),
        **os.environ,
        **env,
        "MASTER_ADDR": "127.0.0.1" if launch.local else nodes[0],
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(launch.ranks),
    }
    agents = launch.launcher == "torchrun"
    if launch.share_gpus or agents:
        share_gpus(environment)
    if launch.local:
        stop_signal = signal.SIGUSR2 if launch.cooperative else signal.SIGTERM
        if agents:
            agent = rank_command(run, launch, environment)
            return LocalAgent(run, agent, attempt=attempt, workdir=launch.workdir, stop_signal=stop_signal)
        size = {"LOCAL_WORLD_SIZE": str(launch.ranks), "GROUP_RANK": "0"}
        ranks = [
            rank_command(run, launch, {**environment, **size, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            for rank in range(launch.ranks)
        ]
        return LocalRanks(run, ranks, attempt=attempt, workdir=launch.workdir, stop_signal=stop_signal)
    if agents and (cpus := environment.get("SRUN_CPUS_PER_TASK", "")).isdecimal():
        environment["SRUN_CPUS_PER_TASK"] = str(int(cpus) * launch.ranks_per_node)
    return SrunRanks(run, launch, rank_command(run, launch, environment), attempt=attempt, avoid=avoid)


def share_gpus(env: dict[str, str]) -> None:
    """Make all of the job's GPUs on a node visible to each rank there, not only the rank's own (``--gpus-per-task``).

    GPU peer-to-peer copies need both GPUs visible to the rank. ``--gpu-bind=none`` would do the same, but leaves
    CUDA_VISIBLE_DEVICES unset (22.05), so that on a node without device cgroups a rank sees the GPUs of other jobs.
    """
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_BIND", "SLURM_GPU_BIND"):
        env.pop(name, None)
    if "SLURM_TRES_PER_TASK" in env:
        rest = [part for part in env["SLURM_TRES_PER_TASK"].split(",") if "gpu" not in part]
        env["SLURM_TRES_PER_TASK"] = ",".join(rest)
        if not rest:
            del env["SLURM_TRES_PER_TASK"]


def run_on_each_node(line: str, *, launch: LaunchSpec) -> int:
    """Run one ``setup_per_node`` line once per node, on as many nodes as the ranks need. Returns the exit code."""
    command = ["bash", "-c", line]
    if not launch.local:
        tasks = [f"--nodes={launch.nodes}", f"--ntasks={launch.nodes}", "--ntasks-per-node=1", SHORT_STEP]
        command = ["srun", *tasks, "--kill-on-bad-exit=1", "--export=ALL", f"--chdir={launch.workdir}", *command]
    return subprocess.run(command, cwd=launch.workdir, preexec_fn=dying_with_us(signal.SIGTERM), check=False).returncode


def rank_command(run: RunDir, launch: LaunchSpec, env: Mapping[str, str], word: str = "") -> Wrapped:
    """The command that starts a shim of the node program, inside the ranks' container if there is one.

    Args:
        word: the shim's subcommand; default: ``agent`` (a node's torchrun) or ``rank``, depending on the launcher.
    """
    # The shim runs under the ranks' own interpreter, the only one that a container is guaranteed to have.
    word = word or ("agent" if launch.launcher == "torchrun" else "rank")
    command = [launch.python or "python3", str(run.node_program), word, str(run.path)]
    if launch.container is None:
        return Wrapped(srun=[], command=command, env=dict(env))
    staged = env.get(STAGE_DIR)
    also = [] if staged is None else [f"{staged}:{staged}"]
    return into_container(launch.container, launch.container.runtime, command, env, also=also)


class SrunRanks:
    """One srun step: with the launcher srun it has one task for each rank, with torchrun one task for each node."""

    def __init__(
        self, run: RunDir, launch: LaunchSpec, wrapped: Wrapped, *, attempt: int, avoid: Sequence[str] = ()
    ) -> None:
        self._cooperative = launch.cooperative
        self._step_file = run.attempt(attempt) / "step.json"
        tasks_per_node = 1 if launch.launcher == "torchrun" else launch.ranks_per_node
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
            *_output(run, launch, attempt),
            *([f"--exclude={hostlist.compress(avoid)}"] if avoid else []),
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
            preexec_fn=dying_with_us(signal.SIGTERM),
            start_new_session=True,
        )
        self._kills = 0

    def poll(self) -> int | None:
        code = self._srun.poll()
        return None if code is None else shell_code(code)

    def request_stop(self) -> None:
        if self._cooperative:
            # srun itself forwards this signal to its tasks, without a request to the controller
            self._srun.send_signal(signal.SIGUSR2)
        else:
            self._signal_step("TERM")

    def kill(self) -> None:
        self._kills += 1
        self._signal_step("KILL")
        if self._kills > 1:
            self._srun.kill()

    def dump(self) -> None:
        signal_step(self._step_file, "URG", without="some stacks will be missing")

    def wake(self) -> None:
        signal_step(self._step_file, "CONT", without="some stacks will be missing")

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
    step_file = run.attempt(attempt) / "step.json"
    end = time.monotonic() + STEP_END_SECONDS
    while signal_step(step_file, "KILL", without="the ranks of the last attempt may still be running"):
        if time.monotonic() > end:
            log.warning(f"the ranks of attempt {attempt} have not exited {STEP_END_SECONDS} s after SIGKILL")
            return
        time.sleep(1.0)
