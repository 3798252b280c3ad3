"""Components: programs beside the ranks, each a step in its own component of a heterogeneous job, or local processes.

Components start before the ranks of an attempt and end after the ranks, which may need a component during a save. So a
component blocks the SIGTERM with which Slurm begins a preemption, and gets SIGINT when the ranks have ended.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from hpcaccel.core.durable_files import write_json
from hpcaccel.core.launch_spec import LaunchComponent, LaunchSpec, read_launch
from hpcaccel.core.parent_death import dying_with_us
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.node.batch import shell_code
from hpcaccel.node.launchers import rank_command
from hpcaccel.node.launchers.local_ranks import start_here
from hpcaccel.node.launchers.process_groups import ProcessGroups
from hpcaccel.node.launchers.srun_ranks import STEP_WAIT_SECONDS, signal_step
from hpcaccel.node.rank import LONGEST, become, enter, log_to, program, python_path, read_tail
from hpcaccel.slurm import hostlist

__all__ = ["ComponentProcesses", "become_component", "component_nodes"]

END_SECONDS = 5.0
"""How long a component may take to end after SIGINT. A preempted job has no time for a longer wait."""
_OF_THE_RANKS = re.compile(
    r"SRUN_CPUS_PER_TASK|CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|MASTER_(?:ADDR|PORT)|WORLD_SIZE"
    r"|SLURM_(?:GPUS?|TRES|MEM|CPUS?|NTASKS|NPROCS|HINT|THREADS|CORES|SOCKETS|EXCLUSIVE|DISTRIBUTION|NETWORK)(?:_\w+)?"
)
"""Variables of the batch step that components do not get: these describe the ranks' nodes, and srun reads some of them
as options."""


def component_nodes(launch: LaunchSpec, env: Mapping[str, str], ranks: Sequence[str]) -> dict[str, str]:
    """The environment variables ``HPCACCEL_NODES`` (the nodes of the ranks, separated by commas) and, for each
    component, ``HPCACCEL_NODES_<NAME>`` (its nodes). Empty if the run has no components."""
    if not launch.components:
        return {}
    found = {"HPCACCEL_NODES": ",".join(ranks)}
    for index, one in enumerate(launch.components, start=1):
        nodes = ["localhost"] if launch.local else hostlist.expand(env[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"])
        found[f"HPCACCEL_NODES_{one.name.upper()}"] = ",".join(nodes)
    return found


class _Processes(Protocol):
    def failed(self) -> int | None:
        """The exit code of a process that has failed (128 + n for signal n), or None."""
        ...

    def running(self) -> bool: ...

    def end(self) -> None: ...

    def kill(self) -> None: ...


class ComponentProcesses:
    """All components of one attempt."""

    def __init__(self, run: RunDir, launch: LaunchSpec, *, attempt: int, env: Mapping[str, str]) -> None:
        kind = _LocalProcesses if launch.local else _Step
        base = {name: value for name, value in os.environ.items() if not _OF_THE_RANKS.fullmatch(name)} | dict(env)
        self._folder = run.attempt(attempt)
        self._processes: dict[str, _Processes] = {}
        for index, one in enumerate(launch.components, start=1):
            own = {**base, "HPCACCEL_COMPONENT": one.name}
            self._processes[one.name] = kind(run, launch, one, index=index, attempt=attempt, env=own)

    def failed(self) -> str | None:
        """Which component failed first, with its exit code and its last line of output, as text; None if none failed.
        Exit code 0 does not count as a failure."""
        for name, processes in self._processes.items():
            if code := processes.failed():
                return f"component {name} exited with code {code}{self._last_line(name)}"
        return None

    def _last_line(self, name: str) -> str:
        """The last line in the component's logs, prefixed with a colon; empty if there is none."""
        logs = sorted(self._folder.glob(f"{name}-*.log"), key=lambda path: path.stat().st_mtime)
        logs = logs or list(self._folder.glob(f"{name}.srun.log"))  # if no process has started
        output = [line.strip() for path in logs for line in read_tail(path).splitlines() if line.strip()]
        lines = [line[:LONGEST] for line in output if "CANCELLED AT" not in line]
        return f": {lines[-1]}" if lines else ""

    def end(self) -> None:
        """Send SIGINT to the components that are still running, and kill those that have not ended after 5 seconds."""
        left = [one for one in self._processes.values() if one.running()]
        for one in left:
            one.end()
        limit = time.monotonic() + END_SECONDS
        while any(one.running() for one in left) and time.monotonic() < limit:
            time.sleep(0.05)
        for one in left:
            one.kill()


class _Step:
    """One srun step on all nodes of a component."""

    def __init__(
        self,
        run: RunDir,
        launch: LaunchSpec,
        component: LaunchComponent,
        *,
        index: int,
        attempt: int,
        env: Mapping[str, str],
    ) -> None:
        folder = run.attempt(attempt)
        self._step_file = _step_file(run, attempt, component.name)
        own_job = env[f"SLURM_JOB_ID_HET_GROUP_{index}"]
        wrapped = rank_command(run, launch, {**env, "HPCACCEL_COMPONENT_JOB": own_job}, "component")
        command = [
            "srun",
            f"--het-group={index}",
            "--unbuffered",
            "--kill-on-bad-exit=1",
            f"--immediate={STEP_WAIT_SECONDS}",
            "--export=ALL",
            f"--nodes={component.nodes}",
            f"--ntasks={component.nodes * component.processes_per_node}",
            f"--ntasks-per-node={component.processes_per_node}",
            *component.srun,
            f"--chdir={launch.workdir}",
            *wrapped.srun,
            *wrapped.command,
        ]
        # This srun has a log of its own: in the batch step's log its messages would be taken for messages about ranks.
        # Each process opens its log itself, because in a heterogeneous job srun's %t is not the number of the process
        # (26.11: one too low).
        with (folder / f"{component.name}.srun.log").open("ab") as output:
            self._srun = subprocess.Popen(
                command,
                env=wrapped.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                preexec_fn=dying_with_us(signal.SIGTERM),
                start_new_session=True,
            )

    def failed(self) -> int | None:
        code = self._srun.poll()
        return shell_code(code) if code else None

    def running(self) -> bool:
        return self._srun.poll() is None

    def end(self) -> None:
        if not signal_step(self._step_file, "INT", without="terminating the component through srun"):
            self._srun.terminate()

    def kill(self) -> None:
        if self.running():
            self._srun.terminate()  # srun then kills its step with SIGKILL


class _LocalProcesses:
    """A component's processes on this machine."""

    def __init__(
        self,
        run: RunDir,
        launch: LaunchSpec,
        component: LaunchComponent,
        *,
        index: int,
        attempt: int,
        env: Mapping[str, str],
    ) -> None:
        self._processes = []
        for number in range(component.nodes * component.processes_per_node):
            wrapped = rank_command(run, launch, {**env, "HPCACCEL_COMPONENT_PROCESS": str(number)}, "component")
            log = run.attempt(attempt) / f"{component.name}-{number}.log"
            self._processes.append(start_here(wrapped, workdir=launch.workdir, log=log))
        self._groups = ProcessGroups(self._processes)

    def failed(self) -> int | None:
        codes = [process.poll() for process in self._processes]
        self._groups.look()
        return next((shell_code(code) for code in codes if code), None)

    def running(self) -> bool:
        codes = [process.poll() for process in self._processes]
        self._groups.look()
        return None in codes

    def end(self) -> None:
        self._groups.send(signal.SIGINT)

    def kill(self) -> None:
        self._groups.send(signal.SIGKILL)


def become_component(run: RunDir) -> NoReturn:
    """Replace this process with the program of the component that ``HPCACCEL_COMPONENT`` names.

    Raises:
        RankEnvironmentError: there is no such component, or its program cannot be started.
    """
    launch, environment = read_launch(run), dict(os.environ)
    name = environment.get("HPCACCEL_COMPONENT", "")
    own = next((one for one in launch.components if one.name == name), None)
    if own is None:
        raise RankEnvironmentError(
            f"HPCACCEL_COMPONENT={name!r} is not a component of this run: hpcaccel starts the components itself"
        )
    process = environment.setdefault("HPCACCEL_COMPONENT_PROCESS", environment.get("SLURM_PROCID", "0"))
    if "SLURM_STEP_ID" in environment:
        log_to(run.attempt(int(environment["HPCACCEL_ATTEMPT"])) / f"{name}-{process}.log")
    # Block the signals that Slurm sends to all processes of a job. The component and its children inherit this mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    if process == "0" and "SLURM_STEP_ID" in environment:
        step = {"job_id": environment["HPCACCEL_COMPONENT_JOB"], "step_id": environment["SLURM_STEP_ID"]}
        write_json(_step_file(run, int(environment["HPCACCEL_ATTEMPT"]), name), step)
    # An Accelerator in a component must not act as one of the run's ranks.
    for variable in ("HPCACCEL_RUN_DIR", "HPCACCEL_ATTEMPT", "HPCACCEL_COMPONENT_JOB"):
        environment.pop(variable, None)
    if launch.pythonpath:
        environment["PYTHONPATH"] = python_path(launch, environment)
    if launch.container is not None:
        enter(launch.container.workdir)
    become(program(run, own.program, launch, environment), environment)


def _step_file(run: RunDir, attempt: int, name: str) -> Path:
    return run.attempt(attempt) / f"{name}.step.json"
