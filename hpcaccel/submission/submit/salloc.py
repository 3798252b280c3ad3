"""Runs inside an existing allocation (``salloc``), on its nodes and with the supervisor in the foreground.

Such a job has no batch script that Slurm could restart, so it is not requeued: the run is paused at the end of the
allocation, and ``hpcaccel resume`` or another ``hpcaccel run`` with ``--from`` continues it.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import ClusterError, UserError
from hpcaccel.slurm import hostlist
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import JobSpec
from hpcaccel.submission.jobs.backend import SlurmBackend
from hpcaccel.submission.submit.prepare import PreparedSubmission

__all__ = ["SallocAllocation", "allocation_around", "overrides_inside", "prepared_inside", "run_script"]

LOOK_SECONDS = 0.5
"""Interval at which the run's output is shown."""


@dataclass(frozen=True, kw_only=True)
class SallocAllocation:
    """The allocation in which this process runs."""

    job_id: str
    nodes: tuple[str, ...]
    cpus_per_node: tuple[int, ...] = ()
    """In the order of ``nodes``; empty if unknown."""
    partition: str = ""
    components: int = 1
    """The number of components; more than one in a heterogeneous allocation."""


def allocation_around(env: Mapping[str, str] | None = None) -> SallocAllocation:
    """The allocation of this shell. Raises UserError outside of one, and in ranks (except rank 0 of a plain srun)."""
    env = of_first_component(os.environ if env is None else env)
    if env.get("HPCACCEL_RUN_DIR") or env.get("SLURM_PROCID", "0") != "0":
        raise UserError(
            "`hpcaccel run` must be started from the shell of an allocation, but this process is one rank of a job. "
            "Use `hpcaccel submit` instead"
        )
    job_id, nodes = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NODELIST", "")
    if not job_id or not nodes:
        raise UserError(
            f"this shell is not inside a Slurm allocation ({'SLURM_JOB_NODELIST' if job_id else 'SLURM_JOB_ID'} is "
            "not set). Request an allocation first, for example with `salloc --nodes=2 --gpus-per-node=4 --time=60`, "
            "or submit the spec with `hpcaccel submit`"
        )
    return SallocAllocation(
        job_id=job_id,
        nodes=tuple(hostlist.expand(nodes)),
        cpus_per_node=tuple(_repeated(env.get("SLURM_JOB_CPUS_PER_NODE", ""))),
        partition=env.get("SLURM_JOB_PARTITION", ""),
        components=int(env.get("SLURM_HET_SIZE", "1")),
    )


def of_first_component(env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with the variables of the allocation's first component, which runs the ranks.

    In a heterogeneous allocation, salloc sets nodes and CPUs per component only (seen on 22.05).
    """
    suffix = "_HET_GROUP_0"
    first = {name.removesuffix(suffix): value for name, value in env.items() if name.endswith(suffix)}
    return {**first, **env}  # a batch script has these variables with and without the suffix


def _repeated(text: str) -> Sequence[int]:
    """Expand Slurm's notation for repeated counts: ``16(x2),8`` is 16, 16, 8."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def overrides_inside(around: SallocAllocation, slurm: Slurm, now: float) -> list[str]:
    """Overrides for a run in the allocation: its nodes, its partition, its remaining time; no requeue, no chain.

    Raises:
        ClusterError: the allocation is no longer running.
        SlurmCommandError: Slurm does not respond.
    """
    job = slurm.job(around.job_id)
    if job is None or not job.state.is_running:
        raise ClusterError(
            f"the job of this shell, {around.job_id}, is no longer running "
            f"({'Slurm no longer lists it' if job is None else job.state.value}): exit the shell and request a new "
            "allocation with salloc"
        )
    partition = job.partition or around.partition
    minutes = "UNLIMITED" if job.end_time is None else str(max(1, int((job.end_time - now) // 60)))
    return [
        f"slurm.nodes={len(around.nodes)}",
        "slurm.nodelist=null",
        f"slurm.time={minutes}",
        "slurm.time_min=null",
        *([f"slurm.partition={partition}"] if partition else []),
        "resilience.requeue=false",
        "resilience.chain=null",
    ]


def refuse_too_many_ranks(spec: JobSpec, around: SallocAllocation) -> None:
    """Raises UserError if a node has fewer CPUs than its ranks need: srun would wait forever."""
    needed = spec.ranks_per_node * (spec.slurm.cpus_per_task or 1)
    least = min(around.cpus_per_node, default=None)
    if least is not None and needed > least:
        each = spec.slurm.cpus_per_task or 1
        options = f"--ntasks-per-node={spec.ranks_per_node}" + (f" --cpus-per-task={each}" if each > 1 else "")
        raise UserError(
            f"the ranks of a node require {needed} CPUs ({spec.ranks_per_node} x {each}), but job {around.job_id} "
            f"has only {least} on one of its nodes. Reduce slurm.ntasks_per_node or slurm.cpus_per_task, or request "
            f"more CPUs with `salloc {options}`"
        )


class _InsideBackend(SlurmBackend):
    """Submits nothing, because the job is the allocation itself, which outlives the run."""

    def __init__(self, slurm: Slurm, job_id: str) -> None:
        super().__init__(slurm)
        self._job_id = job_id

    def start(self, run: RunDir, script: Path, indices: Sequence[int] | None = None) -> str:
        return self._job_id

    def discard(self, run: RunDir, job_id: str) -> None:
        pass


def prepared_inside(prepared: PreparedSubmission, around: SallocAllocation, slurm: Slurm) -> PreparedSubmission:
    """Adapt a prepared submission to the allocation.

    Raises:
        UserError: the submission is an array, or its ranks or components do not fit into the allocation.
    """
    if prepared.is_array:
        raise UserError(
            "`hpcaccel run` cannot start an array, because an allocation runs one run at a time. "
            "Use `hpcaccel submit --grid`"
        )
    spec = prepared.tasks[0].spec
    refuse_too_many_ranks(spec, around)
    if len(spec.components) >= around.components:
        raise UserError(
            f"the spec has components ({', '.join(spec.components)}), which need one group of nodes each in addition "
            f"to that of the ranks. Job {around.job_id} has {around.components - 1} such groups. Request each group "
            "after a colon: `salloc --nodes=2 --gpus-per-node=4 : --nodes=1`"
        )
    return replace(prepared, backend=_InsideBackend(slurm, around.job_id), advice=())


def run_script(run: RunDir, *, show_output: Callable[[], None]) -> int:
    """Run the script of ``run`` on this machine until its supervisor ends; returns its exit code.

    Ctrl-C and SIGTERM reach the supervisor, which lets the ranks save and exit.

    Args:
        show_output: called every ``LOOK_SECONDS`` and once at the end.
    """
    environment = {name: value for name, value in of_first_component(os.environ).items() if name not in _OF_THE_SHELL}
    command = ["bash", str(run.script)]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with subprocess.Popen(command, env=environment, preexec_fn=_default_signals) as script:
            for number in before:
                signal.signal(number, lambda received, _: _pass_on(script, received))
            while (code := _wait(script)) is None:
                show_output()
            show_output()
            return 128 - code if code < 0 else code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_OF_THE_SHELL = {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_STEP_ID"}
"""Variables of salloc or a shell step that srun reads as options. They are removed, because the spec sets its own."""


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _pass_on(script: subprocess.Popen[bytes], number: int) -> None:
    # The terminal sends Ctrl-C to the whole process group, including the supervisor.
    if number == signal.SIGTERM:
        script.send_signal(number)


def _wait(script: subprocess.Popen[bytes]) -> int | None:
    try:
        return script.wait(LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return None
