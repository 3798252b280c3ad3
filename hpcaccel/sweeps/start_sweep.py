"""Starting a sweep: check everything, make its directory, hand its workers in, remember it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcaccel.core.records import RunRecord, to_dict
from hpcaccel.core.run_dir import SweepDir, WorkerDir, atomic_write, register, write_json
from hpcaccel.errors import SpecError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.spec import SweepSpec, load_profile, load_sweep, profile_names, sweep_from_values
from hpcaccel.spec.canonical import sweep_to_yaml
from hpcaccel.spec.expand import escape
from hpcaccel.spec.points import count
from hpcaccel.spec.sweep_notes import notes
from hpcaccel.submission.after_runs import backend_waiting
from hpcaccel.submission.backend import Backend, SlurmBackend
from hpcaccel.submission.build import making, new_record, publish, temporary
from hpcaccel.submission.code_copy import copy_code
from hpcaccel.submission.command_identity import command_of
from hpcaccel.submission.idempotent import Always, Once, once_asked_for, tell_of_earlier
from hpcaccel.submission.idempotent_resume import Turn
from hpcaccel.submission.loader_shield import FOLDER as LOADER_SHIELD
from hpcaccel.submission.loader_shield import write_loader_shield
from hpcaccel.submission.package import write_node_program
from hpcaccel.submission.prepare import Prepared, prepare
from hpcaccel.submission.rank_side import FOLDER, write_rank_side
from hpcaccel.submission.recording import ledger_sizes, record_workers
from hpcaccel.submission.run_state import read_record
from hpcaccel.submission.script_lint import advice_on_job
from hpcaccel.submission.submit_script import hand_in
from hpcaccel.sweeps.arrays import WorkerArrays
from hpcaccel.sweeps.definition import sweep_document, sweep_hash
from hpcaccel.sweeps.packages import check_packages

__all__ = [
    "PreparedSweep",
    "Source",
    "advice_afterwards",
    "arrays_of",
    "hand_in_workers",
    "load",
    "make_worker",
    "prepare_sweep",
    "resolved_yaml",
    "start_sweep",
    "trials_at_most",
    "workers_needed",
]

START_SECONDS = 5.0
"""A worker takes so long at least until its first trial computes."""

Source = str | os.PathLike[str] | SweepSpec | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PreparedSweep:
    """A sweep that is known to be sound; nothing has been written yet."""

    spec: SweepSpec
    prepared: Prepared
    """A run with the spec's own values, but for its directory and its script, which are the sweep's."""
    workers: int
    """No more than can have work."""

    @property
    def advice(self) -> tuple[str, ...]:
        """What the user should know before it runs, a sentence each."""
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
    """Check a sweep completely; the arguments are those of :func:`hpcaccel.sweep`.

    Raises:
        SpecError, ClusterError, UserError: with what is wrong, a missing package too.
    """
    changes = [*overrides, *([] if name is None else [f"name={name}"])]
    spec = load(source, cluster=cluster, overrides=changes)
    check_packages(spec.sweep.method)
    workers = workers_needed(spec)
    _refuse_tiny_budget(spec, workers)
    prepared = prepare(spec.job, cluster=cluster, runs_dir=runs_dir, workers=workers, slurm=slurm)
    return PreparedSweep(spec=spec, prepared=prepared, workers=workers)


def _refuse_tiny_budget(spec: SweepSpec, workers: int) -> None:
    """Raises SpecError where ``max_gpu_hours`` would be used up before a trial could begin."""
    hours, job = spec.sweep.max_gpu_hours, spec.job
    each = job.slurm.min_nodes * (job.slurm.node_gpus or job.ranks_per_node)
    if hours is not None and hours * 3600 < START_SECONDS * workers * each:
        what = f"each with {'GPUs' if job.slurm.node_gpus else 'ranks, without GPUs'}: {each}"
        many = f"{workers} worker{'s' if workers > 1 else ''} ({what})"
        raise SpecError(
            f"sweep.max_gpu_hours: {hours:g} would be used up in {hours * 3600 / workers / each:.2g} s by "
            f"{many}, before a trial had begun, and nothing would be searched: give it more, or fewer workers"
        )


def load(source: Source, *, cluster: str | None = None, overrides: Sequence[str] = ()) -> SweepSpec:
    """The sweep of a file, a spec or a mapping, over the defaults of a cluster's profile.

    Raises:
        SpecError: with a line for each thing that is wrong.
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
    """How many trials there can be; None where neither the space nor ``max_trials`` has an end."""
    points = count(spec.sweep.parameters)
    ends = [spec.sweep.max_trials, None if points is None else points * spec.sweep.repeat]
    return min((end for end in ends if end is not None), default=None)


def workers_needed(spec: SweepSpec) -> int:
    """``sweep.workers``, or fewer where there are not so many trials."""
    most = trials_at_most(spec)
    if most is None:
        return spec.sweep.workers
    return max(1, min(spec.sweep.workers, -(-most // spec.sweep.pack)))


def start_sweep(plan: PreparedSweep, *, once: Once | Always | None = None) -> tuple[SweepDir, WorkerArrays]:
    """Make the sweep's directory and hand its workers in; when anything fails, nothing is left behind, unless Slurm
    does not answer and may have taken workers.

    Args:
        once: the key that it is started under. None: where the same was started before by a process that was killed
            before its jobs were written down, that sweep is the one.

    Returns:
        Its directory, which workers there are, and why there are not more.

    Raises:
        ClusterError: Slurm refused all of them.
        RunDirectoryError: the directory cannot be written.
        SlurmCommandError: Slurm did not answer.
    """
    slurm = plan.prepared.backend.slurm if isinstance(plan.prepared.backend, SlurmBackend) else None
    if once is not None:
        return _hand_in(plan, once)
    command = command_of([plan.prepared], more=sweep_hash(plan.spec))
    with once_asked_for(command, slurm=slurm) as own:
        if (earlier := own.earlier()) is None:
            return _hand_in(plan, own)
    tell_of_earlier(earlier.name)
    return SweepDir(earlier), arrays_of(SweepDir(earlier), plan.prepared.backend)


def _hand_in(plan: PreparedSweep, once: Once | Always) -> tuple[SweepDir, WorkerArrays]:
    once.begin(plan.dir)
    indices = range(plan.workers)
    with Turn(plan.dir) as turn, making(turn, indices=indices) as is_made:
        _build(plan)
        is_made()
        register(plan.dir, name=plan.prepared.name, job_id="")  # it is found from any directory, whatever comes now
        backend = turn.holding(backend_waiting(plan.prepared.backend, plan.spec.job, plan.prepared.after))
        arrays = WorkerArrays(backend, indices)
        hand_in_workers(plan.dir, arrays, turn=turn, text=plan.prepared.script)
    return plan.dir, arrays


def hand_in_workers(sweep: SweepDir, arrays: WorkerArrays, *, turn: Turn, text: str | None = None) -> None:
    """Submit workers, whose folders are there, and write down which job is whose.

    Args:
        text: the script; None: the one that lies there.
    """
    offsets = ledger_sizes([sweep.worker(index) for index in arrays.indices])

    def record_jobs(_: str) -> None:
        record_workers(sweep, arrays.jobs, offsets=dict(zip(arrays.indices, offsets, strict=True)))
        turn.done()

    hand_in(sweep, backend=arrays, indices=None, after=record_jobs, text=text)


def arrays_of(sweep: SweepDir, backend: Backend) -> WorkerArrays:
    """The newest workers of a sweep, as they are written down."""
    jobs = {index: read_record(sweep.worker(index)).job_ids for index in sweep.worker_indices()}
    return WorkerArrays(backend, list(jobs), {index: job_ids[-1] for index, job_ids in jobs.items() if job_ids})


def advice_afterwards(plan: PreparedSweep, arrays: WorkerArrays) -> tuple[str, ...]:
    """What the user should know of the workers, now that the cluster has them."""
    if not isinstance(plan.prepared.backend, SlurmBackend):
        return ()
    return advice_on_job(plan.spec.job, plan.prepared.backend.slurm, next(iter(arrays.jobs.values())))


def _build(plan: PreparedSweep) -> None:
    place = temporary(plan.dir)
    prepared = plan.prepared
    if prepared.code is not None:
        copy_code(prepared.code, place.code)
    write_node_program(place.node_program)
    if plan.spec.job.container is not None:
        write_rank_side(place.path / FOLDER)
    if prepared.tasks[0].launch["stop"] == "signals":
        write_loader_shield(place.path / LOADER_SHIELD)
    place.submitit.mkdir(mode=0o750)
    atomic_write(place.spec_yaml, resolved_yaml(plan.spec), sync=False)
    write_json(place.sweep, sweep_document(plan.spec, prepared.tasks[0].launch), sync=False)
    record = replace(new_record(prepared), kind="sweep", array_size=plan.workers, spec_hash=sweep_hash(plan.spec))
    write_json(place.record, to_dict(record))
    for index in range(plan.workers):
        make_worker(place.worker(index), record, run_id=plan.dir.worker(index).run_id)
    publish(plan.dir)


def make_worker(worker: WorkerDir, record: RunRecord, *, run_id: str) -> None:
    """The folder of a worker that has not run yet; ``record`` is the sweep's."""
    worker.prepare()
    own = replace(record, kind="run", run_id=run_id, array_size=None, packages={}, job_ids=[])
    write_json(worker.record, to_dict(own), sync=False)
    program = worker.path / worker.node_program.name
    program.symlink_to(Path("..", "..", worker.node_program.name))


def resolved_yaml(spec: SweepSpec) -> str:
    """What ``sweep.yaml`` holds."""
    came_from = f" of {spec.source}" if spec.source is not None else ""
    return f"# The resolved sweep{came_from}, with all defaults.\n{sweep_to_yaml(spec)}"
