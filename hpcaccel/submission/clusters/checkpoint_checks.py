"""Checks of quota and preemption: whether checkpoints fit, and whether a preempted job can save one and is requeued.

Sizes and times come from the last run of the same name. ``JobRequeue=0`` is no obstacle to a requeue: it is a default
(slurm.conf(5)), which ``--requeue`` in the batch script overrides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcaccel import checkpoint_files as layout
from hpcaccel.core.durable_files import read_json, read_lines
from hpcaccel.core.formatting import size
from hpcaccel.core.rank_records import Timing, busy_seconds
from hpcaccel.core.records import from_dict
from hpcaccel.core.registered_runs import index_lines
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.slurm.site_parsing import EXPEDITED_REQUEUE_PARAMETER
from hpcaccel.spec import JobSpec
from hpcaccel.spec.cluster.cluster_facts import Partition, Quota, SiteFacts
from hpcaccel.submission.clusters.findings import Finding, error, warning
from hpcaccel.submission.clusters.limits import effective_qos

__all__ = ["History", "Preemption", "last_run_of", "preemption", "preemption_of", "read_history", "storage"]

MOST_RUNS = 10
"""How many runs of a name, newest first, are searched for a checkpoint; also how many tasks or trials of each run."""


@dataclass(frozen=True, kw_only=True)
class History:
    """Measurements of one run, in seconds and bytes; None if not measured."""

    run_id: str
    checkpoint_bytes: int | None = None
    """Size of the newest checkpoint."""
    checkpoint_files: int | None = None
    """Number of files and directories of the newest checkpoint."""
    save_seconds: float | None = None
    """Duration of the slowest save, including its commit, in the newest attempt that saved. If only the time for which
    saves blocked training is recorded, the longest such time."""
    step_seconds: float | None = None
    """Median duration of a step."""
    slowest_step_seconds: float | None = None


def last_run_of(name: str, runs_dir: Path) -> Iterator[RunDir]:
    """Yield the runs of this name in ``runs_dir`` and in the user's index, newest first."""
    indexed = [Path(line["path"]) for line in index_lines() if line.get("name") == name and "path" in line]
    here = [record.parent for record in (runs_dir / name).glob("[!.]*/record.json")]
    paths = {path.resolve(): path for path in [*indexed, *here]}
    for path in sorted(paths.values(), key=lambda path: path.name, reverse=True):
        if (run := RunDir(path)).record.exists():
            yield run


def read_history(name: str, runs_dir: Path) -> History | None:
    """Measurements of the newest run of this name with a saved checkpoint; None if the last ``MOST_RUNS`` have none."""
    for _, run in zip(range(MOST_RUNS), last_run_of(name, runs_dir), strict=False):
        parts = [run, *(RunDir(path) for path in _parts(run))]
        found = next((history for part in parts if (history := _of(part)) is not None), None)
        if found is not None:
            return found
    return None


def _parts(run: RunDir) -> Iterator[Path]:
    """Yield the directories of the first tasks of an array, or of the first trials of a sweep."""
    for folder in ("tasks", "trials"):
        yield from sorted((run.path / folder).glob("[0-9]*"))[:MOST_RUNS]


def _of(run: RunDir) -> History | None:
    newest = layout.newest(run.checkpoints)
    attempts = _attempts(run)
    saved, save_seconds = _saves(run, attempts)
    manifest = {} if newest is None else newest.manifest
    size = manifest.get("bytes", saved)
    if size is None:
        return None
    timing = _timing(run, attempts) or Timing()
    return History(
        run_id=run.run_id,
        checkpoint_bytes=int(size),
        checkpoint_files=None if newest is None else 1 + sum(1 for _ in newest.path.rglob("*")),
        save_seconds=save_seconds if save_seconds is not None else timing.slowest_save_seconds,
        step_seconds=timing.step_seconds,
        slowest_step_seconds=timing.slowest_step_seconds,
    )


def _attempts(run: RunDir) -> list[int]:
    try:
        return sorted((int(path.name) for path in run.attempts.iterdir() if path.name.isdecimal()), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _saves(run: RunDir, attempts: Sequence[int]) -> tuple[int | None, float | None]:
    """Returns the bytes of the last save and the seconds of the slowest save, in the newest attempt that saved."""
    for attempt in attempts:
        lines = [line for line, _ in read_lines(run.saves(attempt)) if "bytes" in line and "seconds" in line]
        if lines:
            return int(lines[-1]["bytes"]), max(map(busy_seconds, lines))
    return None, None


def _timing(run: RunDir, attempts: Sequence[int]) -> Timing | None:
    for attempt in attempts:
        try:
            value = read_json(run.timing(attempt))
        except (OSError, HpcaccelError):
            continue  # unreadable: use an older attempt
        if value is not None:
            return from_dict(Timing, value)
    return None


def storage(spec: JobSpec, facts: SiteFacts, *, runs_dir: Path | None, history: History | None) -> Iterator[Finding]:
    """Findings if ``checkpoint.keep`` checkpoints plus one being written exceed the free quota of bytes or files."""
    quota = None if runs_dir is None else _quota_of(runs_dir, facts)
    if quota is None or history is None:
        return
    yield from _against(spec, quota, history.checkpoint_bytes, quota.bytes_limit, quota.bytes_used, shown=size)
    yield from _against(
        spec,
        quota,
        history.checkpoint_files,
        quota.inodes_limit,
        quota.inodes_used,
        shown=lambda count: f"{count} files",
    )


def _quota_of(runs_dir: Path, facts: SiteFacts) -> Quota | None:
    """The quota of ``runs_dir``, or of its nearest parent directory that has one."""
    above = [one for one in facts.quota if runs_dir.is_relative_to(one.path)]
    return max(above, key=lambda one: len(Path(one.path).parts), default=None)


def _against(
    spec: JobSpec, quota: Quota, one: int | None, limit: int | None, used: int | None, *, shown: Callable[[int], str]
) -> Iterator[Finding]:
    if not one or limit is None:
        return
    keep = spec.checkpoint.keep
    left = max(0, limit - (used or 0))
    fit = left // one - 1  # one more is written before the oldest one is deleted
    available = f"{quota.path} has space for {shown(left)} (limit: {shown(limit)})"
    each = f"the last run's newest checkpoint uses {shown(one)}"
    if keep is None:
        if fit < 20:
            yield warning(
                "checkpoint.keep",
                f"null keeps all checkpoints, but there is space for only {max(0, fit + 1)} more: {each}, and "
                f"{available}. Set it to the number of checkpoints to keep",
            )
        return
    needed = one * (keep + 1)
    if needed <= left:
        return
    remedy = (
        f"set checkpoint.keep to {fit}" if fit >= 1 else "free space with `hpcaccel clean`, or use another runs_dir"
    )
    message = (
        f"{keep} needs {shown(needed)}, including the next checkpoint while it is written ({each}), but "
        f"{available}: {remedy}"
    )
    # usage changes from day to day, so only exceeding the whole quota is an error
    yield error("checkpoint.keep", message) if needed > limit else warning("checkpoint.keep", message)


SHORT_SECONDS = 900
"""A job with at most this time limit, such as a debugging job, loses little if it is not requeued."""


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """How jobs of one partition are preempted."""

    mode: str
    """The PreemptMode: CANCEL, REQUEUE or SUSPEND."""
    grace_seconds: int
    kill_wait_seconds: int | None


def preemption_of(spec: JobSpec, facts: SiteFacts, partition: Partition) -> Preemption | None:
    """How the spec's job is preempted in ``partition``; None if nothing preempts it, or if that is unknown.

    With preempt/partition_prio, jobs of a partition with a higher PriorityTier can preempt the job; with preempt/qos,
    jobs of a QOS whose Preempt list contains the job's QOS can. The mode and the grace time are those of the
    preempted job's partition or QOS; without a mode there, the cluster's PreemptMode applies (slurm.conf(5),
    sacctmgr(1)).
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
    """Whether jobs of ``other`` have a higher PriorityTier, and may use nodes of the same type."""
    share = not other.node_types or not partition.node_types or bool({*other.node_types} & {*partition.node_types})
    return share and other.priority_tier > partition.priority_tier


def preemption(
    spec: JobSpec, facts: SiteFacts, partitions: Sequence[Partition], *, history: History | None
) -> Iterator[Finding]:
    """Findings about preemption.

    Warnings if the job is not requeued or has too little time to save; an error if the cluster does not support the
    requested expedited requeue.
    """
    if spec.resilience.requeue == "expedite" and facts.config.expedited_requeue is False:
        yield error(
            "resilience.requeue",
            "'expedite' is not supported on this cluster (it requires Slurm 25.11 or newer, with "
            f"{EXPEDITED_REQUEUE_PARAMETER} in SlurmctldParameters): set resilience.requeue to true",
        )
    for partition in partitions:
        found = preemption_of(spec, facts, partition)
        if found is None or found.mode == "SUSPEND":
            continue
        yield from _requeued(spec, partition, found)
        yield from _in_time(spec, partition, found, history)


def _requeued(spec: JobSpec, partition: Partition, found: Preemption) -> Iterator[Finding]:
    """Warn if preemption ends the job for good. With ``requeue: false``, a job of at most ``SHORT_SECONDS`` is exempt.

    PreemptMode=REQUEUE cancels jobs that may not be requeued (slurm.conf(5)).
    """
    if not spec.resilience.requeue:
        if (spec.slurm.time_seconds or SHORT_SECONDS + 1) <= SHORT_SECONDS:
            return
        yield warning(
            "resilience.requeue",
            f"false: preemption in partition {partition.name!r} (PreemptMode={found.mode}) cancels the job "
            "without a requeue. Set resilience.requeue to true unless that is intended",
        )
    elif found.mode == "CANCEL" and spec.resilience.chain is None:
        lost = "a job that is still running after its grace time" if found.grace_seconds else "a cancelled job"
        yield warning(
            "resilience.chain",
            f"null: partition {partition.name!r} preempts by cancelling (PreemptMode=CANCEL), and {lost} is not "
            "requeued. Set resilience.chain to the maximum number of consecutive jobs, such as 10",
        )


def _in_time(spec: JobSpec, partition: Partition, found: Preemption, history: History | None) -> Iterator[Finding]:
    if history is None or history.save_seconds is None or found.kill_wait_seconds is None:
        return
    if spec.stop_mode == "signals":
        return  # whether the program saves is unknown
    needed = history.save_seconds + (history.slowest_step_seconds or history.step_seconds or 0.0)
    # After the grace time Slurm signals again, and waits for KillWait before it kills the job.
    if needed <= found.grace_seconds + found.kill_wait_seconds:
        return
    yield warning(
        _interval_key(spec),
        f"{_interval(spec, history)}: preemption in partition {partition.name!r} leaves too little time to finish a "
        f"step and save (GraceTime {found.grace_seconds} s, KillWait {found.kill_wait_seconds} s; the slowest save of "
        f"the last run took {history.save_seconds:.0f} s), so the steps since the last checkpoint would be lost. Save "
        "more often, for example with checkpoint.every_minutes",
    )


def _interval_key(spec: JobSpec) -> str:
    return "checkpoint.every_minutes" if spec.checkpoint.every_minutes is not None else "checkpoint.every_steps"


def _interval(spec: JobSpec, history: History) -> str:
    """The save interval for a message: ``500, about 12 minutes``."""
    checkpoint = spec.checkpoint
    if checkpoint.every_minutes is not None:
        return f"{checkpoint.every_minutes:g}"
    if checkpoint.every_steps is None:
        return "null"
    if not history.step_seconds:
        return str(checkpoint.every_steps)
    seconds = checkpoint.every_steps * history.step_seconds
    return f"{checkpoint.every_steps}, about {f'{seconds / 60:.0f} minutes' if seconds >= 90 else f'{seconds:.0f} s'}"
