"""What a preemption in the spec's partitions means for its checkpoints, and what brings the job back.

``JobRequeue=0`` forbids nothing here: it is the default of jobs that do not say (slurm.conf(5)), and our script says
``--requeue``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcaccel.slurm.expedited_requeue import ENABLED_BY
from hpcaccel.spec import JobSpec
from hpcaccel.spec.site import Partition, SiteFacts
from hpcaccel.submission.site.accounts import effective_qos
from hpcaccel.submission.site.findings import Finding, error, warning
from hpcaccel.submission.site.last_run import History

__all__ = ["Preemption", "preemption", "preemption_of"]

SHORT_SECONDS = 900
"""A job that can last no longer, for debugging for instance, loses little when nothing brings it back."""


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """How jobs of one partition are preempted."""

    mode: str
    """CANCEL, REQUEUE, SUSPEND …; OFF where they are not."""
    grace_seconds: int
    kill_wait_seconds: int | None


def preemption_of(spec: JobSpec, facts: SiteFacts, partition: Partition) -> Preemption | None:
    """How the spec's job is preempted in ``partition``; None where it is not, or where that is not known.

    preempt/partition_prio preempts for partitions of a higher PriorityTier, preempt/qos for QOS that name this one;
    the mode and the grace time belong to the partition or the QOS of the job that goes (slurm.conf(5), sacctmgr(1)).
    """
    kind = (facts.config.preempt_type or "").lower()
    if kind.endswith("partition_prio"):
        if not any(_is_above(one, partition) for one in facts.partitions):
            return None
        mode, grace = partition.preempt_mode or facts.config.preempt_mode, partition.grace_seconds
    elif kind.endswith("qos"):
        qos = effective_qos(spec, facts)
        if qos is None or not any(qos.name in one.preempts for one in facts.qos):
            return None
        own = None if (qos.preempt_mode or "cluster").lower() == "cluster" else qos.preempt_mode
        mode, grace = own or facts.config.preempt_mode, qos.grace_seconds
    else:
        return None
    words = [word for word in (mode or "").upper().split(",") if word not in ("", "GANG", "WITHIN")]
    if not words or words[0] == "OFF":
        return None
    return Preemption(mode=words[0], grace_seconds=grace, kill_wait_seconds=facts.config.kill_wait_seconds)


def _is_above(other: Partition, partition: Partition) -> bool:
    """Whether its jobs may want the same nodes, and come first."""
    share = not other.node_types or not partition.node_types or bool({*other.node_types} & {*partition.node_types})
    return share and other.priority_tier > partition.priority_tier


def preemption(
    spec: JobSpec, facts: SiteFacts, partitions: Sequence[Partition], *, history: History | None
) -> Iterator[Finding]:
    """Warnings: nothing brings the job back, or the last save took longer than there is time for. An error: it is to
    come back in a way that the cluster does not know."""
    if spec.resilience.requeue == "expedite" and facts.config.expedited_requeue is False:
        yield error(
            "resilience.requeue",
            "expedite: this cluster takes no --requeue=expedite (Slurm has it from 25.11 on, where SlurmctldParameters "
            f"has {ENABLED_BY}): set it to true",
        )
    for partition in partitions:
        found = preemption_of(spec, facts, partition)
        if found is None or found.mode == "SUSPEND":
            continue
        yield from _comes_back(spec, partition, found)
        yield from _in_time(spec, partition, found, history)


def _comes_back(spec: JobSpec, partition: Partition, found: Preemption) -> Iterator[Finding]:
    """A job that may not be requeued is cancelled by a preemption, whatever the mode (slurm.conf(5), PreemptMode)."""
    if not spec.resilience.requeue:
        if (spec.slurm.time_seconds or SHORT_SECONDS + 1) <= SHORT_SECONDS:
            return
        yield warning(
            "resilience.requeue",
            f"false: a preemption in partition {partition.name!r} (PreemptMode={found.mode}) cancels such a job, and "
            "nothing brings it back: leave this out, unless that is meant",
        )
    elif found.mode == "CANCEL" and spec.resilience.chain is None:
        with_grace = " once its grace time is over" if found.grace_seconds else ""
        yield warning(
            "resilience.chain",
            f"null: partition {partition.name!r} preempts by cancelling (PreemptMode=CANCEL), and nothing brings a job "
            f"back from that{with_grace}: set resilience.chain to how many jobs may follow each other, such as 10",
        )


def _in_time(spec: JobSpec, partition: Partition, found: Preemption, history: History | None) -> Iterator[Finding]:
    if history is None or history.save_seconds is None or found.kill_wait_seconds is None:
        return
    if spec.stop_mode == "signals":
        return  # the program saves by itself, or not
    needed = history.save_seconds + (history.slowest_step_seconds or history.step_seconds or 0.0)
    # Slurm signals again when the grace time is over, and waits for KillWait before it kills.
    if needed <= found.grace_seconds + found.kill_wait_seconds:
        return
    yield warning(
        _interval_key(spec),
        f"{_interval(spec, history)}: a preemption in partition {partition.name!r} leaves little time (grace "
        f"{found.grace_seconds} s, KillWait {found.kill_wait_seconds} s; your last save took "
        f"{history.save_seconds:.0f} s): steps since the last save will be lost. Save more often, by "
        "checkpoint.every_minutes for instance",
    )


def _interval_key(spec: JobSpec) -> str:
    return "checkpoint.every_minutes" if spec.checkpoint.every_minutes is not None else "checkpoint.every_steps"


def _interval(spec: JobSpec, history: History) -> str:
    """``500, about 12 minutes``."""
    checkpoint = spec.checkpoint
    if checkpoint.every_minutes is not None:
        return f"{checkpoint.every_minutes:g}"
    if checkpoint.every_steps is None:
        return "null"
    if not history.step_seconds:
        return str(checkpoint.every_steps)
    seconds = checkpoint.every_steps * history.step_seconds
    return f"{checkpoint.every_steps}, about {f'{seconds / 60:.0f} minutes' if seconds >= 90 else f'{seconds:.0f} s'}"
