"""Jobs that wait for the end of runs: which of Slurm's dependencies say that, at this moment.

A run may go through several jobs. One that is requeued keeps its id, and Slurm itself waits for its last end. Of a
chain all jobs that are in the queue are named; each job of it that hands in another has those that wait told of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcaccel.core.run_dir import RunDir, append_line, read_json, read_lines
from hpcaccel.errors import ClusterError, SlurmCommandError
from hpcaccel.slurm.commands import Slurm

__all__ = ["dependency_text", "ended_well", "is_settled", "remember_dependent", "tell_dependents"]

_DEPENDENTS = "dependents.jsonl"
_WELL = ("completed", "pruned")


def dependency_text(after: Sequence[Mapping[str, str]], also: str | None) -> str:
    """What ``--dependency`` takes; empty where nothing is to be waited for any more.

    Args:
        after: the ``after`` part of a run's ``spec.json``: ``kind`` and ``run``, a directory.
        also: a dependency of the user's own.
    """
    parts = [part for one in after if (part := _part(one["kind"], RunDir(one["run"])))]
    return ",".join([*parts, *([also] if also else [])])


def _part(kind: str, run: RunDir) -> str:
    record = read_json(run.record) or {}
    jobs, links = record.get("job_ids", []), record.get("links", [])
    if is_settled(run) or not jobs:
        return ""
    if jobs[-1] in links:  # whether it has ended well is asked when the last of them is over
        return "afterany:" + ":".join(links[links.index(jobs[-1]) :])
    return f"{kind}:{jobs[-1]}"


def _last_line(run: RunDir) -> dict[str, Any]:
    offset = (read_json(run.record) or {}).get("ledger_offset", 0)
    last: dict[str, Any] = {}
    for line, _ in read_lines(run.ledger, offset=offset):
        last = line
    return last


def is_settled(run: RunDir) -> bool:
    """Whether the ledger says that nothing follows by itself."""
    return _last_line(run).get("decision") in ("end", "pause")


def ended_well(run: RunDir) -> bool:
    """Whether the ledger says that the run is over, and well."""
    last = _last_line(run)
    return last.get("decision") == "end" and last.get("reason") in _WELL


def remember_dependent(run: RunDir, *, dependent: RunDir, job_id: str) -> None:
    """Write down in ``run`` who waits for it.

    Raises:
        OSError: its directory cannot be written to.
    """
    append_line(run.path / _DEPENDENTS, {"job_id": job_id, "run": str(dependent.path)})


def tell_dependents(slurm: Slurm, run: RunDir) -> list[str]:
    """Have the jobs that wait for ``run`` wait for all jobs that it has now; what went wrong, in sentences."""
    problems: list[str] = []
    for line, _ in read_lines(run.path / _DEPENDENTS):
        document = read_json(RunDir(Path(line["run"])).spec)
        if document is None:
            continue  # its directory has been removed
        text = dependency_text(document["launch"].get("after", []), document["spec"]["slurm"].get("dependency"))
        try:
            if text:
                slurm.depend(line["job_id"], text)
        except (ClusterError, SlurmCommandError) as error:
            problems.append(f"cannot tell job {line['job_id']}, which waits for this run, of its new job: {error}")
    return problems
