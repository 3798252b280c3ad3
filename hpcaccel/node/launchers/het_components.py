"""The programs beside the ranks: the further components of a heterogeneous job, each a step of its own.

They begin before the ranks of an attempt and are ended after them, since ranks that save may still need them. So a
component does not hear the SIGTERM with which Slurm begins a preemption: it gets SIGINT when the ranks have ended.
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

from hpcaccel.core.run_dir import RunDir, write_json
from hpcaccel.errors import RankEnvironmentError
from hpcaccel.node.failures.classify_logs import LONGEST, read_tail
from hpcaccel.node.launch_spec import Component, Launch, read_launch
from hpcaccel.node.launchers.start_ranks import (
    STEP_WAIT_SECONDS,
    dying_with_us,
    rank_command,
    send_to_groups,
    shell_code,
    signal_step,
    start_here,
)
from hpcaccel.node.rank import become, enter, program, python_path
from hpcaccel.node.rank_log import log_to
from hpcaccel.slurm import hostlist

__all__ = ["Components", "become_component", "component_nodes"]

END_SECONDS = 5.0
"""How long a component may take to end once the ranks have; a preempted job has no more to give."""
_OF_THE_RANKS = re.compile(
    r"SRUN_CPUS_PER_TASK|CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|MASTER_(?:ADDR|PORT)|WORLD_SIZE"
    r"|SLURM_(?:GPUS?|TRES|MEM|CPUS?|NTASKS|NPROCS|HINT|THREADS|CORES|SOCKETS|EXCLUSIVE|DISTRIBUTION|NETWORK)(?:_\w+)?"
)
"""Variables of the batch step that speak of the ranks' nodes; srun would take some of them for options."""


def component_nodes(launch: Launch, env: Mapping[str, str], ranks: Sequence[str]) -> dict[str, str]:
    """Where everything is, for every process: ``HPCACCEL_NODES`` and ``HPCACCEL_NODES_<NAME>``, with commas."""
    if not launch.components:
        return {}
    found = {"HPCACCEL_NODES": ",".join(ranks)}
    for index, one in enumerate(launch.components, start=1):
        nodes = ["localhost"] if launch.local else hostlist.expand(env[f"SLURM_JOB_NODELIST_HET_GROUP_{index}"])
        found[f"HPCACCEL_NODES_{one.name.upper()}"] = ",".join(nodes)
    return found


class _Processes(Protocol):
    def failed(self) -> int | None:
        """The exit code of one that has ended with an error (128 + n for signal n)."""
        ...

    def running(self) -> bool: ...

    def end(self) -> None: ...

    def kill(self) -> None: ...


class Components:
    """All components of one attempt."""

    def __init__(self, run: RunDir, launch: Launch, *, attempt: int, env: Mapping[str, str]) -> None:
        kind = _LocalProcesses if launch.local else _Step
        base = {name: value for name, value in os.environ.items() if not _OF_THE_RANKS.fullmatch(name)} | dict(env)
        self._folder = run.attempt(attempt)
        self._processes: dict[str, _Processes] = {}
        for index, one in enumerate(launch.components, start=1):
            own = {**base, "HPCACCEL_COMPONENT": one.name}
            self._processes[one.name] = kind(run, launch, one, index=index, attempt=attempt, env=own)

    def failed(self) -> str | None:
        """What is wrong with the first component that has ended with an error. One that ends well has done its part."""
        for name, processes in self._processes.items():
            if code := processes.failed():
                return f"component {name} ended with code {code}{self._last_words(name)}"
        return None

    def _last_words(self, name: str) -> str:
        """Of that of its processes which has printed something last."""
        logs = sorted(self._folder.glob(f"{name}-*.log"), key=lambda path: path.stat().st_mtime)
        logs = logs or list(self._folder.glob(f"{name}.srun.log"))  # none has begun
        said = [line for path in logs for line in read_tail(path).splitlines() if line.strip()]
        words = [line.strip()[:LONGEST] for line in said if "CANCELLED AT" not in line]
        return f": {words[-1]}" if words else ""

    def end(self) -> None:
        """End those that are left, at once where they do not go by themselves."""
        left = [one for one in self._processes.values() if one.running()]
        for one in left:
            one.end()
        limit = time.monotonic() + END_SECONDS
        while any(one.running() for one in left) and time.monotonic() < limit:
            time.sleep(0.05)
        for one in left:
            one.kill()


class _Step:
    """One srun step over a component's nodes."""

    def __init__(
        self, run: RunDir, launch: Launch, component: Component, *, index: int, attempt: int, env: Mapping[str, str]
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
        # srun's own words would be taken for what it says of ranks. Each process opens a log of its own: %t is another
        # number than the process's in a heterogeneous job (26.11: one too low).
        with (folder / f"{component.name}.srun.log").open("ab") as words:
            self._srun = subprocess.Popen(
                command,
                env=wrapped.env,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                preexec_fn=dying_with_us(signal.SIGTERM),
                start_new_session=True,
            )

    def failed(self) -> int | None:
        code = self._srun.poll()
        return shell_code(code) if code else None

    def running(self) -> bool:
        return self._srun.poll() is None

    def end(self) -> None:
        if not signal_step(self._step_file, "INT", without="ending a component through srun"):
            self._srun.terminate()

    def kill(self) -> None:
        if self.running():
            self._srun.terminate()  # it ends its step by SIGKILL


class _LocalProcesses:
    """The same on this machine."""

    def __init__(
        self, run: RunDir, launch: Launch, component: Component, *, index: int, attempt: int, env: Mapping[str, str]
    ) -> None:
        self._processes = []
        for number in range(component.nodes * component.processes_per_node):
            wrapped = rank_command(run, launch, {**env, "HPCACCEL_COMPONENT_PROCESS": str(number)}, "component")
            log = run.attempt(attempt) / f"{component.name}-{number}.log"
            self._processes.append(start_here(wrapped, workdir=launch.workdir, log=log))

    def failed(self) -> int | None:
        codes = [process.poll() for process in self._processes]
        return next((shell_code(code) for code in codes if code), None)

    def running(self) -> bool:
        return any(process.poll() is None for process in self._processes)

    def end(self) -> None:
        send_to_groups(self._processes, signal.SIGINT)

    def kill(self) -> None:
        send_to_groups(self._processes, signal.SIGKILL)


def become_component(run: RunDir) -> NoReturn:
    """Replace this process by the program of the component that ``HPCACCEL_COMPONENT`` names.

    Raises:
        RankEnvironmentError: there is no such component, or its program cannot be started.
    """
    launch, environment = read_launch(run), dict(os.environ)
    name = environment.get("HPCACCEL_COMPONENT", "")
    own = next((one for one in launch.components if one.name == name), None)
    if own is None:
        raise RankEnvironmentError(f"HPCACCEL_COMPONENT={name!r}: a component's process is started by hpcaccel")
    process = environment.setdefault("HPCACCEL_COMPONENT_PROCESS", environment.get("SLURM_PROCID", "0"))
    if "SLURM_STEP_ID" in environment:
        log_to(run.attempt(int(environment["HPCACCEL_ATTEMPT"])) / f"{name}-{process}.log")
    # Those that Slurm sends to all processes of a job. What a component starts inherits that, and is ended with it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR2})
    if process == "0" and "SLURM_STEP_ID" in environment:
        step = {"job_id": environment["HPCACCEL_COMPONENT_JOB"], "step_id": environment["SLURM_STEP_ID"]}
        write_json(_step_file(run, int(environment["HPCACCEL_ATTEMPT"]), name), step)
    # An Accelerator in here is not one of the run's ranks.
    for variable in ("HPCACCEL_RUN_DIR", "HPCACCEL_ATTEMPT", "HPCACCEL_COMPONENT_JOB"):
        environment.pop(variable, None)
    if launch.pythonpath:
        environment["PYTHONPATH"] = python_path(launch, environment)
    if launch.container is not None:
        enter(launch.container.workdir)
    become(program(own.program, launch, environment), environment)


def _step_file(run: RunDir, attempt: int, name: str) -> Path:
    return run.attempt(attempt) / f"{name}.step.json"
