"""Where a script is handed in: Slurm's queue, or this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission import local

__all__ = ["Backend", "LocalBackend", "SlurmBackend", "backend_named", "ranges", "take_back"]


class Backend(Protocol):
    name: Literal["slurm", "local"]

    def check(self) -> None:
        """Raises ClusterError where nothing can be submitted from this machine."""

    def start(self, run: RunDir, script: Path, indices: Sequence[int] | None = None) -> str:
        """Hand a script in, for an array with the tasks that are to run; returns the job id."""

    def discard(self, run: RunDir, job_id: str) -> None:
        """Take back what was handed in a moment ago."""


class SlurmBackend:
    name: Literal["slurm", "local"] = "slurm"

    def __init__(self, slurm: Slurm | None = None, options: Sequence[str] = ()) -> None:
        self.slurm = slurm or Slurm()
        self.options = list(options)
        """Of sbatch's, over what the script says: what is true for one submission, and not for those that follow it."""

    def check(self) -> None:
        if not self.slurm.available():
            raise ClusterError(
                "there is no Slurm on this machine (no sbatch on PATH). Log in to a node of the cluster, "
                "load its slurm module, or run the job on this machine with --cluster local"
            )

    def start(self, run: RunDir, script: Path, indices: Sequence[int] | None = None) -> str:
        # the option comes before the script's own --array line, which speaks of all tasks
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
    """Cancel a job that has just been handed in.

    Raises:
        SlurmCommandError: never SlurmUnreachable, which says that nothing was handed in.
    """
    try:
        slurm.cancel(job_id)
    except SlurmCommandError as error:
        raise SlurmCommandError(error.command, error.returncode, error.stderr) from None


def backend_named(name: Literal["slurm", "local"], slurm: Slurm | None = None) -> Backend:
    return LocalBackend() if name == "local" else SlurmBackend(slurm)


def ranges(indices: Sequence[int]) -> str:
    """``0-3,7`` for 0, 1, 2, 3, 7."""
    parts: list[list[int]] = []
    for index in sorted(indices):
        if parts and parts[-1][-1] == index - 1:
            parts[-1][1:] = [index]
        else:
            parts.append([index])
    return ",".join("-".join(map(str, part)) for part in parts)
