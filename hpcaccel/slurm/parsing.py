"""From what Slurm's commands print to records. Pure text in, records out; tried on 22.05 and 26.11.

Names and comments are the users' own and may hold anything but a line break, so they stand last on a line, or alone
on one: that is why jobs are read from scontrol's many-line form and not from ``--oneliner``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from hpcaccel.slurm import hostlist
from hpcaccel.slurm.states import (
    AccountingEntry,
    Association,
    JobInfo,
    PartitionInfo,
    QueueEntry,
    parse_duration,
    parse_state,
    parse_time,
)

__all__ = [
    "ASSOCIATION_FORMAT",
    "PARTITION_FORMAT",
    "QUEUE_FORMAT",
    "SACCT_FORMAT",
    "accounting_entries",
    "associations",
    "config_values",
    "failed_nodes",
    "jobs",
    "partitions",
    "pick_job",
    "queue_entries",
]

QUEUE_FORMAT = "%i|%T|%P|%u|%N|%D|%S|%e|%V|%l|%r|%j"
SACCT_FORMAT = "JobID,State,ExitCode,Partition,Submit,Start,End,ElapsedRaw,NodeList,Reason,JobName"
PARTITION_FORMAT = "%P|%a|%D|%c|%m|%l|%L|%M|%p|%G"
ASSOCIATION_FORMAT = "DefaultAccount,Account,Partition,DefaultQOS,QOS"

_NOTHING = frozenset({"", "(null)", "None", "N/A", "None assigned", "Unknown"})

# -- scontrol show job --------------------------------------------------------------------------------------------

_FREE_TEXT = frozenset({"AdminComment", "Command", "Comment", "StdErr", "StdIn", "StdOut", "SubmitLine", "WorkDir"})


def jobs(text: str) -> list[JobInfo]:
    """Every job in the many-line output of ``scontrol show job``."""
    return [_job(block) for block in re.split(r"(?m)^(?=JobId=\d)", text) if block.startswith("JobId=")]


def pick_job(found: list[JobInfo], job_id: str) -> JobInfo | None:
    """The job of this id. scontrol prints all tasks when it is asked for an array by its plain number."""
    for job in found:
        if job_id in (job.job_id, job.address):
            return _with_reason(job, found)
    base, _, task = job_id.partition("_")
    for job in found:  # a task that still waits is printed with all others that wait: ArrayTaskId=1-5%2
        if task.isdigit() and job.array_job_id == base and job.array_task_id is None:
            return _with_task(job, int(task))
    return found[0] if len(found) == 1 and not task else None


_OF_ALL = ("", "Resources", "Priority", "BeginTime")
"""Reasons that tell nothing of a job where one of its components has another."""


def _with_reason(job: JobInfo, found: list[JobInfo]) -> JobInfo:
    """Of a heterogeneous job all components are printed; what it waits for may stand with another than the first."""
    reasons = [one.reason for one in found if one.array_job_id is None and one.state == job.state]
    telling = next((reason for reason in [job.reason, *reasons] if reason not in _OF_ALL), None)
    return replace(job, reason=telling or job.reason or next(filter(None, reasons), ""))


def _with_task(job: JobInfo, task: int) -> JobInfo:
    return JobInfo(**{**job.__dict__, "array_task_id": task})


def _job(block: str) -> JobInfo:
    head, *lines = block.split("\n")
    fields: dict[str, str] = {}
    for line in lines:
        for key, value in _fields(line):
            fields.setdefault(key, value)
    # The name goes on to the end of the first line, whatever it looks like.
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
        reason=_something(fields.get("Reason", "")),
        preempt_time=parse_time(fields.get("PreemptTime", "")),
        submit_time=parse_time(fields.get("SubmitTime", "")),
        start_time=parse_time(fields.get("StartTime", "")),
        end_time=parse_time(fields.get("EndTime", "")),
        time_limit_seconds=parse_duration(fields.get("TimeLimit", "")),
        restarts=_number(fields.get("Restarts", "")),
        nodes=_something(fields.get("NodeList", "")),
        required_nodes=_something(fields.get("ReqNodeList", "")),
        excluded_nodes=_something(fields.get("ExcNodeList", "")),
        partition=_something(fields.get("Partition", "")),
        qos=_something(fields.get("QOS", "")),
        requeue=fields.get("Requeue") == "1",
        exit_code=fields.get("ExitCode", ""),
        comment=_comment(fields),
    )


def _comment(fields: dict[str, str]) -> str:
    """Up to 25.05 there is a space behind it, which is nobody's. The releases since then print a SubmitLine."""
    comment = fields.get("Comment", "")
    return comment if "SubmitLine" in fields else comment.removesuffix(" ")


def _fields(line: str) -> Iterator[tuple[str, str]]:
    """The ``Key=value`` pairs of one line; a free text takes the whole of its line."""
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
    """The lines of ``squeue --array --noheader --format=QUEUE_FORMAT``, by job id (``45``, ``46_3``)."""
    entries = {}
    for cells in _rows(text, columns=12):
        job_id, state, partition, user, nodes, count, start, end, submit, limit, reason, name = cells
        for one in _addresses(job_id):
            entries[one] = QueueEntry(
                job_id=one,
                name=name,
                state=parse_state(state),
                reason=_something(reason),
                partition=partition,
                user=user,
                nodes=_something(nodes),
                node_count=_number(count),
                start_time=parse_time(start),
                end_time=parse_time(end),
                submit_time=parse_time(submit),
                time_limit_seconds=parse_duration(limit),
            )
    return entries


def accounting_entries(text: str) -> dict[str, AccountingEntry]:
    """The lines of ``sacct --parsable2 --noheader --format=SACCT_FORMAT``: the newest record of each job."""
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
                reason=_something(reason),
                partition=partition,
                nodes=_something(nodes),
                submit_time=parse_time(submit),
                start_time=parse_time(start),
                end_time=parse_time(end),
                elapsed_seconds=_number(elapsed),
            )
            records[one] = records.get(one, 0) + 1
            if one not in newest or (entry.submit_time or 0.0) >= (newest[one].submit_time or 0.0):
                newest[one] = entry
    return {one: AccountingEntry(**{**entry.__dict__, "records": records[one]}) for one, entry in newest.items()}


_JOB_ID = re.compile(r"\d+(?:_(?:\d+|\[[^\]|]*\]|\*)|\+\d+)?")


def _rows(text: str, *, columns: int) -> Iterator[list[str]]:
    """Lines cut into columns, the last of which may hold the separator. Other lines (warnings) are passed over."""
    for line in text.split("\n"):
        cells = line.split("|", columns - 1)
        if len(cells) == columns and _JOB_ID.fullmatch(cells[0]):
            yield cells


def _addresses(job_id: str) -> list[str]:
    """``46_[1-3%2]`` → 46_1 46_2 46_3; anything else is one job. The first component of a heterogeneous job (``18+0``)
    has the job's own number, and stands for all: Slurm starts, requeues and ends them together."""
    base, bracket, rest = job_id.partition("_[")
    if not bracket:
        return [job_id.removesuffix("+0")]
    try:
        return [f"{base}_{index}" for index in hostlist.array_indices(rest)]
    except ValueError:  # cut short by Slurm: the tasks that are not named cannot be guessed
        return [job_id]


def _cancelled_by(state: str) -> str | None:
    match = re.search(r"CANCELLED by (\S+)", state)
    return match[1] if match else None


# -- sinfo, sacctmgr, scontrol show config ------------------------------------------------------------------------


def partitions(text: str) -> list[PartitionInfo]:
    """The lines of ``sinfo --exact --noheader --format=PARTITION_FORMAT``, one record a partition."""
    merged: dict[str, PartitionInfo] = {}
    for line in text.split("\n"):
        cells = line.split("|", 9)
        if len(cells) == 10:
            one = _partition(cells)
            merged[one.name] = _merge(merged[one.name], one) if one.name in merged else one
    return list(merged.values())


def failed_nodes(text: str) -> list[str]:
    """Nodes that are down or do not answer (``down*``, ``idle*``), of ``sinfo --noheader --Node --format=%N|%T``."""
    cells = (line.partition("|") for line in text.splitlines())
    failed = (name for name, _, state in cells if state.lower().startswith(("down", "fail")) or state.endswith("*"))
    return list(dict.fromkeys(name.strip() for name in failed))


def _partition(cells: list[str]) -> PartitionInfo:
    name, available, nodes, cpus, memory, limit, default_time, preempt_mode, tier, gres = cells
    gpus, types = _gpus(gres)
    return PartitionInfo(
        name=name.removesuffix("*"),
        default=name.endswith("*"),
        available=available.lower() == "up",
        nodes=_number(nodes),
        cpus_per_node=_number(cpus),
        memory_mb_per_node=_number(memory),
        gpus_per_node=gpus,
        gpu_types=types,
        time_limit_seconds=parse_duration(limit),
        default_time_seconds=parse_duration(default_time),
        preempt_mode=preempt_mode,
        priority_tier=_number(tier),
    )


def _merge(a: PartitionInfo, b: PartitionInfo) -> PartitionInfo:
    return PartitionInfo(
        **{
            **a.__dict__,
            "nodes": a.nodes + b.nodes,
            "cpus_per_node": min(a.cpus_per_node, b.cpus_per_node),
            "memory_mb_per_node": min(a.memory_mb_per_node, b.memory_mb_per_node),
            "gpus_per_node": min(a.gpus_per_node, b.gpus_per_node),
            "gpu_types": tuple(dict.fromkeys(a.gpu_types + b.gpu_types)),
        }
    )


def _gpus(gres: str) -> tuple[int, tuple[str, ...]]:
    """``gpu:a100:4(S:0-1),gpu:v100:2,nvme:1`` → (6, ("a100", "v100"))."""
    count, types = 0, []
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        parts = item.strip().split(":")
        if parts[0] != "gpu":
            continue
        count += _number(parts[-1]) if len(parts) > 1 else 1
        if len(parts) > 2:
            types.append(parts[1])
    return count, tuple(types)


def associations(text: str) -> list[Association]:
    """The lines of ``sacctmgr --parsable2 --noheader show user … withassoc format=ASSOCIATION_FORMAT``."""
    found = []
    for line in text.split("\n"):
        cells = line.split("|")
        if len(cells) != 5 or not cells[1]:
            continue
        default, account, partition, default_qos, qos = cells
        found.append(
            Association(
                account=account,
                default=account == default,
                partition=partition or None,
                qos=tuple(name for name in qos.split(",") if name),
                default_qos=default_qos or None,
            )
        )
    return found


def config_values(text: str) -> dict[str, str]:
    """``Key = value`` lines of ``scontrol show config``; (null) becomes the empty text."""
    pairs = (line.split("=", 1) for line in text.split("\n") if re.match(r"\w+\s*=", line))
    return {key.strip(): "" if value.strip() == "(null)" else value.strip() for key, value in pairs}


def _something(text: str) -> str:
    return "" if text.strip() in _NOTHING else text.strip()


def _number(text: str) -> int:
    """The number that a text begins with (``20000M``, ``8+``), 0 where there is none."""
    match = re.match(r"\d+", text.strip())
    return int(match[0]) if match else 0
