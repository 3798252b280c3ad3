"""Running inside an allocation that is there already (``salloc``): its nodes, the supervisor in the foreground.

Such a job has no batch script that Slurm could start again, so nothing is requeued: the run is paused at the end of the
allocation, and ``hpcaccel resume`` or another ``hpcaccel run`` with ``--from`` goes on.
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
from hpcaccel.submission.backend import SlurmBackend
from hpcaccel.submission.prepare import Prepared

__all__ = ["Around", "allocation_around", "overrides_inside", "prepared_inside", "run_script"]

LOOK_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class Around:
    """The allocation that this process is in."""

    job_id: str
    nodes: tuple[str, ...]
    cpus_per_node: tuple[int, ...] = ()
    """In the order of ``nodes``; empty where Slurm does not say."""
    partition: str = ""
    components: int = 1
    """Of how many the allocation consists; more than one make it a heterogeneous one."""


def allocation_around(env: Mapping[str, str] | None = None) -> Around:
    """Raises UserError where there is none, or one that hpcaccel itself runs in."""
    env = of_first_component(os.environ if env is None else env)
    if env.get("HPCACCEL_RUN_DIR") or env.get("SLURM_PROCID", "0") != "0":
        raise UserError(
            "`hpcaccel run` is for an allocation of yours, and this process is one rank of a job: use submit"
        )
    job_id, nodes = env.get("SLURM_JOB_ID", ""), env.get("SLURM_JOB_NODELIST", "")
    if not job_id or not nodes:
        raise UserError(
            "there is no allocation around this shell (SLURM_JOB_ID is not set). Get one first, such as "
            "`salloc --nodes=2 --gpus-per-node=4 --time=60`, or hand the spec in with `hpcaccel submit`"
        )
    return Around(
        job_id=job_id,
        nodes=tuple(hostlist.expand(nodes)),
        cpus_per_node=tuple(_repeated(env.get("SLURM_JOB_CPUS_PER_NODE", ""))),
        partition=env.get("SLURM_JOB_PARTITION", ""),
        components=int(env.get("SLURM_HET_SIZE", "1")),
    )


def of_first_component(env: Mapping[str, str]) -> dict[str, str]:
    """In a heterogeneous allocation salloc names nodes and CPUs for each component only; the ranks are the first
    (seen on 22.05)."""
    suffix = "_HET_GROUP_0"
    first = {name.removesuffix(suffix): value for name, value in env.items() if name.endswith(suffix)}
    return {**first, **env}  # a batch script has both


def _repeated(text: str) -> Sequence[int]:
    """``16(x2),8`` is 16, 16, 8."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def overrides_inside(around: Around, slurm: Slurm, now: float) -> list[str]:
    """The settings that the allocation decides in place of the spec: nodes, partition, what is left of its time.

    Raises:
        ClusterError: Slurm does not know the allocation any more.
        SlurmCommandError: it does not answer.
    """
    job = slurm.job(around.job_id)
    if job is None or not job.state.is_running:
        raise ClusterError(
            f"job {around.job_id}, which this shell belongs to, does not run any more "
            f"({'Slurm does not know it' if job is None else job.state.value}): leave the shell (exit), and get a new "
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


def refuse_too_many_ranks(spec: JobSpec, around: Around) -> None:
    """Raises UserError where the allocation has fewer CPUs of a node than the ranks need: srun would wait for ever."""
    needed = spec.ranks_per_node * (spec.slurm.cpus_per_task or 1)
    least = min(around.cpus_per_node, default=None)
    if least is not None and needed > least:
        each = spec.slurm.cpus_per_task or 1
        options = f"--ntasks-per-node={spec.ranks_per_node}" + (f" --cpus-per-task={each}" if each > 1 else "")
        raise UserError(
            f"{spec.ranks_per_node} ranks of a node with {each} CPUs each are {needed} CPUs, and job {around.job_id} "
            f"has {least} of one of its nodes: set slurm.ntasks_per_node or slurm.cpus_per_task, or get more with "
            f"salloc {options}"
        )


class _InsideBackend(SlurmBackend):
    """Submits nothing: the job is the allocation itself, which stays whatever becomes of the run."""

    def __init__(self, slurm: Slurm, job_id: str) -> None:
        super().__init__(slurm)
        self._job_id = job_id

    def start(self, run: RunDir, script: Path, indices: Sequence[int] | None = None) -> str:
        return self._job_id

    def discard(self, run: RunDir, job_id: str) -> None:
        pass


def prepared_inside(prepared: Prepared, around: Around, slurm: Slurm) -> Prepared:
    """``prepared`` for the allocation.

    Raises:
        UserError: its ranks do not fit.
    """
    if prepared.is_array:
        raise UserError("an allocation runs one run at a time: an array is for `hpcaccel submit --grid`")
    spec = prepared.tasks[0].spec
    refuse_too_many_ranks(spec, around)
    if len(spec.components) >= around.components:
        raise UserError(
            f"the spec has components ({', '.join(spec.components)}), and job {around.job_id} has "
            f"{around.components - 1} besides the ranks' nodes. Options of each stand behind a colon: "
            "salloc --nodes=2 --gpus-per-node=4 : --nodes=1"
        )
    return replace(prepared, backend=_InsideBackend(slurm, around.job_id), advice=())


def run_script(run: RunDir, *, tell: Callable[[], None]) -> int:
    """Run the script of ``run`` here until its supervisor is done; its exit code.

    Ctrl-C and SIGTERM are the supervisor's, which has the ranks save and leave.

    Args:
        tell: called twice a second and once at the end, to show what the ranks print.
    """
    environment = {name: value for name, value in of_first_component(os.environ).items() if name not in _OF_THE_SHELL}
    command = ["bash", str(run.script)]
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with subprocess.Popen(command, env=environment, preexec_fn=_default_signals) as script:
            for number in before:
                signal.signal(number, lambda heard, _: _pass_on(script, heard))
            while (code := _wait(script)) is None:
                tell()
            tell()
            return 128 - code if code < 0 else code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_OF_THE_SHELL = {"SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_STEP_ID"}
"""What salloc and a shell step leave behind for srun, and the spec says itself."""


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _pass_on(script: subprocess.Popen[bytes], number: int) -> None:
    # The terminal sends Ctrl-C to the whole group: the supervisor has it already.
    if number == signal.SIGTERM:
        script.send_signal(number)


def _wait(script: subprocess.Popen[bytes]) -> int | None:
    try:
        return script.wait(LOOK_SECONDS)
    except subprocess.TimeoutExpired:
        return None
