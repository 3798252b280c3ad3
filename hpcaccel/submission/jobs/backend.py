"""Backends that run a batch script: Slurm's queue, or this machine; and the largest array that each accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import ClusterError, HpcaccelError, SlurmCommandError, SpecError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.jobs import local

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec

__all__ = [
    "Backend",
    "LocalBackend",
    "SlurmBackend",
    "backend_named",
    "largest_array",
    "ranges",
    "refuse_arrays_of",
    "refuse_too_many",
    "take_back",
]


class Backend(Protocol):
    name: Literal["slurm", "local"]

    def check(self) -> None:
        """Raises ClusterError if nothing can be submitted from this machine."""

    def start(self, run: RunDir, script: Path, indices: Sequence[int] | None = None) -> str:
        """Submit a script and return the job id. For an array, ``indices`` are the tasks to submit."""

    def discard(self, run: RunDir, job_id: str) -> None:
        """Cancel a job that has just been submitted."""


class SlurmBackend:
    name: Literal["slurm", "local"] = "slurm"

    def __init__(self, slurm: Slurm | None = None, options: Sequence[str] = ()) -> None:
        self.slurm = slurm or Slurm()
        self.options = list(options)
        """sbatch options that override those of the script. A chain's followers are submitted without them."""

    def check(self) -> None:
        if not self.slurm.available():
            raise ClusterError(
                "there is no Slurm on this machine (sbatch is not on PATH). Log in to a login node of the cluster, "
                "load its Slurm module, or run the job on this machine with --cluster local"
            )

    def start(self, run: RunDir, script: Path, indices: Sequence[int] | None = None) -> str:
        # overrides the script's --array line, which lists all tasks
        args = [] if indices is None else [f"--array={ranges(indices)}"]
        return self.slurm.sbatch(script, [*args, *self.options])

    def discard(self, run: RunDir, job_id: str) -> None:
        take_back(self.slurm, job_id)


class LocalBackend:
    name: Literal["slurm", "local"] = "local"

    def check(self) -> None:
        pass

    def start(self, run: RunDir, script: Path, indices: Sequence[int] | None = None) -> str:
        job_id = local.new_job_id()
        if indices is None:
            local.start(run, script, job_id)
        else:
            local.start_array(run, script, job_id, indices)
        return job_id

    def discard(self, run: RunDir, job_id: str) -> None:
        local.kill(run)


def take_back(slurm: Slurm, job_id: str) -> None:
    """Cancel a job that has just been submitted.

    Raises:
        SlurmCommandError: scancel failed. The subclass SlurmUnreachable is never raised, because callers would
            conclude from it that there is no job.
    """
    try:
        slurm.cancel(job_id)
    except SlurmCommandError as error:
        raise SlurmCommandError(error.command, error.returncode, error.stderr) from None


def backend_named(name: Literal["slurm", "local"], slurm: Slurm | None = None) -> Backend:
    return LocalBackend() if name == "local" else SlurmBackend(slurm)


def ranges(indices: Sequence[int]) -> str:
    """The value of sbatch's --array for the indices: ``0-3,7`` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][-1] == index - 1:
            parts[-1][1:] = [index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)


DEFAULT_SIZE = 1001
"""Slurm's default for MaxArraySize."""
FEW = 100
"""Up to this number of tasks, MaxArraySize is not queried: few sites set a lower limit."""
MOST = 100_000
"""Largest array of the local backend, and of Slurm if MaxArraySize cannot be read."""


def largest_array(config: Mapping[str, str]) -> int:
    """Maximum number of tasks of an array on the cluster; ``config`` is the result of ``Slurm.config()``."""
    size = config.get("MaxArraySize", "")
    return max(1, int(size) if size.isdigit() else DEFAULT_SIZE)


def refuse_too_many(tasks: int, backend: Backend, *, of_map: bool) -> None:
    """Raises SpecError for an array with more tasks than the cluster or the local backend accepts.

    Args:
        of_map: whether the tasks are the items of ``hpcaccel.map``; this selects the error message.
    """
    limit = f"an array can have at most {MOST:,} tasks"
    most = MOST
    if isinstance(backend, SlurmBackend) and tasks > FEW:
        try:
            most = largest_array(backend.slurm.config())
            limit = f"an array on this cluster can have at most {most:,} tasks (MaxArraySize)"
        except HpcaccelError:
            pass  # only MOST applies here; sbatch reports a smaller limit
    if tasks > most and of_map:
        raise SpecError(
            f"hpcaccel.map() creates {tasks:,} tasks, one per item, but {limit}. Pass several items to each "
            "call of the function"
        )
    if tasks > most:
        raise SpecError(
            f"--grid creates {tasks:,} tasks, but {limit}. Use fewer values, or `hpcaccel sweep start` with method: "
            "grid, where each worker runs any number of trials"
        )


def refuse_arrays_of(spec: JobSpec, *, is_array: bool) -> None:
    """Raises SpecError for an array of chains or of heterogeneous jobs, which Slurm does not support.

    Slurm's dependency from task to task (aftercorr) is satisfied only by tasks that succeed. Heterogeneous jobs cannot
    be arrays: https://slurm.schedmd.com/heterogeneous_jobs.html.
    """
    if is_array and spec.components:
        raise SpecError(
            f"components ({', '.join(spec.components)}) work in single jobs only: --grid and sweeps use job arrays, "
            "and Slurm has no arrays of heterogeneous jobs. Submit the runs one by one, or remove components"
        )
    if is_array and spec.resilience.chain is not None:
        raise SpecError(
            f"resilience.chain {spec.resilience.chain} works in single jobs only: --grid and sweeps use job arrays, "
            "and Slurm has no follow-up jobs for single tasks. Submit the runs one by one, or set resilience.chain to "
            "null"
        )
