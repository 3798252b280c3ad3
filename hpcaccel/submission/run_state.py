"""What a run's own directory says about where it stands, before anybody asks a scheduler."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hpcaccel.core.records import AttemptEnd, AttemptStart, RunRecord, StopRequest, from_dict, to_dict
from hpcaccel.core.run_dir import RunDir, WorkerDir, read_json, read_lines, write_json
from hpcaccel.errors import RunDirectoryError

__all__ = [
    "Facts",
    "honoured_name",
    "open_requests",
    "read_facts",
    "read_record",
    "read_worker_facts",
    "waiting_links",
    "write_record",
]

_HONOURED = "honoured-"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The record, the ledger and the open requests of one run."""

    run: RunDir
    record: RunRecord
    attempts: int
    """Attempts of all jobs that the run went through."""
    restarts: int
    """How many of them followed another inside the same allocation."""
    started: AttemptStart | None
    """The newest attempt of the newest job that has no end in the ledger."""
    last_end: AttemptEnd | None
    """The newest end in the ledger since the newest job was submitted; None while ``started`` is open."""
    asked: StopRequest | None
    """The newest request that no supervisor honoured yet."""
    stopping: bool
    """The ranks of the open attempt have been asked to stop."""

    @property
    def job_id(self) -> str:
        """The newest job; of a run whose record names none the one that holds its lease."""
        return self.record.job_ids[-1] if self.record.job_ids else next(iter(self.unrecorded), "")

    @property
    def waiting(self) -> list[str]:
        """The jobs of its chain that wait behind the newest one."""
        return waiting_links(self.record)

    @property
    def unrecorded(self) -> list[str]:
        """The job that holds the run's lease, where its record does not know it. (A trial's job is its worker's.)"""
        lease = None if self.run.is_trial else read_json(self.run.lease)
        job_id = "" if lease is None else str(lease["job_id"])
        return [job_id] if job_id and job_id not in (*self.record.job_ids, *self.record.links) else []

    @property
    def settled(self) -> AttemptEnd | None:
        """The end after which nothing follows by itself, if that is what the ledger says."""
        end = self.last_end
        return end if end is not None and end.decision in ("end", "pause") else None


def read_record(run: RunDir) -> RunRecord:
    """Raises RunDirectoryError where ``run`` is no run directory."""
    value = read_json(run.record)
    if value is None:
        raise RunDirectoryError(f"{run.path} is no run directory: it has no {run.record.name}")
    return from_dict(RunRecord, value)


def waiting_links(record: RunRecord) -> list[str]:
    """The jobs of a chain that wait behind the newest one."""
    if not record.job_ids or record.job_ids[-1] not in record.links:
        return []
    return record.links[record.links.index(record.job_ids[-1]) + 1 :]


def write_record(run: RunDir, record: RunRecord, *, sync: bool = True) -> None:
    write_json(run.record, to_dict(record), sync=sync)


def read_facts(run: RunDir) -> Facts:
    """Raises RunDirectoryError where ``run`` is no run directory."""
    record = read_record(run)
    starts: dict[int, AttemptStart] = {}
    known: set[int] = set()
    restarts = 0
    last: AttemptStart | AttemptEnd | None = None
    for line, offset in read_lines(run.ledger):
        current = offset > record.ledger_offset
        if line.get("event") == "start":
            start = from_dict(AttemptStart, line)
            known.add(start.attempt)
            starts[start.attempt] = start
            last = start if current else None
        elif line.get("event") == "end":
            end = from_dict(AttemptEnd, line)
            known.add(end.attempt)
            restarts += end.decision == "restart"
            last = end if current else None
    started = last if isinstance(last, AttemptStart) else None
    requests = open_requests(run)
    return Facts(
        run=run,
        record=record,
        attempts=len(known),
        restarts=restarts,
        started=started,
        last_end=last if isinstance(last, AttemptEnd) else None,
        asked=requests[-1][1] if requests else None,
        stopping=started is not None and run.stop(started.attempt).exists(),
    )


def read_worker_facts(worker: WorkerDir) -> Facts:
    """The same of a sweep's worker: its allocations are its attempts.

    Raises:
        RunDirectoryError: ``worker`` is no worker's folder.
    """
    record = read_record(worker)
    count = restarts = 0
    last: AttemptStart | AttemptEnd | None = None
    for line, offset in read_lines(worker.account):
        current = offset > record.ledger_offset
        if line.get("event") == "start":
            count += 1
            last = from_dict(AttemptStart, {**line, "attempt": count}) if current else None
        elif line.get("event") == "end":
            end = from_dict(AttemptEnd, {**line, "attempt": count})
            restarts += end.decision == "requeue"
            last = end if current else None
    requests = [*open_requests(worker.sweep), *open_requests(worker)]
    return Facts(
        run=worker,
        record=record,
        attempts=count,
        restarts=restarts,
        started=last if isinstance(last, AttemptStart) else None,
        last_end=last if isinstance(last, AttemptEnd) else None,
        asked=requests[-1][1] if requests else None,
        stopping=False,
    )


def open_requests(run: RunDir) -> list[tuple[str, StopRequest]]:
    """Requests in ``control/`` that nobody honoured yet, by file name, oldest first."""
    try:
        names = [entry.name for entry in os.scandir(run.control)]
    except FileNotFoundError:
        return []
    found = []
    for name in names:
        if name.startswith("stop-") and name.endswith(".json") and (value := read_json(run.control / name)) is not None:
            found.append((name, from_dict(StopRequest, value)))
    return sorted(found, key=lambda item: item[1].time)


def honoured_name(name: str) -> str:
    return _HONOURED + name
