"""Why Slurm keeps a job waiting, in plain words: every reason that squeue may give, and what to do about it.

Source of the names and what they mean: https://slurm.schedmd.com/job_reason_codes.html and the table in Slurm's
src/common/job_state_reason.c. Limits are put into words from the parts of their names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["SOURCE", "Meaning", "in_words", "meaning"]

SOURCE = "https://slurm.schedmd.com/job_reason_codes.html"


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """A reason in words. ``waits``: time alone may mend it; otherwise somebody has to do something."""

    words: str
    advice: str
    waits: bool = True


_WAIT = "wait: nothing has to be done"
_ADMIN = "ask the site's administrators"
_ALTER = "cancel it, mend the spec and submit again"

_MEANINGS: dict[str, tuple[str, str, bool]] = {
    "None": ("the scheduler has not looked at it yet", "wait a minute and ask again", True),
    "Priority": ("jobs of a higher priority are before it", "wait, or compare with `hpcaccel plan`", True),
    "Resources": ("it is next, and the nodes that it needs are busy", "wait; fewer nodes may start sooner", True),
    "BeginTime": ("its earliest start has not come; a requeued job waits a little", _WAIT, True),
    "Dependency": ("it waits for another job (slurm.dependency)", "see that job: hpcaccel explain, or squeue", True),
    "DependencyNeverSatisfied": (
        "the job that it waits for ended in a way that can never satisfy it (slurm.dependency)",
        "cancel it; mend the other job, or leave the dependency out",
        False,
    ),
    "JobHeldUser": ("it is held, by you or your account's coordinator", "release it: scontrol release JOB", False),
    "JobHeldAdmin": ("it is held by an administrator", _ADMIN, False),
    "JobHoldMaxRequeue": (
        "it was requeued so often that Slurm holds it (MaxBatchRequeue): its starts failed",
        "see its log (hpcaccel logs --rank batch), then: scontrol release JOB",
        False,
    ),
    "launch failed requeued held": (
        "its last start failed, mostly because of a node, and Slurm holds it",
        "release it: scontrol release JOB. If that comes again, leave the node out (slurm.exclude)",
        False,
    ),
    "job requeued in held state": (
        "it was put back into the queue and held",
        "release it: scontrol release JOB",
        False,
    ),
    "JobArrayTaskLimit": ("as many tasks of its array run as may run at a time (the % of --array)", _WAIT, True),
    "Licenses": ("the licences that it asks for are taken", "wait, or leave out slurm.licenses", True),
    "ReqNodeNotAvail": (
        "nodes that it needs are down, drained, or reserved, for maintenance for instance",
        "wait, name other nodes (slurm.nodelist), or a time limit that ends before the reservation begins",
        True,
    ),
    "Nodes required for job are DOWN": (
        "nodes that it needs are down, drained, or kept for jobs of a partition that comes first",
        "wait, or name other nodes (slurm.nodelist) or another partition",
        True,
    ),
    "NodeDown": ("a node that it must have is down", "wait, or take it out of slurm.nodelist", True),
    "FrontEndDown": ("no front end node is up to start it", _ADMIN, True),
    "Reservation": ("its reservation has not begun, or is full", "wait, or leave out slurm.reservation", True),
    "ReservationDeleted": ("its reservation does not exist any more", f"{_ALTER}, without slurm.reservation", False),
    "ReservationInvalid": ("its reservation cannot be used for it", f"{_ALTER}: slurm.reservation", False),
    "PartitionDown": ("its partition is down: jobs wait there", "wait, or take another slurm.partition", True),
    "PartitionInactive": ("its partition is inactive", "take another slurm.partition", True),
    "PartitionNodeLimit": (
        "it asks for more or fewer nodes than its partition allows, or nodes of it are down",
        f"{_ALTER}: slurm.nodes",
        False,
    ),
    "PartitionTimeLimit": ("its time limit is longer than its partition allows", f"{_ALTER}: slurm.time", False),
    "PartitionConfig": ("its partition does not allow what it asks for", f"{_ALTER}: slurm.partition", False),
    "BadConstraints": ("no node can ever fulfil what it asks for", f"{_ALTER}: hpcaccel validate says what", False),
    "Constraints": ("its constraints cannot be fulfilled now", "wait, or change slurm.constraint", True),
    "DeadLine": ("it cannot end before its deadline any more", f"{_ALTER}: slurm.deadline", False),
    "AccountNotAllowed": ("its account may not use this partition", f"{_ALTER}: slurm.account", False),
    "QOSNotAllowed": ("its QOS may not be used by this account or in this partition", f"{_ALTER}: slurm.qos", False),
    "InvalidAccount": ("its account does not exist (any more)", f"{_ALTER}: slurm.account", False),
    "InvalidQOS": ("its QOS does not exist (any more)", f"{_ALTER}: slurm.qos", False),
    "AccountingPolicy": ("a limit of the accounting holds it back", "wait, or ask which limit it is", True),
    "QOSUsageThreshold": (
        "the QOS needs more fair share than is left (UsageThreshold)",
        "wait until it recovers",
        True,
    ),
    "MaxMemPerLimit": ("it asks for more memory of a CPU or a node than is allowed", f"{_ALTER}: slurm.mem", False),
    "Cleaning": ("it is being requeued, and its last start is still being cleaned up", _WAIT, True),
    "Prolog": ("the site's prolog runs on its nodes", _WAIT, True),
    "SchedDefer": ("it asked to start at once, and the scheduler puts jobs off (defer)", "submit it again", True),
    "BurstBufferResources": ("the burst buffer has no room now", _WAIT, True),
    "BurstBufferStageIn": ("its data is being brought to the burst buffer", _WAIT, True),
    "BurstBufferOperation": ("an operation of the burst buffer has failed", _ADMIN, False),
    "PowerNotAvail": ("there is not enough electrical power left", _WAIT, True),
    "PowerReserved": ("the electrical power that it needs is reserved", _WAIT, True),
    "FedJobLock": ("the clusters of the federation agree on who starts it", _WAIT, True),
    "AssociationJobLimit": ("its account has as many jobs as it may have", _WAIT, True),
    "AssociationResourceLimit": ("its account has reached a limit of resources", _WAIT, True),
    "AssociationTimeLimit": ("its account has reached a limit of time", _WAIT, True),
    "QOSJobLimit": ("its QOS has as many jobs as it may have", _WAIT, True),
    "QOSResourceLimit": ("its QOS has reached a limit of resources", _WAIT, True),
    "QOSTimeLimit": ("its QOS has reached a limit of time", _WAIT, True),
    # what a job that has ended may still show
    "SystemFailure": ("something in Slurm, the network or a file system failed", _ADMIN, False),
    "JobLaunchFailure": ("it could not be started: a file system, a missing program", "see its log", False),
    "NonZeroExitCode": ("it ended with an error", "see hpcaccel status", False),
    "RaisedSignal": ("it was ended by a signal", "see hpcaccel status", False),
    "TimeLimit": ("its time was over", "see hpcaccel status", False),
    "InactiveLimit": ("it did nothing for too long (InactiveLimit)", _ADMIN, False),
    "OutOfMemory": ("it needed more memory than it had", "ask for more: slurm.mem", False),
}

_LIMIT = re.compile(
    r"(?P<whose>Assoc|QOS)?(?P<kind>Grp|Max|Min)(?P<what>WallDuration|Wall|SubmitJobs?|Jobs?|Cpu|CPU|Memory|Mem|Node|GRES|"
    r"Energy|License|BB|Billing|Unknown)(?P<minutes>RunMinutes|Minutes)?(?P<each>PerJob|PerNode|PerUser|PerAccount)?"
    r"(?:Limit|NotSatisfied)?"
)
_WHAT = {
    "Wall": "time", "WallDuration": "time", "Job": "jobs that run", "Jobs": "jobs that run",
    "SubmitJob": "jobs in the queue", "SubmitJobs": "jobs in the queue", "Cpu": "CPUs", "CPU": "CPUs", "Mem": "memory",
    "Memory": "memory", "Node": "nodes", "GRES": "GPUs or other generic resources", "Energy": "energy",
    "License": "licences", "BB": "burst buffer", "Billing": "billing", "Unknown": "some resource",
}  # fmt: skip
_EACH = {
    "PerJob": "for one job", "PerNode": "of one node for one job", "PerUser": "for one user",
    "PerAccount": "for one account",
}  # fmt: skip


def meaning(reason: str) -> Meaning:
    """What a reason says; what Slurm adds behind a comma (``ReqNodeNotAvail, UnavailableNodes:n1``) is passed over."""
    _, said = _known(reason)
    nothing = Meaning(words="Slurm says no more than that", advice=f"see {SOURCE}, or ask the site's administrators")
    return said or nothing


def in_words(reason: str) -> str:
    """The reason and its meaning in one line, with what to do where waiting alone mends nothing; the reason alone where
    it means nothing to us, or there is none."""
    name, said = _known(reason)
    if said is None or not reason or name == "None":
        return reason
    return f"{name}: {said.words}{'' if said.waits else f'; it will not start by itself ({said.advice})'}"


def _known(reason: str) -> tuple[str, Meaning | None]:
    """A reason as its table or its parts name it, and what it says."""
    bare = reason.replace("_", " ").strip().lstrip("(").removesuffix(")") or "None"
    for name in (bare, bare.partition(",")[0].strip(), re.split(r"[:(]", bare)[0].strip()):
        if name in _MEANINGS:
            words, advice, waits = _MEANINGS[name]
            return name, Meaning(words=words, advice=advice, waits=waits)
        if (match := _LIMIT.fullmatch(name)) is not None:
            return name, _of_limit(match)
    return bare, None


def _of_limit(match: re.Match[str]) -> Meaning:
    whose = "the account" if match["whose"] == "Assoc" else "the QOS"
    what = _WHAT[match["what"]]
    if match["minutes"]:
        running = " of running jobs" if match["minutes"] == "RunMinutes" else ""
        what = f"minutes of {what}{running}"
    if match["kind"] == "Min":
        return Meaning(
            words=f"it asks for less {what} than {whose} demands of a job",
            advice=_ALTER + ": ask for more",
            waits=False,
        )
    if match["kind"] == "Grp":
        used_up = match["minutes"] == "Minutes"
        return Meaning(
            words=f"{whose} has reached its limit of {what}, all its jobs together",
            advice="ask for more of the budget, or take another account or QOS" if used_up else "wait for jobs to end",
            waits=not used_up,
        )
    if match["each"] in ("PerJob", "PerNode") or match["what"] in ("WallDuration",):
        words = f"it asks for more {what} than {whose} allows {_EACH.get(match['each'] or 'PerJob', '')}"
        return Meaning(words=words, advice=f"{_ALTER}: ask for less, or take another QOS", waits=False)
    each = _EACH.get(match["each"] or "", "for one user")
    return Meaning(words=f"the limit of {whose} on {what} {each} is reached", advice="wait for your jobs to end")
