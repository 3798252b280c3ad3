"""Starting the ranks: through srun, or as local processes. Both hand out the same small handle."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from hpcaccel.core.run_dir import RunDir, read_json
from hpcaccel.errors import SlurmCommandError
from hpcaccel.node.child_processes import default_signals, dying_with_us, shell_code, start_here
from hpcaccel.node.environment.container_command import Wrapped, into_container
from hpcaccel.node.environment.stage_path import STAGE_DIR
from hpcaccel.node.launch_spec import Launch
from hpcaccel.node.launchers.local_torchrun import LocalAgent
from hpcaccel.slurm import hostlist
from hpcaccel.slurm.commands import Slurm

__all__ = [
    "LocalRanks",
    "Ranks",
    "SrunRanks",
    "default_signals",
    "dying_with_us",
    "end_lost_step",
    "free_port",
    "rank_command",
    "run_on_each_node",
    "send_to_groups",
    "share_gpus",
    "shell_code",
    "signal_step",
    "start_here",
    "start_ranks",
]

PORT_TRIES = 100
STEP_WAIT_SECONDS = 300
"""How long srun tries to get a step: for a controller that is away, and not for ever where the nodes stay busy."""
STEP_END_SECONDS = 60
"""How long a step may take to end after SIGKILL."""
AFTER_FIRST_SECONDS = 15
"""How long the other local ranks have when one has failed, as srun's --kill-on-bad-exit gives them."""


class Ranks(Protocol):
    def poll(self) -> int | None:
        """None while ranks run, else one exit code for all (128 + n for signal n)."""
        ...

    def ask(self) -> None:
        """Tell every rank that a stop is requested."""
        ...

    def kill(self) -> None:
        """End every rank at once."""
        ...

    def dump(self) -> None:
        """Have every rank that uses the runtime write where its threads are: SIGURG, which no other program minds."""
        ...

    def wake(self) -> None:
        """Have ranks that have been stopped (SIGSTOP) go on."""
        ...


def free_port() -> int:
    """A TCP port that is free on this host at this moment.

    It is taken only when the ranks have imported torch. Connections that go out meanwhile get their ports from one
    range (ip(7)), so this one comes from outside of it; by chance, so that two jobs on one node do not meet on it.
    """
    first, last = _ports_of_connections()
    dice = random.SystemRandom()
    for _ in range(PORT_TRIES):
        port = dice.randrange(10_000, 1 << 16)
        if not first <= port <= last and _is_free(port):
            return port
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _ports_of_connections() -> tuple[int, int]:
    try:
        first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return 32_768, 60_999
    return int(first), int(last)


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def start_ranks(
    run: RunDir,
    launch: Launch,
    *,
    attempt: int,
    nodes: Sequence[str],
    env: Mapping[str, str],
    avoid: Sequence[str] = (),
) -> Ranks:
    """Start the ranks on ``nodes``, which are all of the allocation but those to ``avoid``."""
    environment = {
        # Where torch writes what its collectives did when one of them hung; it puts the rank behind.
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
    if launch.local and agents:
        wrapped = rank_command(run, launch, environment)
        number = signal.SIGUSR2 if launch.cooperative else signal.SIGTERM
        return LocalAgent(run, wrapped, attempt=attempt, workdir=launch.workdir, number=number)
    if launch.local:
        return LocalRanks(run, launch, attempt=attempt, env=environment)
    if agents and (cpus := environment.get("SRUN_CPUS_PER_TASK", "")).isdecimal():
        environment["SRUN_CPUS_PER_TASK"] = str(int(cpus) * launch.ranks_per_node)
    return SrunRanks(run, launch, attempt=attempt, env=environment, avoid=avoid)


def share_gpus(env: dict[str, str]) -> None:
    """Give each rank all GPUs that the job has on its node, in place of its own alone (``--gpus-per-task``).

    Ranks copy from GPU to GPU only where each sees both. ``--gpu-bind=none`` would do that as well, but leaves
    CUDA_VISIBLE_DEVICES unset (22.05), so that on a node without device cgroups a rank sees the GPUs of other jobs.
    """
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_TRES_BIND", "SLURM_GPU_BIND"):
        env.pop(name, None)
    if "SLURM_TRES_PER_TASK" in env:
        rest = [part for part in env["SLURM_TRES_PER_TASK"].split(",") if "gpu" not in part]
        env["SLURM_TRES_PER_TASK"] = ",".join(rest)
        if not rest:
            del env["SLURM_TRES_PER_TASK"]


def run_on_each_node(line: str, *, launch: Launch) -> int:
    """Run one ``setup_per_node`` line once on every node; the highest exit code."""
    command = ["bash", "-c", line]
    if not launch.local:
        tasks = [f"--nodes={launch.nodes}", f"--ntasks={launch.nodes}", "--ntasks-per-node=1"]
        tasks += ["--overlap"] if launch.beside else []
        command = ["srun", *tasks, "--kill-on-bad-exit=1", "--export=ALL", f"--chdir={launch.workdir}", *command]
    return subprocess.run(command, cwd=launch.workdir, preexec_fn=dying_with_us(signal.SIGTERM), check=False).returncode


def rank_command(run: RunDir, launch: Launch, env: Mapping[str, str], word: str = "") -> Wrapped:
    """The shim of a rank, or of a node's torchrun, in the ranks' container if they have one.

    Args:
        word: another part of the node program than the launcher's own.
    """
    # The shim runs under the ranks' own interpreter, which is the only one that a container is sure to hold.
    word = word or ("agent" if launch.launcher == "torchrun" else "rank")
    command = [launch.python or "python3", str(run.node_program), word, str(run.path)]
    if launch.container is None:
        return Wrapped(srun=[], command=command, env=dict(env))
    staged = env.get(STAGE_DIR)
    also = [] if staged is None else [f"{staged}:{staged}"]
    return into_container(launch.container, launch.container.runtime, command, env, also=also)


class SrunRanks:
    """One srun step with a task for every rank."""

    def __init__(
        self, run: RunDir, launch: Launch, *, attempt: int, env: Mapping[str, str], avoid: Sequence[str] = ()
    ) -> None:
        self._cooperative = launch.cooperative
        self._step_file = run.attempt(attempt) / "step.json"
        wrapped = rank_command(run, launch, env)
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
        # Slurm ends all steps with the batch step; but the supervisor of a sweep's trial is a child of that, and may be
        # killed alone. On SIGTERM srun ends its step.
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

    def ask(self) -> None:
        if self._cooperative:
            # srun forwards this one to its tasks by itself, without a word to the controller
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
        if signal_step(self._step_file, name, without="ending the step through srun") is None:
            # Where no rank has started yet srun itself is all there is, and SIGTERM makes it give up the step.
            self._srun.terminate()


def _output(run: RunDir, launch: Launch, attempt: int) -> list[str]:
    """Where a rank's node writes what the rank prints before its shim runs, and what slurmstepd says of it.

    The shim opens the rank's log by itself. A file named by %t is opened by the slurmstepd on the task's own node, so
    that one node alone appends to a log: on NFS the lines of two would be mixed up. Where %t is another number than the
    rank's, these lines stay with srun's own words: in a heterogeneous job (26.11: one too low), and with one torchrun
    for the several ranks of a node.
    """
    tasks_are_nodes = launch.launcher == "torchrun" and launch.nodes > 1 and launch.ranks_per_node > 1
    if launch.components or tasks_are_nodes:
        return []
    folder = str(run.attempt(attempt)).replace("%", "%%")  # srun expands %-patterns in file names
    return [f"--output={folder}/%t.log", "--open-mode=append"]


def signal_step(step_file: Path, name: str, *, without: str) -> bool | None:
    """Send a signal to all processes of the step that its first one has described in ``step_file``.

    Args:
        without: what follows where Slurm does not answer, in words for the log.

    Returns:
        None where it was not sent, since nothing has started yet or Slurm did not answer; False: the step is over.
    """
    step = read_json(step_file)
    if step is None:
        return None
    try:
        return Slurm().signal_step(step["job_id"], step["step_id"], name)
    except SlurmCommandError as error:
        print(f"hpcaccel: {error}; {without}", file=sys.stderr, flush=True)
        return None


def end_lost_step(run: RunDir, attempt: int) -> None:
    """End the ranks of an attempt of this very job whose supervisor was killed, and wait for that a while.

    srun ends its step when its supervisor dies; this is for a step that srun has lost.
    """
    step_file = run.attempt(attempt) / "step.json"
    end = time.monotonic() + STEP_END_SECONDS
    while signal_step(step_file, "KILL", without="the ranks of the last attempt may still run"):
        if time.monotonic() > end:
            print(f"hpcaccel: the ranks of attempt {attempt} do not end", file=sys.stderr, flush=True)
            return
        time.sleep(1.0)


class LocalRanks:
    """A process for every rank on this machine, each in a process group of its own."""

    def __init__(self, run: RunDir, launch: Launch, *, attempt: int, env: Mapping[str, str]) -> None:
        self._signal = signal.SIGUSR2 if launch.cooperative else signal.SIGTERM
        self._ranks = [self._start(run, launch, attempt=attempt, env=env, rank=rank) for rank in range(launch.ranks)]
        self._first_failure: tuple[float, int] | None = None

    @staticmethod
    def _start(
        run: RunDir, launch: Launch, *, attempt: int, env: Mapping[str, str], rank: int
    ) -> subprocess.Popen[bytes]:
        environment = {
            **env,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(launch.ranks),
            "GROUP_RANK": "0",
        }
        return start_here(
            rank_command(run, launch, environment), workdir=launch.workdir, log=run.rank_log(attempt, rank)
        )

    def poll(self) -> int | None:
        codes = [rank.poll() for rank in self._ranks]
        failures = [shell_code(code) for code in codes if code]
        if failures and self._first_failure is None:
            self._first_failure = (time.monotonic(), failures[0])
            self._send(signal.SIGTERM)
        if any(code is None for code in codes):
            if self._first_failure and time.monotonic() > self._first_failure[0] + AFTER_FIRST_SECONDS:
                self.kill()
            return None
        self._send_group(signal.SIGKILL)
        return self._first_failure[1] if self._first_failure else 0

    def ask(self) -> None:
        self._send(self._signal)

    def kill(self) -> None:
        self._send_group(signal.SIGKILL)

    def dump(self) -> None:
        self._send(signal.SIGURG)

    def wake(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.poll() is None:
                rank.send_signal(number)

    def _send_group(self, number: signal.Signals) -> None:
        """To whatever a rank started and left behind, too (data-loader workers)."""
        send_to_groups(self._ranks, number)


def send_to_groups(leaders: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """A signal to each process and to what it has started, even where it has ended itself."""
    for leader in leaders:
        try:
            os.killpg(leader.pid, number)
        except ProcessLookupError:
            pass
