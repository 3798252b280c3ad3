"""The meaning of Slurm's reasons why a job is pending, with advice.

The names of reasons are in Slurm's src/common/job_state_reason.c and at ``SOURCE``. Reasons that name a limit, such as
``QOSMaxCpuPerUserLimit``, are parsed. A job that has ended shows some other reasons, which are explained here too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["SOURCE", "Meaning", "explain_reason", "meaning"]

SOURCE = "https://slurm.schedmd.com/job_reason_codes.html"


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """The meaning of a reason. ``waits`` is true if the job may start without any action by the user or the site."""

    words: str
    advice: str
    waits: bool = True


_WAIT = "wait; no action is needed"
_ADMIN = "ask the site's administrators"


def _fix(key: str) -> str:
    return f"cancel it, fix {key} in the spec and submit again"


_MEANINGS: dict[str, tuple[str, str, bool]] = {
    "None": ("the scheduler has not considered the job yet", "wait a minute and run this command again", True),
    "Priority": (
        "jobs with a higher priority are ahead of it",
        "wait, or compare start times with `hpcaccel plan`",
        True,
    ),
    "Resources": (
        "the job is next, but the nodes it needs are busy",
        "wait; a job with fewer nodes may start sooner",
        True,
    ),
    "BeginTime": ("the job's earliest start time is in the future; Slurm also delays a requeued job", _WAIT, True),
    "Dependency": (
        "the job waits for another job (slurm.dependency)",
        "check the other job with `hpcaccel explain` or squeue",
        True,
    ),
    "DependencyNeverSatisfied": (
        "the other job ended in a state that can never satisfy slurm.dependency",
        "cancel this job; then fix the other job, or remove slurm.dependency from the spec",
        False,
    ),
    "JobHeldUser": ("the job is held by you or your account's coordinator", "release it: scontrol release JOB", False),
    "JobHeldAdmin": ("the job is held by an administrator", _ADMIN, False),
    "JobHoldMaxRequeue": (
        "Slurm holds the job because it has requeued it too often (MaxBatchRequeue)",
        "see its log (hpcaccel logs --rank batch), then: scontrol release JOB",
        False,
    ),
    "launch failed requeued held": (
        "Slurm holds the job because its last start failed, usually because of a node",
        "release it: scontrol release JOB. If this happens again, exclude the node (slurm.exclude)",
        False,
    ),
    "job requeued in held state": ("the job was requeued and held", "release it: scontrol release JOB", False),
    "JobArrayTaskLimit": ("the array has reached its limit of running tasks (the % of --array)", _WAIT, True),
    "Licenses": ("the licences that the job requests are in use", "wait, or remove slurm.licenses from the spec", True),
    "ReqNodeNotAvail": (
        "nodes that the job needs are down, drained or reserved, for example for maintenance",
        "wait, choose other nodes (slurm.nodelist), or set a time limit that ends before the reservation (slurm.time)",
        True,
    ),
    "Nodes required for job are DOWN": (
        "nodes that the job needs are down, drained or reserved for jobs in partitions of higher priority",
        "wait, or choose other nodes (slurm.nodelist) or another partition (slurm.partition)",
        True,
    ),
    "NodeDown": ("a node that the job requires is down", "wait, or remove the node from slurm.nodelist", True),
    "FrontEndDown": ("no front-end node is available to start the job", _ADMIN, True),
    "Reservation": ("the job's reservation has not started or is full", "wait, or remove slurm.reservation", True),
    "ReservationDeleted": (
        "the job's reservation no longer exists",
        "cancel it, remove slurm.reservation from the spec and submit again",
        False,
    ),
    "ReservationInvalid": ("the reservation cannot be used for this job", _fix("slurm.reservation"), False),
    "PartitionDown": (
        "the partition is down, and its jobs stay pending",
        "wait, or choose another partition (slurm.partition)",
        True,
    ),
    "PartitionInactive": ("the partition is inactive", "choose another partition (slurm.partition)", True),
    "PartitionNodeLimit": (
        "the job requests more or fewer nodes than its partition allows, or nodes of the partition are down",
        _fix("slurm.nodes"),
        False,
    ),
    "PartitionTimeLimit": ("the job's time limit exceeds the limit of its partition", _fix("slurm.time"), False),
    "PartitionConfig": ("the partition does not allow this request", _fix("slurm.partition"), False),
    "BadConstraints": (
        "no node can ever meet the job's request",
        "cancel it, fix the spec (hpcaccel validate shows what is wrong) and submit again",
        False,
    ),
    "Constraints": ("the job's constraints cannot be met at the moment", "wait, or change slurm.constraint", True),
    "DeadLine": ("the job can no longer finish before its deadline", _fix("slurm.deadline"), False),
    "AccountNotAllowed": ("the job's account may not use this partition", _fix("slurm.account"), False),
    "QOSNotAllowed": ("the job's QOS is not allowed for its account or partition", _fix("slurm.qos"), False),
    "InvalidAccount": ("the job's account does not exist or was deleted", _fix("slurm.account"), False),
    "InvalidQOS": ("the job's QOS does not exist or was deleted", _fix("slurm.qos"), False),
    "AccountingPolicy": (
        "an accounting limit keeps the job from starting",
        "wait, or ask the site's administrators which limit it is",
        True,
    ),
    "QOSUsageThreshold": ("your fair share is below the QOS's UsageThreshold", "wait until it recovers", True),
    "MaxMemPerLimit": ("the job requests more memory per CPU or node than is allowed", _fix("slurm.mem"), False),
    "Cleaning": ("the job is being requeued, and Slurm is still cleaning up its last start", _WAIT, True),
    "Prolog": ("the site's prolog is running on the job's nodes", _WAIT, True),
    "SchedDefer": (
        "the job requested an immediate start, and the scheduler defers jobs (SchedulerParameters=defer)",
        "submit it again",
        True,
    ),
    "BurstBufferResources": ("the burst buffer does not have enough free space", _WAIT, True),
    "BurstBufferStageIn": ("the job's data is being copied to the burst buffer", _WAIT, True),
    "BurstBufferOperation": ("a burst buffer operation failed", _ADMIN, False),
    "PowerNotAvail": ("not enough electrical power is available", _WAIT, True),
    "PowerReserved": ("the electrical power that the job needs is reserved", _WAIT, True),
    "FedJobLock": ("the clusters of the federation are agreeing on which one starts the job", _WAIT, True),
    "AssociationJobLimit": ("the account has reached its limit of jobs", _WAIT, True),
    "AssociationResourceLimit": ("the account has reached a resource limit", _WAIT, True),
    "AssociationTimeLimit": ("the account has reached a time limit", _WAIT, True),
    "QOSJobLimit": ("the QOS has reached its limit of jobs", _WAIT, True),
    "QOSResourceLimit": ("the QOS has reached a resource limit", _WAIT, True),
    "QOSTimeLimit": ("the QOS has reached a time limit", _WAIT, True),
    # reasons that a job may still show after its end
    "SystemFailure": ("Slurm, the network or a file system failed", _ADMIN, False),
    "JobLaunchFailure": (
        "the job could not be started, for example because of a file system or a missing program",
        "see its log",
        False,
    ),
    "NonZeroExitCode": ("the job exited with a non-zero code", "see hpcaccel status", False),
    "RaisedSignal": ("the job was killed by a signal", "see hpcaccel status", False),
    "TimeLimit": ("the job reached its time limit", "see hpcaccel status", False),
    "InactiveLimit": ("the job was inactive for too long (InactiveLimit)", _ADMIN, False),
    "OutOfMemory": ("the job ran out of memory", "request more memory (slurm.mem)", False),
}

_LIMIT = re.compile(
    r"(?P<whose>Assoc|QOS)?(?P<kind>Grp|Max|Min)(?P<what>WallDuration|Wall|SubmitJobs?|Jobs?|Cpu|CPU|Memory|Mem|Node|GRES|"
    r"Energy|License|BB|Billing|Unknown)(?P<minutes>RunMinutes|Minutes)?(?P<each>PerJob|PerNode|PerUser|PerAccount)?"
    r"(?:Limit|NotSatisfied)?"
)
_WHAT = {
    "Wall": "run time", "WallDuration": "run time", "Job": "running jobs", "Jobs": "running jobs",
    "SubmitJob": "jobs in the queue", "SubmitJobs": "jobs in the queue", "Cpu": "CPUs", "CPU": "CPUs", "Mem": "memory",
    "Memory": "memory", "Node": "nodes", "GRES": "GPUs or other generic resources", "Energy": "energy",
    "License": "licences", "BB": "burst buffer space", "Billing": "billing units", "Unknown": "an unnamed resource",
}  # fmt: skip
_MINUTES = {
    "Cpu": "CPU", "CPU": "CPU", "Mem": "memory", "Memory": "memory", "Node": "node", "GRES": "generic resource",
    "Energy": "energy", "License": "licence", "BB": "burst buffer", "Billing": "billing",
}  # fmt: skip
_EACH = {"PerJob": "per job", "PerNode": "per node", "PerUser": "per user", "PerAccount": "per account"}


def meaning(reason: str) -> Meaning:
    """The meaning of a reason; text after a comma (``ReqNodeNotAvail, UnavailableNodes:n1``) is ignored."""
    _, known = _known(reason)
    unknown = Meaning(words="Slurm gives no further details", advice=f"see {SOURCE}, or ask the site's administrators")
    return known or unknown


def explain_reason(reason: str) -> str:
    """The reason and its meaning in one line, with advice if needed; only the reason if its meaning is unknown."""
    name, known = _known(reason)
    if known is None or not reason or name == "None":
        return reason
    return f"{name}: {known.words}{'' if known.waits else f'; it will not start on its own ({known.advice})'}"


def _known(reason: str) -> tuple[str, Meaning | None]:
    """The name of a reason and its meaning, from the table or from the parts of the name."""
    bare = reason.replace("_", " ").strip().lstrip("(").removesuffix(")") or "None"
    for name in (bare, bare.partition(",")[0].strip(), re.split(r"[:(]", bare)[0].strip()):
        if name in _MEANINGS:
            words, advice, waits = _MEANINGS[name]
            return name, Meaning(words=words, advice=advice, waits=waits)
        if (match := _LIMIT.fullmatch(name)) is not None:
            return name, _of_limit(match)
    return bare, None


def _of_limit(match: re.Match[str]) -> Meaning:
    whose = "account" if match["whose"] == "Assoc" else "QOS"
    what = _WHAT[match["what"]]
    if match["minutes"]:
        running = " of running jobs" if match["minutes"] == "RunMinutes" else ""
        what = f"{_MINUTES.get(match['what'], 'resource')} minutes{running}"
    if match["kind"] == "Min":
        return Meaning(
            words=f"the job's request is below the {whose} minimum for {what}",
            advice="cancel it, request more in the spec and submit again",
            waits=False,
        )
    if match["kind"] == "Grp":
        used_up = match["minutes"] == "Minutes"
        return Meaning(
            words=f"the jobs of the {whose} together have reached its limit for {what}",
            advice="request a larger budget, or use another account or QOS" if used_up else "wait for jobs to end",
            waits=not used_up,
        )
    if match["each"] in ("PerJob", "PerNode") or match["what"] in ("WallDuration",):
        words = f"the job's request exceeds the {whose} limit for {what} {_EACH.get(match['each'] or 'PerJob', '')}"
        return Meaning(words=words, advice="cancel it, request less or use another QOS, and submit again", waits=False)
    each = _EACH.get(match["each"] or "", "per user")
    return Meaning(words=f"the {whose} limit for {what} {each} is reached", advice="wait for your jobs to end")
