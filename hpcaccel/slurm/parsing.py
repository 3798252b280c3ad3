"""Parsers for the output of scontrol show job, squeue, sacct and sbatch --test-only; tested on 22.05 and 26.11.

Job names and comments are chosen by users and may contain anything but a line break. They can be parsed only as the
last or the only field of a line, so jobs are read from scontrol's multi-line output, not from ``--oneliner``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpcaccel.slurm import hostlist
from hpcaccel.slurm.states import AccountingEntry, JobInfo, QueueEntry, is_held, parse_duration, parse_state, parse_time

__all__ = [
    "QUEUE_FORMAT",
    "SACCT_FORMAT",
    "WAITING_FORMAT",
    "StartEstimate",
    "WaitingJob",
    "accounting_entries",
    "jobs",
    "leading_number",
    "parse_estimate",
    "parse_waiting",
    "pick_job",
    "queue_entries",
]

QUEUE_FORMAT = "%i|%T|%P|%u|%N|%D|%S|%e|%V|%l|%r|%j"
SACCT_FORMAT = "JobID,State,ExitCode,Partition,Submit,Start,End,ElapsedRaw,NodeList,Reason,JobName"

_NOTHING = frozenset({"", "(null)", "None", "N/A", "None assigned", "Unknown"})
"""Slurm's placeholders for "no value"."""

# -- scontrol show job --------------------------------------------------------------------------------------------

_FREE_TEXT = frozenset({"AdminComment", "Command", "Comment", "StdErr", "StdIn", "StdOut", "SubmitLine", "WorkDir"})
"""Free-text fields, each on a line of its own."""


def jobs(text: str) -> list[JobInfo]:
    """Every job in the multi-line output of ``scontrol show job``."""
    return [_job(block) for block in re.split(r"(?m)^(?=JobId=\d)", text) if block.startswith("JobId=")]


def pick_job(found: list[JobInfo], job_id: str) -> JobInfo | None:
    """The job or array task with this id in ``found``, or None. For an array's id, scontrol prints all of its tasks."""
    for job in found:
        if job_id in (job.job_id, job.address):
            return _with_reason(job, found)
    base, _, task = job_id.partition("_")
    for job in found:  # pending tasks are printed together: ArrayTaskId=1-5%2
        if task.isdigit() and job.array_job_id == base and job.array_task_id is None:
            return _with_task(job, int(task))
    return found[0] if len(found) == 1 and not task else None


_GENERAL_REASONS = ("", "Resources", "Priority", "BeginTime")
"""Reasons of a heterogeneous job that are replaced by a component's more specific reason."""


def _with_reason(job: JobInfo, found: list[JobInfo]) -> JobInfo:
    """``job`` with the most specific reason among ``found``, the components of a heterogeneous job."""
    reasons = [one.reason for one in found if one.array_job_id is None and one.state == job.state]
    specific = next((reason for reason in [job.reason, *reasons] if reason not in _GENERAL_REASONS), None)
    return replace(job, reason=specific or job.reason or next(filter(None, reasons), ""))


def _with_task(job: JobInfo, task: int) -> JobInfo:
    return JobInfo(**{**job.__dict__, "array_task_id": task})


def _job(block: str) -> JobInfo:
    head, *lines = block.split("\n")
    fields: dict[str, str] = {}
    for line in lines:
        for key, value in _fields(line):
            fields.setdefault(key, value)
    # The name may contain anything and extends to the end of the first line.
    first = re.match(r"JobId=(?P<id>\d+)(?P<rest>.*?) JobName=(?P<name>.*)", head)
    if first is None:
        first = re.match(r"JobId=(?P<id>\d+)(?P<rest>.*)(?P<name>)", head)
    assert first is not None
    array = dict(_fields(first["rest"]))
    task = array.get("ArrayTaskId", "")
    return JobInfo(
        job_id=first["id"],
        array_job_id=array.get("ArrayJobId"),
        array_task_id=int(task) if task.isdigit() else None,
        name=first["name"],
        state=parse_state(fields.get("JobState", "")),
        reason=_value(fields.get("Reason", "")),
        preempt_time=parse_time(fields.get("PreemptTime", "")),
        submit_time=parse_time(fields.get("SubmitTime", "")),
        start_time=parse_time(fields.get("StartTime", "")),
        end_time=parse_time(fields.get("EndTime", "")),
        time_limit_seconds=parse_duration(fields.get("TimeLimit", "")),
        restarts=leading_number(fields.get("Restarts", "")),
        nodes=_value(fields.get("NodeList", "")),
        batch_host=_value(fields.get("BatchHost", "")),
        required_nodes=_value(fields.get("ReqNodeList", "")),
        excluded_nodes=_value(fields.get("ExcNodeList", "")),
        partition=_value(fields.get("Partition", "")),
        qos=_value(fields.get("QOS", "")),
        requeue=fields.get("Requeue") == "1",
        exit_code=fields.get("ExitCode", ""),
        comment=_comment(fields),
    )


def _comment(fields: dict[str, str]) -> str:
    """The comment. Releases up to 25.05 append a space; later ones, which print a SubmitLine, do not."""
    comment = fields.get("Comment", "")
    return comment if "SubmitLine" in fields else comment.removesuffix(" ")


def _fields(line: str) -> Iterator[tuple[str, str]]:
    """The ``Key=value`` pairs of one line. A free-text field takes up the whole line."""
    key, equals, value = line.lstrip(" ").partition("=")
    if equals and key in _FREE_TEXT:
        yield key, value
        return
    for pair in re.split(r" +(?=[A-Z][A-Za-z/:_]*=)", line.strip()):
        key, equals, value = pair.partition("=")
        if equals:
            yield key, value


# -- squeue and sacct ---------------------------------------------------------------------------------------------


def queue_entries(text: str) -> dict[str, QueueEntry]:
    """Entries from ``squeue --array --noheader --format=QUEUE_FORMAT``, by job id (``45``, ``46_3``)."""
    entries = {}
    for cells in _rows(text, columns=12):
        job_id, state, partition, user, nodes, count, start, end, submit, limit, reason, name = cells
        for one in _addresses(job_id):
            entries[one] = QueueEntry(
                job_id=one,
                name=name,
                state=parse_state(state),
                reason=_value(reason),
                partition=partition,
                user=user,
                nodes=_value(nodes),
                node_count=leading_number(count),
                start_time=parse_time(start),
                end_time=parse_time(end),
                submit_time=parse_time(submit),
                time_limit_seconds=parse_duration(limit),
            )
    return entries


def accounting_entries(text: str) -> dict[str, AccountingEntry]:
    """The newest record of each job from ``sacct --parsable2 --noheader --format=SACCT_FORMAT``."""
    newest: dict[str, AccountingEntry] = {}
    records: dict[str, int] = {}
    for cells in _rows(text, columns=11):
        job_id, state, exit_code, partition, submit, start, end, elapsed, nodes, reason, name = cells
        for one in _addresses(job_id):
            entry = AccountingEntry(
                job_id=one,
                name=name,
                state=parse_state(state),
                cancelled_by=_cancelled_by(state),
                exit_code=exit_code,
                reason=_value(reason),
                partition=partition,
                nodes=_value(nodes),
                submit_time=parse_time(submit),
                start_time=parse_time(start),
                end_time=parse_time(end),
                elapsed_seconds=leading_number(elapsed),
            )
            records[one] = records.get(one, 0) + 1
            if one not in newest or (entry.submit_time or 0.0) >= (newest[one].submit_time or 0.0):
                newest[one] = entry
    return {one: AccountingEntry(**{**entry.__dict__, "records": records[one]}) for one, entry in newest.items()}


_JOB_ID = re.compile(r"\d+(?:_(?:\d+|\[[^\]|]*\]|\*)|\+\d+)?")


def _rows(text: str, *, columns: int) -> Iterator[list[str]]:
    """Lines split into columns; the last column may contain the separator. Other lines (warnings) are skipped."""
    for line in text.split("\n"):
        cells = line.split("|", columns - 1)
        if len(cells) == columns and _JOB_ID.fullmatch(cells[0]):
            yield cells


def _addresses(job_id: str) -> list[str]:
    """``46_[1-3%2]`` → 46_1 46_2 46_3; any other id is one job.

    The first component of a heterogeneous job (``18+0``) has the job's id and represents the job: Slurm starts,
    requeues and ends all components together.
    """
    base, bracket, rest = job_id.partition("_[")
    if not bracket:
        return [job_id.removesuffix("+0")]
    try:
        return [f"{base}_{index}" for index in hostlist.array_indices(rest)]
    except ValueError:  # truncated by Slurm: the missing tasks are unknown
        return [job_id]


def _cancelled_by(state: str) -> str | None:
    match = re.search(r"CANCELLED by (\S+)", state)
    return match[1] if match else None


def _value(text: str) -> str:
    """``text``, or an empty string for Slurm's placeholders for "no value"."""
    return "" if text.strip() in _NOTHING else text.strip()


def leading_number(text: str) -> int:
    """The number at the start of a string (``20000M``, ``8+``); 0 if there is none."""
    match = re.match(r"\d+", text.strip())
    return int(match[0]) if match else 0


WAITING_FORMAT = "%i|%Q|%u|%D|%P|%l|%S|%E|%T|%r"


@dataclass(frozen=True, kw_only=True)
class StartEstimate:
    """Result of ``sbatch --test-only``."""

    start_time: float | None = None
    nodes: str = ""
    """A host list."""
    partition: str = ""
    refusal: str = ""
    """Slurm's error message if Slurm would reject the job."""


@dataclass(frozen=True, kw_only=True)
class WaitingJob:
    """A pending job, or all pending tasks of an array, of any user."""

    job_id: str
    priority: int = 0
    user: str = ""
    node_count: int = 0
    partitions: tuple[str, ...] = ()
    time_limit_seconds: int | None = None
    start_time: float | None = None
    """When the scheduler expects to start the job; None if it has made no estimate yet."""
    dependency: str = ""
    reason: str = ""
    held: bool = False


def parse_estimate(stderr: str) -> StartEstimate | None:
    """The estimate in the output of ``sbatch --test-only``; None if it contains none.

    Example: ``sbatch: Job 49 to start at 2026-11-20T23:06:21 using 3 processors on nodes n[1-3] in partition gpu``.
    """
    match = re.search(r"Job \d+ to start at (\S+)(?:.*? on nodes (\S+))?(?:.*? in partition (\S+))?", stderr)
    if match is None:
        return None
    return StartEstimate(start_time=parse_time(match[1]), nodes=match[2] or "", partition=match[3] or "")


def parse_waiting(text: str) -> list[WaitingJob]:
    """Jobs from ``squeue --noheader --format=WAITING_FORMAT``."""
    found = []
    for line in text.splitlines():
        cells = line.split("|", 9)
        if len(cells) != 10 or not cells[0][:1].isdigit():
            continue  # a warning
        job_id, priority, user, nodes, partitions, limit, start, dependency, state, reason = (
            cell.strip() for cell in cells
        )
        found.append(
            WaitingJob(
                job_id=job_id.removesuffix("+0"),  # a heterogeneous job's first component has the job's id
                priority=int(priority) if priority.isdigit() else 0,
                user=user,
                node_count=int(re.match(r"\d*", nodes)[0] or 0),  # type: ignore[index]
                partitions=tuple(partitions.split(",")),
                time_limit_seconds=parse_duration(limit),
                start_time=parse_time(start),
                dependency="" if dependency == "(null)" else dependency,
                reason="" if reason == "None" else reason,
                held=is_held(parse_state(state), reason),
            )
        )
    return found
