"""Launching the ranks as an srun step or as local processes, behind one protocol.

``RankProcesses`` is the interface that the supervisor and the stop sequence use. The image import, staging
and the wait for free disk space implement it, too, so that they are watched, stopped and killed in the same way.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from typing import Protocol

from hpcaccel.core.durable_files import read_json, write_json
from hpcaccel.core.free_port import free_port
from hpcaccel.core.launch_spec import LaunchSpec
from hpcaccel.core.open_files import allow_open_files
from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.core.process_identity import node_name
from hpcaccel.core.run_dir import RunDir
from hpcaccel.node.allocation import SHORT_STEP
from hpcaccel.node.environment.containers import Wrapped, into_container
from hpcaccel.node.environment.staging import STAGE_DIR
from hpcaccel.node.launchers.local_ranks import LocalAgent, LocalRanks
from hpcaccel.node.launchers.srun_ranks import STEP_FILE, SrunRanks
from hpcaccel.node.rank import RESUME_ARGS, WARM, attempt_variables, rank_arguments
from hpcaccel.node.warm.eligible_runs import files_of
from hpcaccel.node.warm.warm_channel import WarmConnection, WarmListener
from hpcaccel.node.warm.warm_ranks import WarmRanks, WarmStep

__all__ = ["RankProcesses", "rank_command", "run_on_each_node", "share_gpus", "start_ranks"]


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
    overlap: bool = False,
    step: WarmStep | None = None,
    keep: bool = False,
    always: bool = False,
) -> RankProcesses:
    """Start the ranks on ``nodes``.

    Args:
        avoid: the other nodes of the allocation, which srun must not choose.
        overlap: whether srun may use resources that Slurm has assigned to other steps.
        step: the warm parents on these nodes that start the ranks; None if the ranks get new processes.
        keep: whether the ranks get warm parents, which may outlive them for a restart.
        always: whether the parents may outlive the ranks however these end.
    """
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
    stop_signal = signal.SIGUSR2 if launch.cooperative else signal.SIGTERM
    if step is not None:
        start_again(run, launch, step, environment, attempt=attempt)
        return WarmRanks(step, keep=keep, always=always, stop_signal=stop_signal)
    if launch.local and agents:
        agent = rank_command(run, launch, environment)
        return LocalAgent(run, agent, attempt=attempt, workdir=launch.workdir, stop_signal=stop_signal)
    if launch.local:
        local, local_step = _start_local(
            run, launch, environment, attempt=attempt, nodes=nodes, stop_signal=stop_signal, keep=keep
        )
        return local if local_step is None else WarmRanks(local_step, keep=keep, always=always, stop_signal=stop_signal)
    if agents and (cpus := environment.get("SRUN_CPUS_PER_TASK", "")).isdecimal():
        environment["SRUN_CPUS_PER_TASK"] = str(int(cpus) * launch.ranks_per_node)
    listener = WarmListener(node_name(), ranks=launch.ranks) if keep else None
    own = {} if listener is None else {WARM: json.dumps(listener.address)}
    command = rank_command(run, launch, {**environment, **own})
    ranks = SrunRanks(run, launch, command, attempt=attempt, avoid=avoid, overlap=overlap)
    if listener is None:
        return ranks
    allow_open_files(files_of(launch))  # after the start of srun, which gives the ranks its own limit
    folder = run.attempt(attempt)
    warm = WarmStep(launch, ranks, folder=folder, nodes=nodes, environment=environment, listener=listener)
    return WarmRanks(warm, keep=keep, always=always, stop_signal=stop_signal)


def _start_local(
    run: RunDir,
    launch: LaunchSpec,
    environment: Mapping[str, str],
    *,
    attempt: int,
    nodes: Sequence[str],
    stop_signal: signal.Signals,
    keep: bool,
) -> tuple[LocalRanks, WarmStep | None]:
    pairs = [socket.socketpair() for _ in range(launch.ranks if keep else 0)]
    commands = []
    for rank in range(launch.ranks):
        size = {"LOCAL_WORLD_SIZE": str(launch.ranks), "GROUP_RANK": "0", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        own = {WARM: json.dumps({"descriptor": pairs[rank][1].fileno()})} if keep else {}
        commands.append(rank_command(run, launch, {**environment, **size, **own}))
    descriptors = [theirs.fileno() for _, theirs in pairs]
    ranks = LocalRanks(
        run, commands, attempt=attempt, workdir=launch.workdir, stop_signal=stop_signal, descriptors=descriptors
    )
    if not keep:
        return ranks, None
    for _, theirs in pairs:
        theirs.close()
    connections = [WarmConnection(ours, rank=rank, host=node_name()) for rank, (ours, _) in enumerate(pairs)]
    folder = run.attempt(attempt)
    step = WarmStep(launch, ranks, folder=folder, nodes=nodes, environment=environment, connections=connections)
    return ranks, step


def start_again(
    run: RunDir, launch: LaunchSpec, step: WarmStep, environment: Mapping[str, str], *, attempt: int
) -> None:
    """Start the ranks of an attempt through the warm parents of ``step``, with the environment ``environment``."""
    changed = {name: value for name, value in environment.items() if step.environment.get(name) != value}
    changed.pop(RESUME_ARGS, None)
    resume_args: list[str] = json.loads(environment.get(RESUME_ARGS, "[]"))
    unset = [name for name in step.environment if name not in environment]
    orders = {}
    for rank in range(launch.ranks):
        own = attempt_variables(run, attempt, rank=rank)
        if "TORCHELASTIC_RUN_ID" in environment:
            del own["TORCHELASTIC_RUN_ID"]  # set by the user
        orders[rank] = {
            "arguments": rank_arguments(run, launch, resume_args),
            "environment": {"HPCACCEL_RUN_DIR": str(run.path), **own, **changed},
            "unset": unset,
            "log": str(run.rank_log(attempt, rank)),
            "forget": step.run != run.path,  # a stop of another run's ranks does not concern these
        }
    if (known := read_json(step.folder / STEP_FILE)) is not None:
        write_json(run.attempt(attempt) / STEP_FILE, known)
    step.run = run.path
    step.start(attempt, orders)


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


def run_on_each_node(line: str, *, launch: LaunchSpec, nodes: int) -> int:
    """Run one ``setup_per_node`` line once per node, on ``nodes`` nodes of the job. Returns the exit code."""
    command = ["bash", "-c", line]
    if not launch.local:
        tasks = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", SHORT_STEP]
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
