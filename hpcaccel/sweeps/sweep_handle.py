"""``hpcaccel.sweep``, and ``Sweep``, the handle to a started sweep.

Reading a sweep does not need Optuna, whose import takes longer than reading ten thousand trials. Only methods that
queue ended trials again import it: ``retry_failed``, ``extend``, and ``resume`` if the budget has stopped trials.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcaccel.core.records import RunRecord
from hpcaccel.errors import UserError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.runs.base_handle import CONFIRM_SECONDS, QUERY_SECONDS
from hpcaccel.submission.runs.find import find_run
from hpcaccel.submission.runs.run_handle import SweepRun
from hpcaccel.submission.runs.status import RunStatus
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import Goal, rows
from hpcaccel.sweeps.sweep_overview import Study, SweepOverview, sweep_overview

if TYPE_CHECKING:
    from hpcaccel.spec import SweepSpec
    from hpcaccel.sweeps.best_spec import BestTrial
    from hpcaccel.sweeps.retry import ContinuedTrial
    from hpcaccel.sweeps.start_sweep import Source
    from hpcaccel.sweeps.worker_jobs import WorkerArrays

__all__ = ["Sweep", "find_sweep", "sweep"]

LOOK_SECONDS = 2.0
"""Interval at which ``follow`` reads a sweep's files. The scheduler is queried only as often as for a run."""


def sweep(
    source: Source,
    *,
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
) -> Sweep:
    """Start a sweep. ``source`` is a spec file with a ``sweep`` section, a ``SweepSpec``, or such a mapping.

    On an error the directory and the jobs are removed. If Slurm does not respond and may have accepted workers, the
    sweep is kept instead: a repeated call finds these workers or submits new ones.

    Args:
        cluster: name of a profile, ``local`` or ``slurm``. Default: the default profile, else Slurm.
        runs_dir: folder in which the sweep's directory is created. Default: ``HPCACCEL_RUNS_DIR``, the folder set in
            the profile, or ``./runs``.
        overrides: ``key.sub=value``, as on the command line.
        name: replaces the spec's name.

    Raises:
        SpecError: the spec is not valid, or a secret is not set in this environment.
        UserError: a package that the search method needs is not installed.
        ClusterError: there is no Slurm on this machine, or it rejected the workers.
        RunDirectoryError: the directory cannot be written.
        SlurmCommandError: Slurm did not respond.

    Example::

        overview = hpcaccel.sweep("sweep.yaml", cluster="local").wait()
    """
    from hpcaccel.sweeps import start_sweep

    plan = start_sweep.prepare_sweep(source, cluster=cluster, runs_dir=runs_dir, overrides=overrides, name=name)
    for sentence in plan.advice:
        warnings.warn(sentence, stacklevel=2)
    directory, arrays = start_sweep.start_sweep(plan)
    for sentence in start_sweep.advice_afterwards(plan, arrays):
        warnings.warn(sentence, stacklevel=2)
    return Sweep(directory.path)


class Sweep:
    """Handle to the started sweep in the directory ``path``: status, trials, results, stop, resume.

    Raises:
        RunDirectoryError: ``path`` is not a sweep directory.
    """

    def __init__(self, path: str | os.PathLike[str], *, slurm: Slurm | None = None) -> None:
        self._run = SweepRun(path, slurm=slurm)
        self._slurm = slurm
        self.dir = self._run.dir
        self._study = Study(self.dir)

    def __repr__(self) -> str:
        return f"Sweep({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """The directory of the sweep."""
        return self.dir.path

    @property
    def run_id(self) -> str:
        """The id, such as ``20261120-153012-4f2a``."""
        return self.dir.run_id

    @property
    def name(self) -> str:
        """The name in the spec."""
        return self.record.name

    @property
    def record(self) -> RunRecord:
        """The record of the workers' submission: job ids, versions, git commit. Read from disk each time."""
        return self._run.record

    @property
    def spec(self) -> SweepSpec:
        """The sweep as it was started: the section ``sweep`` and the job."""
        from hpcaccel.sweeps.definition import read_definition

        return read_definition(self.dir).spec

    @property
    def goal(self) -> Goal:
        """The sweep's metrics and, for each metric, whether smaller or larger values are better."""
        return self._study.goal

    # -- status and results ---------------------------------------------------------------------------------------

    def status(self) -> SweepOverview:
        """Current state: trials, the best trial, workers, usage."""
        return sweep_overview(self._study.read(), self.worker_status())

    def worker_status(self, *, patient: bool = False) -> RunStatus:
        """Status of the workers, with an entry for each in ``tasks``. For ``patient`` see ``Run.status``."""
        return self._run.status(patient=patient)

    @property
    def trials(self) -> list[TrialRecord]:
        """All trials so far, ordered by number."""
        return self._study.read().trials

    def table(self) -> list[dict[str, Any]]:
        """A row for each trial: state, metrics, parameters, step, seconds, GPU-seconds, worker, attempts. The keys are
        those of :func:`hpcaccel.sweeps.results.rows`."""
        is_over = self.worker_status().ended  # read first: a trial that ends in between is not interrupted
        study = self._study.read()
        return rows(study.trials, study.goal, workers=study.workers(), is_over=is_over)

    def best(self, *, trial: int | None = None, metric: str | None = None) -> BestTrial:
        """The best trial, with its values and its spec.

        Args:
            trial: number of a trial to select instead of the best one.
            metric: the metric to rank by, if the sweep has several.

        Raises:
            UserError, RunDirectoryError: see :func:`hpcaccel.sweeps.best_spec.choose`.
        """
        from hpcaccel.sweeps.best_spec import choose

        return choose(self.dir, trial=trial, metric=metric)

    def export(self, out: str | os.PathLike[str], *, force: bool = False) -> tuple[Path, int]:
        """Copy the study to an SQLite database, for ``optuna.load_study(storage="sqlite:///…")`` and optuna-dashboard.

        Args:
            out: the file to write.
            force: whether to replace an existing file.

        Returns:
            The absolute path of the file, and the number of trials in it.

        Raises:
            UserError, RunDirectoryError: see :func:`hpcaccel.sweeps.study_export.export_study`.
        """
        from hpcaccel.sweeps.study_export import export_study

        return export_study(self.dir, Path(out), name=self.name, force=force)

    def follow(self) -> Iterator[SweepOverview]:
        """Yield the state whenever it has changed, until the sweep has ended or is paused."""
        pause = QUERY_SECONDS[self.record.backend]
        workers, queried = self.worker_status(), time.monotonic()
        shown: Any = None
        looked_lost = False
        while True:
            now = sweep_overview(self._study.read(), workers)
            if (what := (now.state, now.trials, now.workers)) != shown:
                yield now
                shown = what
            if now.ended and (now.state != "lost" or looked_lost):
                return
            looked_lost = now.ended
            time.sleep(CONFIRM_SECONDS if looked_lost else LOOK_SECONDS)
            if looked_lost or self._run._settled() or time.monotonic() - queried >= pause:
                workers, queried = self.worker_status(patient=True), time.monotonic()

    def wait(self, timeout_seconds: float | None = None) -> SweepOverview:
        """Wait until the sweep has ended or is paused.

        Raises:
            TimeoutError: the sweep is still running after ``timeout_seconds``; it continues.
        """
        self._run.wait(timeout_seconds)
        return self.status()

    # -- control --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let the running trials save and stop; :meth:`resume` continues them.

        Raises:
            UserError: the sweep has ended.
            RunDirectoryError: the request cannot be written.
            SlurmCommandError: Slurm did not respond. The request is saved, and running workers still read it.
        """
        self._run.stop("pause")

    def cancel(self) -> None:
        """End the workers now; :meth:`resume` continues the trials from their checkpoints.

        Raises:
            UserError: the sweep has ended.
            RunDirectoryError: the request cannot be written.
            SlurmCommandError: Slurm did not respond. The request is saved, and running workers still read it.
        """
        self._run.cancel()

    def resume(self, *, changes: Sequence[str] = (), file: Source | None = None) -> WorkerArrays:
        """Continue the sweep with new workers, after ``changes`` such as ``sweep.max_trials=200``, or with a changed
        ``file``. Errors are those of :func:`hpcaccel.sweeps.control_commands.resume`."""
        from hpcaccel.sweeps import control_commands

        return control_commands.resume(self.dir, changes=changes, file=file, slurm=self._slurm)

    def retry_failed(self) -> tuple[list[ContinuedTrial], WorkerArrays | None]:
        """Queue the failed trials again; new workers start if none is active.

        Returns:
            The queued trials, and the jobs of the new workers (None if none were started).

        Raises:
            UserError: no trial has failed, all failed trials have already been queued again, or the budget is used up.
            RunDirectoryError, RunBusy, ClusterError, SlurmCommandError: as for :meth:`resume`.
        """
        from hpcaccel.sweeps import control_commands, retry

        control_commands.refuse_spent(self.dir, self.spec)
        return self._with_workers(retry.retry_failed(self.dir))

    def extend(self, top: int, *, settings: Sequence[str] = ()) -> tuple[list[ContinuedTrial], WorkerArrays | None]:
        """Queue continuations of the trials of the ``top`` best points, with ``settings`` such as ``args.epochs=20``;
        new workers start if none is active. Without settings, only pruned trials can continue.

        Returns:
            The queued trials, and the jobs of the new workers (None if none were started).

        Raises:
            UserError: there are no trials to continue, ``top`` is less than 1, or the budget is used up.
            SpecError: a setting is not valid, or is a parameter of the sweep.
            RunDirectoryError, RunBusy, ClusterError, SlurmCommandError: as for :meth:`resume`.
        """
        from hpcaccel.sweeps import control_commands, retry

        control_commands.refuse_spent(self.dir, self.spec)
        return self._with_workers(retry.extend(self.dir, top, settings=settings))

    def _with_workers(self, queued: list[ContinuedTrial]) -> tuple[list[ContinuedTrial], WorkerArrays | None]:
        from hpcaccel.sweeps import control_commands

        if not self.worker_status().ended:
            return queued, None
        spec = self.spec
        count = min(spec.sweep.workers, -(-len(queued) // spec.sweep.pack))
        return queued, control_commands.start_workers(self.dir, spec, count=count, slurm=self._slurm)

    def throttle(self, most: int) -> None:
        """Let at most ``most`` workers run at a time. Arguments and errors are those of
        :func:`hpcaccel.sweeps.control_commands.throttle`."""
        from hpcaccel.sweeps import control_commands

        control_commands.throttle(self.dir, most, slurm=self._slurm)


def find_sweep(token: str, *, slurm: Slurm | None = None) -> Sweep:
    """The sweep that ``token`` refers to: an id or a unique id prefix, a name (its latest sweep), a job id or a path.

    Raises:
        RunNotFound: no run or sweep matches, or several do.
        UserError: ``token`` refers to a run, not a sweep.
    """
    found = find_run(token, slurm=slurm, only_sweeps=True)
    if not isinstance(found, SweepRun):
        raise UserError(
            f"{found.run_id} ({found.name}) is a run, not a sweep. Show it with `hpcaccel status {found.run_id}`"
        )
    return Sweep(found.path, slurm=slurm)
