"""Chains: the follow-up jobs that wait behind a job, where a site lets no job come back by itself.

``submit`` hands in the first job with its first followers, since a job that is killed before it could do anything must
have one already. From then on each job hands in another one when it starts (``hpcaccel.node.allocation.chained``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hpcaccel.core.run_dir import RunDir, read_json
from hpcaccel.errors import SpecError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.slurm.followers import hand_in_followers
from hpcaccel.submission.backend import Backend, SlurmBackend

if TYPE_CHECKING:
    from hpcaccel.spec import JobSpec

__all__ = ["cancel_waiting", "links_behind", "refuse_arrays_of"]


def refuse_arrays_of(spec: JobSpec, *, is_array: bool) -> None:
    """Raises SpecError for an array of chains or of heterogeneous jobs.

    Slurm has a dependency from task to task (aftercorr), but only on tasks that end well; and no array of heterogeneous
    jobs at all (https://slurm.schedmd.com/heterogeneous_jobs.html).
    """
    if is_array and spec.components:
        raise SpecError(
            f"components ({', '.join(spec.components)}) are for single jobs: Slurm has no arrays of heterogeneous "
            "jobs, such as --grid and sweeps make. Submit such runs one by one, or take components out"
        )
    if is_array and spec.resilience.chain is not None:
        raise SpecError(
            f"resilience.chain {spec.resilience.chain} is for single jobs, since Slurm knows no follow-up for one task "
            "of an array, such as --grid and sweeps make. Submit such runs one by one, or set resilience.chain to null"
        )


@contextmanager
def links_behind(run: RunDir, job_id: str, *, backend: Backend) -> Iterator[list[str]]:
    """Hand in what is to wait behind the new job ``job_id``; all jobs of the chain then, ``job_id`` first.

    [] where the run is no chain. When the block fails, they are taken back.
    Raises as :func:`hpcaccel.slurm.followers.hand_in_followers`.
    """
    resilience = ((read_json(run.spec) or {}).get("spec") or {}).get("resilience", {})
    length = resilience.get("chain")
    if length is None or not isinstance(backend, SlurmBackend):
        yield []
        return
    count = min(resilience["chain_ahead"], length - 1)
    followers = hand_in_followers(backend.slurm, run, behind=[job_id], count=count)
    try:
        yield [job_id, *followers]
    except BaseException:
        cancel_waiting(backend.slurm, followers)
        raise


def cancel_waiting(slurm: Slurm, job_ids: Sequence[str]) -> None:
    """Take jobs out of the queue, the last one first; what has started stays."""
    for job_id in reversed(job_ids):
        slurm.cancel(job_id, only_pending=True)
