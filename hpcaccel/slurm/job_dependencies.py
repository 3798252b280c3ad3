"""Job dependencies: dependencies on other runs, and the follow-up jobs of a chain.

A run may consist of several jobs. A requeued job keeps its id, and jobs that depend on it start only after it has
ended for the last time. A dependency on a chain lists all of its jobs that are in the queue. The login node submits
the first follow-up jobs of a chain. Each job of the chain submits the next ones, and then updates the jobs that depend
on the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcaccel.core.durable_files import append_line, read_json, read_lines
from hpcaccel.core.launch_spec import launch_of
from hpcaccel.core.records import AttemptEnd
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.run_ledger import RunLedger
from hpcaccel.errors import ClusterError, HpcaccelError, SlurmCommandError
from hpcaccel.slurm.commands import Slurm

__all__ = [
    "dependency_text",
    "ended_well",
    "is_settled",
    "record_dependent",
    "submit_followers",
    "update_dependents",
]

_DEPENDENTS = "dependents.jsonl"
"""File in a run directory that lists the jobs that depend on the run."""
_SUCCESSFUL_REASONS = ("completed", "pruned")
_PICKLE = "{job_id}_submitted.pkl"
"""The file that submitit opens in a rank that runs a Python function; named after the rank's job."""


def dependency_text(after: Sequence[Mapping[str, str]], also: str | None) -> str:
    """The value of ``--dependency``, without runs that are over or paused; empty if nothing is left.

    Args:
        after: ``launch.after`` of a run's ``spec.json``: entries with ``kind`` and ``run``, a directory.
        also: a Slurm dependency that the user has set, if any.
    """
    parts = [part for one in after if (part := _part(one["kind"], RunDir(one["run"])))]
    return ",".join([*parts, *([also] if also else [])])


def _part(kind: str, run: RunDir) -> str:
    record = read_json(run.record) or {}
    jobs, links = record.get("job_ids", []), record.get("links", [])
    if is_settled(run) or not jobs:
        return ""
    if jobs[-1] in links:  # afterwards, the dependent job itself checks whether the chain succeeded
        return "afterany:" + ":".join(links[links.index(jobs[-1]) :])
    return f"{kind}:{jobs[-1]}"


def _settled_end(run: RunDir) -> AttemptEnd | None:
    """The newest line of the ledger if it ends or pauses the run, else None."""
    offset = (read_json(run.record) or {}).get("ledger_offset", 0)
    return RunLedger.read(run, offset=offset).settled


def is_settled(run: RunDir) -> bool:
    """Whether the run is over or paused, according to its ledger."""
    return _settled_end(run) is not None


def ended_well(run: RunDir) -> bool:
    """Whether the run has ended successfully, according to its ledger."""
    last = _settled_end(run)
    return last is not None and last.decision == "end" and last.reason in _SUCCESSFUL_REASONS


def record_dependent(run: RunDir, *, dependent: RunDir, job_id: str) -> None:
    """Record in the directory of ``run`` that the job ``job_id`` of ``dependent`` depends on ``run``.

    Raises:
        OSError: the directory of ``run`` is not writable.
    """
    append_line(run.path / _DEPENDENTS, {"job_id": job_id, "run": str(dependent.path)})


def update_dependents(slurm: Slurm, run: RunDir) -> list[str]:
    """Update the dependency of each job that depends on ``run``, so that it waits for the run's current jobs.

    Returns:
        A message for each job that could not be updated.
    """
    problems: list[str] = []
    for line, _ in read_lines(run.path / _DEPENDENTS):
        dependent = RunDir(Path(line["run"]))
        document = read_json(dependent.spec)
        if document is None:
            continue  # the dependent's directory has been removed
        launch = launch_of(document, source=dependent.spec)
        text = dependency_text(launch.after, document["spec"]["slurm"].get("dependency"))
        try:
            if text:
                slurm.depend(line["job_id"], text)
        except (ClusterError, SlurmCommandError) as error:
            problems.append(
                f"job {line['job_id']} depends on this run and may start too early, because its dependency could not "
                f"be updated: {error}"
            )
    return problems


def submit_followers(slurm: Slurm, run: RunDir, *, behind: Sequence[str], count: int) -> list[str]:
    """Submit the script of ``run`` ``count`` more times. If one submission fails, the other new jobs are cancelled.

    Args:
        behind: jobs of the run that have not ended, oldest first. Each new job waits for the end of all these jobs
            and of the earlier new jobs, so that cancelling a waiting job does not start a later job early.

    Returns:
        The new job ids, in the order of submission.

    Raises:
        ClusterError: Slurm rejected one of the jobs.
        SlurmCommandError: the controller did not respond.
    """
    submitted: list[str] = []
    try:
        for _ in range(count):
            dependency = f"--dependency=afterany:{':'.join([*behind, *submitted])}"
            # A begin time in the spec applies to the first job only.
            submitted.append(slurm.sbatch(run.script, [dependency, "--begin=now"]))
            _share_pickle(run, behind[0], submitted[-1])
    except BaseException:
        _cancel_all(slurm, submitted)
        raise
    return submitted


def _cancel_all(slurm: Slurm, job_ids: Sequence[str]) -> None:
    for job_id in reversed(job_ids):
        try:
            slurm.cancel(job_id)
        except HpcaccelError:
            continue  # the job exits when it starts, because no record lists it


def _share_pickle(run: RunDir, first: str, job_id: str) -> None:
    pickle = run.submitit / _PICKLE.format(job_id=first)
    if pickle.exists():
        (run.submitit / _PICKLE.format(job_id=job_id)).symlink_to(pickle.resolve().name)
