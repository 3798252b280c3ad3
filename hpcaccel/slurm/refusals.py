"""Slurm's refusals, with a hint for those that have a usual cause."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence

from hpcaccel.errors import HpcaccelError

__all__ = ["explain", "submit_limit"]

_HINTS = {
    r"invalid account": "slurm.account: see your accounts with `sacctmgr show associations user=$USER`",
    r"invalid qos": "slurm.qos: see `sacctmgr show associations user=$USER format=account,qos%50`",
    r"time limit": "slurm.time: `sinfo -o '%P %l'` shows the limit of each partition",
    r"node configuration is not available|more processors requested": (
        "slurm: no node of the partition has that many GPUs, CPUs or that much memory; see `sinfo -N -o '%P %c %m %G'`"
    ),
    r"invalid feature": "slurm.constraint: see the features with `sinfo -o '%P %f'`",
    r"invalid generic resource": "slurm.gres or slurm.gpus_per_node: see `sinfo -o '%P %G'`",
    r"invalid node name": "slurm.nodelist or slurm.exclude: see the nodes with `sinfo -N`",
    r"reservation": "slurm.reservation: see `scontrol show reservation`",
    r"policy|submit ?limit": "a limit of your account or QOS is reached; jobs that end make room",
    r"parameter too long": "name, slurm.comment: Slurm takes at most 1024 bytes of each",
    r"invalid job array specification": "more tasks than MaxArraySize allows (`scontrol show config`)",
}


def explain(stderr: str, partition_names: Callable[[], Sequence[str]]) -> str:
    """A message for a job that sbatch refused: Slurm's own words, then how to mend it where that is known."""
    words = [re.sub(r"^sbatch: (?:error: )?", "", line).strip() for line in stderr.splitlines()]
    message = "Slurm refused the job: " + ("; ".join(word for word in words if word) or "it gave no reason")
    hint = _partition_hint(stderr, partition_names) or _usual_hint(stderr)
    return f"{message}\n{hint}" if hint else message


def submit_limit(refusal: str) -> str | None:
    """The limit on the number of jobs that a refusal names: fewer of them would be taken. None for any other refusal.

    Among them are QOSMaxSubmitJobPerUserLimit, QOSGrpSubmitJobsLimit, AssocMaxSubmitJobLimit (tried on 22.05).
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
    except HpcaccelError:  # the refusal matters, not that a hint could not be had
        return ""
    close = difflib.get_close_matches(match[1], names, n=1)
    guess = f". Did you mean {close[0]!r}?" if close else ""
    return f"slurm.partition {match[1]!r} is not on this cluster (has: {', '.join(names)}){guess}"
