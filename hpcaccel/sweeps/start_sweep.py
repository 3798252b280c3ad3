"""Starts a sweep: checks the spec, creates the directory and submits the workers; or shows what a start would do."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import atomic_write, write_json
from hpcaccel.core.formatting import size
from hpcaccel.core.records import to_dict
from hpcaccel.core.sweep_dir import SweepDir
from hpcaccel.errors import HpcaccelError, SpecError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import SweepSpec, load_profile, load_sweep, profile_names, sweep_from_values
from hpcaccel.spec.loading.expand import escape
from hpcaccel.spec.sweep.points import count, equal, notes, own_point, points
from hpcaccel.submission.entrypoint.script_lint import advice_on_job
from hpcaccel.submission.jobs.backend import SlurmBackend, largest_array
from hpcaccel.submission.jobs.job_submission import temporary
from hpcaccel.submission.submit.after_runs import backend_waiting
from hpcaccel.submission.submit.build import copy_programs, new_record, new_run, publish
from hpcaccel.submission.submit.comparison import command_of
from hpcaccel.submission.submit.idempotent import Always, Once, submit_once
from hpcaccel.submission.submit.prepare import PreparedSubmission, prepare
from hpcaccel.sweeps.definition import check_packages, resolved_yaml, sweep_document, sweep_hash
from hpcaccel.sweeps.worker_jobs import WorkerArrays, arrays_of, chunks, hand_in_workers, make_worker

__all__ = [
    "DryRun",
    "PreparedSweep",
    "Source",
    "advice_afterwards",
    "foresee",
    "load",
    "prepare_sweep",
    "start_sweep",
    "trials_at_most",
    "workers_needed",
]

START_SECONDS = 5.0
"""Assumed minimum time from a worker's start to the first step of a trial."""

Source = str | os.PathLike[str] | SweepSpec | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PreparedSweep:
    """A checked sweep; nothing has been written yet."""

    spec: SweepSpec
    prepared: PreparedSubmission
    """The submission of the job spec as written, without any trial's parameters; its directory and script are those of
    the sweep."""
    workers: int
    """Number of workers, at most as many as there are trials."""

    @property
    def advice(self) -> tuple[str, ...]:
        """Advice for the user before the start, one sentence per item."""
        return (*self.prepared.advice, *notes(self.spec))

    @property
    def dir(self) -> SweepDir:
        assert isinstance(self.prepared.run, SweepDir)
        return self.prepared.run


def prepare_sweep(
    source: Source,
    *,
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
    slurm: Slurm | None = None,
) -> PreparedSweep:
    """Check a sweep before anything is written. The arguments are those of :func:`hpcaccel.sweep`.

    Raises:
        SpecError, ClusterError, UserError: the spec is not valid, the cluster cannot run the sweep, or a package is
            missing.
    """
    changes = [*overrides, *([] if name is None else [f"name={name}"])]
    spec = load(source, cluster=cluster, overrides=changes)
    check_packages(spec.sweep.method)
    workers = workers_needed(spec)
    _refuse_tiny_budget(spec, workers)
    prepared = prepare(spec.job, cluster=cluster, runs_dir=runs_dir, workers=workers, slurm=slurm)
    return PreparedSweep(spec=spec, prepared=prepared, workers=workers)


def _refuse_tiny_budget(spec: SweepSpec, workers: int) -> None:
    """Raise SpecError if ``max_gpu_hours`` would be used up before a trial could start."""
    hours, job = spec.sweep.max_gpu_hours, spec.job
    each = job.slurm.min_nodes * (job.slurm.node_gpus or job.ranks_per_node)
    if hours is not None and hours * 3600 < START_SECONDS * workers * each:
        unit = ("GPU" if job.slurm.node_gpus else "rank") + ("s" if each > 1 else "")
        several = workers > 1
        many = f"{workers} workers with {each} {unit} each" if several else f"1 worker with {each} {unit}"
        raise SpecError(
            f"sweep.max_gpu_hours {hours:g} is too low: {many} would use it up in "
            f"{hours * 3600 / workers / each:.2g} s, before any trial could start. Raise it"
            f"{', or use fewer workers' if several else ''}"
        )


def load(source: Source, *, cluster: str | None = None, overrides: Sequence[str] = ()) -> SweepSpec:
    """Load a sweep from a file, a spec or a mapping, with the defaults of a cluster's profile.

    Raises:
        SpecError: the spec is not valid; the message has a line for each error.
    """
    named = cluster != "slurm" or "slurm" in profile_names()
    profile = load_profile(cluster) if named else None
    if isinstance(source, str | os.PathLike):
        return load_sweep(source, overrides=overrides, profile=profile)
    base = Path.cwd()
    if isinstance(source, SweepSpec):
        base = base if source.source is None else source.source.parent
        job, sweep = (one.model_dump(mode="json", exclude_unset=True) for one in (source.job, source.sweep))
        source = escape({**job, "sweep": sweep})
        assert isinstance(source, Mapping)
    return sweep_from_values(source, base=base, overrides=overrides, profile=profile)


def trials_at_most(spec: SweepSpec) -> int | None:
    """Largest possible number of trials; None if neither the space nor ``max_trials`` limits it."""
    points = count(spec.sweep.parameters)
    ends = [spec.sweep.max_trials, None if points is None else points * spec.sweep.repeat]
    return min((end for end in ends if end is not None), default=None)


def workers_needed(spec: SweepSpec) -> int:
    """``sweep.workers``, or fewer if the sweep has too few trials for them."""
    most = trials_at_most(spec)
    if most is None:
        return spec.sweep.workers
    return max(1, min(spec.sweep.workers, -(-most // spec.sweep.pack)))


def start_sweep(plan: PreparedSweep, *, once: Once | Always | None = None) -> tuple[SweepDir, WorkerArrays]:
    """Create the sweep's directory and submit its workers.

    On an error the directory and the jobs are removed, unless Slurm does not respond and may have accepted workers.

    Args:
        once: the idempotency key. If it is None, and an earlier process was killed while it started the same sweep but
            before it recorded the jobs, that sweep is returned.

    Returns:
        The sweep's directory, and the jobs of its workers.

    Raises:
        ClusterError: Slurm rejected the workers.
        RunDirectoryError: the directory cannot be written.
        SlurmCommandError: Slurm did not respond.
    """
    backend = plan.prepared.backend
    return submit_once(
        once,
        command=lambda: command_of([plan.prepared], more=sweep_hash(plan.spec)),
        slurm=backend.slurm if isinstance(backend, SlurmBackend) else None,
        submit=lambda own: _hand_in(plan, own),
        reopen=lambda earlier: (SweepDir(earlier), arrays_of(SweepDir(earlier), backend)),
    )


def _hand_in(plan: PreparedSweep, once: Once | Always) -> tuple[SweepDir, WorkerArrays]:
    indices = range(plan.workers)
    made = new_run(
        plan.dir, lambda: _build(plan), name=plan.prepared.name, once=once, indices=indices, group=plan.prepared.group
    )
    with made as submission:
        backend = submission.holding(backend_waiting(plan.prepared.backend, plan.spec.job, plan.prepared.after))
        arrays = WorkerArrays(backend, indices)
        hand_in_workers(plan.dir, arrays, submission=submission, text=plan.prepared.script)
    return plan.dir, arrays


def advice_afterwards(plan: PreparedSweep, arrays: WorkerArrays) -> tuple[str, ...]:
    """Advice about the submitted workers."""
    if not isinstance(plan.prepared.backend, SlurmBackend):
        return ()
    return advice_on_job(plan.spec.job, plan.prepared.backend.slurm, next(iter(arrays.jobs.values())))


def _build(plan: PreparedSweep) -> None:
    place = temporary(plan.dir)
    prepared = plan.prepared
    copy_programs(place, prepared)
    atomic_write(place.spec_yaml, resolved_yaml(plan.spec), sync=False)
    write_json(place.sweep, sweep_document(plan.spec, prepared.tasks[0].launch), sync=False)
    record = replace(new_record(prepared), kind="sweep", array_size=plan.workers, spec_hash=sweep_hash(plan.spec))
    write_json(place.record, to_dict(record))
    for index in range(plan.workers):
        make_worker(place.worker(index), record, run_id=plan.dir.worker(index).run_id)
    publish(plan.dir)


SHOWN_POINTS = 10


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The output of ``sweep start --dry-run``."""

    name: str
    cluster: str
    path: str
    method: str
    trials: int | None
    """Largest possible number of trials; None if neither the space nor ``max_trials`` limits it."""
    space: int | None
    """Number of points; None if infinite."""
    first_points: list[dict[str, Any]]
    """At most ten points that are known in advance: the spec's own values, enqueued points, then points of a grid."""
    workers: int
    arrays: list[int]
    """Size of each job array. There are several only if the workers exceed the cluster's limit for one array."""
    gpus_per_worker: int
    ranks_per_worker: int
    """Number of ranks; if no GPUs are requested, each rank counts as one GPU."""
    gpu_hours_per_stay: float | None
    """Cost of all workers from their start to their time limit; None if they have no time limit."""
    max_gpu_hours: float | None
    files: list[str]
    """Files and folders that would be created in ``path``."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def foresee(plan: PreparedSweep) -> DryRun:
    """What starting ``plan`` would do; nothing is written."""
    job, sweep = plan.spec.job, plan.spec.sweep
    nodes = job.slurm.min_nodes
    gpus, ranks = nodes * job.slurm.node_gpus, nodes * job.ranks_per_node
    seconds = job.slurm.time_seconds
    return DryRun(
        name=plan.prepared.name,
        cluster=plan.prepared.cluster,
        path=str(plan.dir.path),
        method=sweep.method,
        trials=trials_at_most(plan.spec),
        space=count(sweep.parameters),
        first_points=_first_points(plan.spec),
        workers=plan.workers,
        arrays=_arrays(plan),
        gpus_per_worker=gpus,
        ranks_per_worker=ranks,
        gpu_hours_per_stay=None if seconds is None else plan.workers * (gpus or ranks) * seconds / 3600,
        max_gpu_hours=sweep.max_gpu_hours,
        files=_files(plan),
    )


def _first_points(spec: SweepSpec) -> list[dict[str, Any]]:
    known: list[dict[str, Any]] = []
    rest = points(spec.sweep.parameters) if spec.sweep.method == "grid" else iter(())
    for point in itertools.chain([own_point(spec), *spec.sweep.enqueue], rest):
        if point and not any(equal(point, other) for other in known):
            known.append(point)
        if len(known) == SHOWN_POINTS:
            break
    return known


def _arrays(plan: PreparedSweep) -> list[int]:
    backend = plan.prepared.backend
    if not isinstance(backend, SlurmBackend):
        return [plan.workers]
    try:
        most = largest_array(backend.slurm.config())
    except HpcaccelError:
        return [plan.workers]  # the controller does not respond: assume one array
    return [len(piece) for piece in chunks(range(plan.workers), most)]


def _files(plan: PreparedSweep) -> list[str]:
    place, last = plan.dir, plan.workers - 1
    names = [place.spec_yaml, place.sweep, place.script, place.node_program, place.record, place.journal]
    code = plan.prepared.code
    copied = [] if code is None else [f"code/ ({len(code.files)} files, {size(code.total_bytes)})"]
    workers = "workers/0/" if last == 0 else f"workers/0/ … workers/{last}/"
    return [*(path.name for path in names), *copied, workers, "trials/0/ …"]
