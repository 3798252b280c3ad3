"""A sweep's workers as jobs: one array where that is possible, several where Slurm takes no larger ones.

Slurm caps the highest index of an array (MaxArraySize), and a QOS or an association how many jobs a user may have in
the queue, where each task counts. The first limit makes several arrays, each with the number that its tasks begin from
as the script's argument; the second makes fewer workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcaccel.core.run_dir import RunDir, SweepDir
from hpcaccel.errors import ClusterError, SlurmCommandError, SlurmUnreachable
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.refusals import submit_limit
from hpcaccel.submission import local
from hpcaccel.submission.array_size import largest_array
from hpcaccel.submission.backend import Backend, SlurmBackend, ranges, take_back

__all__ = ["WorkerArrays", "chunks"]


@dataclass
class WorkerArrays:
    """Stands for a backend while the workers ``indices`` of a sweep are handed in, and knows afterwards which job is
    which worker's."""

    backend: Backend
    indices: Sequence[int]
    jobs: dict[int, str] = field(default_factory=dict)
    """The job of each worker that was taken: ``46_3``, and ``local-1b2c3d4e_3`` on the local backend."""
    refusal: str = ""
    """Why there are fewer workers than were asked for."""
    name: Literal["slurm", "local"] = "slurm"

    def __post_init__(self) -> None:
        self.name = self.backend.name

    @property
    def array_ids(self) -> list[str]:
        return list(dict.fromkeys(job_id.partition("_")[0] for job_id in self.jobs.values()))

    def check(self) -> None:
        self.backend.check()

    def start(self, run: RunDir, script: Path, indices: Sequence[int] | None = None) -> str:
        """Hand the workers in; the id of the first array.

        Raises:
            ClusterError: Slurm takes none of them.
        """
        assert isinstance(run, SweepDir)
        try:
            if isinstance(self.backend, SlurmBackend):
                self._submit(self.backend, script)
            else:
                self.jobs = local.start_workers(run, script, self.indices)
        except BaseException:
            self.discard(run, "")
            raise
        return self.array_ids[0]

    def discard(self, run: RunDir, job_id: str) -> None:
        """Take all of them back."""
        if isinstance(self.backend, SlurmBackend):
            for array_id in self.array_ids:
                take_back(self.backend.slurm, array_id)
            return
        assert isinstance(run, SweepDir)
        for index in self.indices:
            local.kill(run.worker(index))

    def _submit(self, backend: SlurmBackend, script: Path) -> None:
        most = _largest_array(backend.slurm)
        waiting = chunks(self.indices, most)
        while waiting:
            piece, *waiting = waiting
            try:
                self._submit_array(backend, script, piece, offset=piece[0] // most * most)
            except ClusterError as error:
                limit = submit_limit(str(error))
                if limit is None or (len(piece) == 1 and not self.jobs):
                    raise
                self.refusal = limit
                half = len(piece) // 2
                waiting = [piece[:half], piece[half:], *waiting] if half else []

    def _submit_array(self, backend: SlurmBackend, script: Path, indices: Sequence[int], *, offset: int) -> None:
        # the options come before the script's own lines, which speak of all workers
        options = [f"--array={ranges([index - offset for index in indices])}", *backend.options]
        if offset:
            options.append("--output=/dev/null")  # %a would name another worker's folder: the script sees to it
        array_id = backend.slurm.sbatch(script, options, words=[str(offset)] if offset else [])
        self.jobs |= {index: f"{array_id}_{index - offset}" for index in indices}


def _largest_array(slurm: Slurm) -> int:
    """Raises SlurmUnreachable where Slurm does not answer: nothing has been handed over."""
    try:
        return largest_array(slurm.config())
    except SlurmCommandError as error:
        raise SlurmUnreachable(error.command, error.returncode, error.stderr) from None


def chunks(indices: Sequence[int], most: int) -> list[list[int]]:
    """``indices`` in order, cut into arrays: those below ``most``, those below twice ``most`` and so on."""
    found: dict[int, list[int]] = {}
    for index in sorted(indices):
        found.setdefault(index // most, []).append(index)
    return list(found.values())
