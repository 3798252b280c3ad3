"""Classification of Slurm's error messages, and hints for rejected jobs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from hpcaccel.core.formatting import did_you_mean
from hpcaccel.errors import HpcaccelError

__all__ = [
    "explain",
    "has_no_accounting",
    "is_over",
    "is_transient",
    "is_unknown_job",
    "is_unreachable",
    "submit_limit",
]

_HINTS = {
    r"invalid account": "slurm.account: list your accounts with `sacctmgr show associations user=$USER`",
    r"invalid qos": "slurm.qos: list your QOS with `sacctmgr show associations user=$USER format=account,qos%50`",
    r"time limit": "slurm.time: `sinfo -o '%P %l'` shows the limit of each partition",
    r"node configuration is not available|more processors requested": (
        "slurm: no node of the partition has that many GPUs or CPUs or that much memory: `sinfo -N -o '%P %c %m %G'` "
        "lists the nodes"
    ),
    r"invalid feature": "slurm.constraint: list the features with `sinfo -o '%P %f'`",
    r"invalid generic resource": "slurm.gres or slurm.gpus_per_node: list the GRES with `sinfo -o '%P %G'`",
    r"invalid node name": "slurm.nodelist or slurm.exclude: list the nodes with `sinfo -N`",
    r"reservation": "slurm.reservation: list the reservations with `scontrol show reservation`",
    r"policy|submit ?limit": "your account or QOS has reached a limit: submit again when some of its jobs have ended",
    r"parameter too long": "name, slurm.comment: Slurm accepts at most 1024 bytes for each",
    r"invalid job array specification": "more tasks than MaxArraySize allows (`scontrol show config`)",
}
"""Hints by pattern in Slurm's error message; the first match is used."""


def explain(stderr: str, partition_names: Callable[[], Sequence[str]]) -> str:
    """Message for a job that sbatch rejected: Slurm's own error, then a hint if the cause is a common one.

    Args:
        partition_names: returns the cluster's partitions; called only for an invalid partition.
    """
    lines = [re.sub(r"^sbatch: (?:error: )?", "", line).strip() for line in stderr.splitlines()]
    message = "Slurm refused the job: " + ("; ".join(line for line in lines if line) or "no reason given")
    hint = _partition_hint(stderr, partition_names) or _usual_hint(stderr)
    return f"{message}\n{hint}" if hint else message


def submit_limit(refusal: str) -> str | None:
    """Name of the limit on submitted jobs that a rejection cites: fewer jobs would be accepted. None for other errors.

    Examples: QOSMaxSubmitJobPerUserLimit, QOSGrpSubmitJobsLimit, AssocMaxSubmitJobLimit (tested on 22.05).
    """
    found = re.search(r"\b(?:QOS|Assoc)\w*Submit\w*Limit\b", refusal)
    return None if found is None else found[0]


def _usual_hint(stderr: str) -> str:
    return next((hint for pattern, hint in _HINTS.items() if re.search(pattern, stderr, re.IGNORECASE)), "")


def _partition_hint(stderr: str, partition_names: Callable[[], Sequence[str]]) -> str:
    match = re.search(r"invalid partition specified: (\S+)", stderr)
    if match is None:
        return ""
    try:
        names = list(partition_names())
    except HpcaccelError:  # no hint: the rejection itself must still be reported
        return ""
    guess = did_you_mean(match[1], names, cutoff=0.6)
    return f"slurm.partition {match[1]!r} is not on this cluster (has: {', '.join(names)}){guess}"


def is_unknown_job(stderr: str) -> bool:
    """Whether the job is unknown to Slurm, according to Slurm's error."""
    return "Invalid job id" in stderr or "Invalid job array specification" in stderr


def is_over(stderr: str) -> bool:
    """Whether the job has ended or is unknown, according to Slurm's error."""
    return is_unknown_job(stderr) or "already completing or completed" in stderr


def is_transient(stderr: str) -> bool:
    """Whether the controller failed, rather than the request, so that a retry may succeed."""
    return bool(
        re.search(
            r"unable to contact slurm controller|connect failure|socket timed out|connection (refused|reset|timed out)"
            r"|zero bytes were transmitted|transport endpoint|slurm_?dbd|authentication|munge"
            r"|temporarily unable|backup controller|resource temporarily unavailable|standby mode",
            stderr,
            re.IGNORECASE,
        )
    )


def is_unreachable(stderr: str) -> bool:
    """Whether no connection to the controller was established, so that it cannot have received the request.

    After a "send failure", "receive failure" or "shutdown failure" the controller may have executed the request.
    """
    return "unable to contact slurm controller (connect failure)" in stderr.lower()


def has_no_accounting(stderr: str) -> bool:
    """Whether the cluster runs without accounting, according to an error from sacct or sacctmgr."""
    return "accounting storage is disabled" in stderr or "not running a supported accounting_storage" in stderr
