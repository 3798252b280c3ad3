"""Follow-up jobs: the same script once more, as jobs that start when those before them are over.

The login node hands in the first of them, and each job of a chain the next ones, so this stands below both.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.slurm.commands import Slurm

__all__ = ["hand_in_followers"]

_PICKLE = "{job_id}_submitted.pkl"
"""What submitit, inside a rank of a callable, opens: named by the job that it runs in."""


def hand_in_followers(slurm: Slurm, run: RunDir, *, behind: Sequence[str], count: int) -> list[str]:
    """Submit the script of ``run`` ``count`` times more; all are in the queue then, or none.

    Args:
        behind: jobs of which none is over, the first one being the run's own. Each new job waits for the end of all of
            them and of the new ones before it: when one that waits is cancelled, the others must not start early.

    Returns:
        The new job ids, in their order.

    Raises:
        ClusterError: Slurm refused one.
        SlurmCommandError: the controller did not answer.
    """
    made: list[str] = []
    try:
        for _ in range(count):
            dependency = f"--dependency=afterany:{':'.join([*behind, *made])}"
            # A time to begin that the user gave was that of the first job.
            made.append(slurm.sbatch(run.script, [dependency, "--begin=now"]))
            _share_pickle(run, behind[0], made[-1])
    except BaseException:
        _take_back(slurm, made)
        raise
    return made


def _take_back(slurm: Slurm, job_ids: Sequence[str]) -> None:
    for job_id in reversed(job_ids):
        try:
            slurm.cancel(job_id)
        except HpcaccelError:
            continue  # it ends by itself: no record names it


def _share_pickle(run: RunDir, first: str, job_id: str) -> None:
    pickle = run.submitit / _PICKLE.format(job_id=first)
    if pickle.exists():
        (run.submitit / _PICKLE.format(job_id=job_id)).symlink_to(pickle.resolve().name)
