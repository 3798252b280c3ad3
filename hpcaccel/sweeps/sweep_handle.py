"""``hpcaccel.sweep``, and the hold on a sweep that was started.

Looking at a sweep needs neither pydantic nor Optuna, which take longer to import than ten thousand trials to read: what
starts and steers is imported by the methods that do.
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
from hpcaccel.submission.find import find_run
from hpcaccel.submission.run_handle import ASK_SECONDS, SURE_SECONDS, SweepRun
from hpcaccel.submission.status import RunStatus
from hpcaccel.sweeps.journal_reader import TrialRecord
from hpcaccel.sweeps.results import Goal, rows
from hpcaccel.sweeps.sweep_overview import Study, SweepOverview, sweep_overview

if TYPE_CHECKING:
    from hpcaccel.spec import SweepSpec
    from hpcaccel.sweeps.arrays import WorkerArrays
    from hpcaccel.sweeps.best_spec import Winner
    from hpcaccel.sweeps.retry import Again
    from hpcaccel.sweeps.start_sweep import Source

__all__ = ["Sweep", "find_sweep", "sweep"]

LOOK_SECONDS = 2.0
"""How often a sweep that is followed is looked at; the scheduler is asked as for a run."""


def sweep(
    source: Source,
    *,
    cluster: str | None = None,
    runs_dir: str | os.PathLike[str] | None = None,
    overrides: Sequence[str] = (),
    name: str | None = None,
) -> Sweep:
    """Start a sweep: a spec file with a section ``sweep``, a ``SweepSpec``, or a mapping of the same keys.

    When anything fails, nothing is left behind: no directory, no job. Only where Slurm does not answer, and may have
    taken workers, the sweep is kept; the same call, made again, takes them up, or starts anew.

    Args:
        cluster: a profile, ``local`` or ``slurm``. Default: the default profile, else Slurm.
        runs_dir: where the sweep's directory is made. Default: ``HPCACCEL_RUNS_DIR``, the profile's, or ``./runs``.
        overrides: ``key.sub=value``, as on the command line.
        name: in place of the spec's name.

    Raises:
        SpecError: something in the spec is wrong.
        ClusterError: there is no Slurm here, or it took no worker at all.
        RunDirectoryError: the directory cannot be written.
        SlurmCommandError: Slurm did not answer.
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
    """A sweep that was started: its trials, and steering them.

    Raises:
        RunDirectoryError: ``path`` is no sweep's directory.
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
        return self.dir.path

    @property
    def run_id(self) -> str:
        return self.dir.run_id

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def record(self) -> RunRecord:
        return self._run.record

    @property
    def spec(self) -> SweepSpec:
        from hpcaccel.sweeps.definition import read_definition

        return read_definition(self.dir).spec

    @property
    def goal(self) -> Goal:
        """What decides: metrics, and whether small or large values are good."""
        return self._study.goal

    # -- looking --------------------------------------------------------------------------------------------------

    def status(self) -> SweepOverview:
        """Where it stands now: trials, the best one, workers, what has been spent."""
        return sweep_overview(self._study.read(), self.worker_status())

    def worker_status(self, *, patient: bool = False) -> RunStatus:
        """Of the workers alone, as ``tasks``; ``patient`` as for a run."""
        return self._run.status(patient=patient)

    @property
    def trials(self) -> list[TrialRecord]:
        """All trials so far, by number."""
        return self._study.read().trials

    def table(self) -> list[dict[str, Any]]:
        """A row for every trial: state, metrics, parameters, steps, seconds, GPU-seconds, worker, attempts."""
        is_over = self.worker_status().ended  # first: what ends after it was asked has ended in the study, too
        study = self._study.read()
        return rows(study.trials, study.goal, workers=study.workers(), is_over=is_over)

    def best(self, *, trial: int | None = None, metric: str | None = None) -> Winner:
        """The best trial, with its values and its spec.

        Args:
            trial: this one instead.
            metric: of several metrics, the one that decides.

        Raises:
            UserError: nothing has finished yet, or several metrics leave it open which one is best.
        """
        from hpcaccel.sweeps.best_spec import choose

        return choose(self.dir, trial=trial, metric=metric)

    def follow(self) -> Iterator[SweepOverview]:
        """Where it stands, again and again whenever that has changed, until nothing follows by itself."""
        pause = ASK_SECONDS[self.record.backend]
        workers, asked = self.worker_status(), time.monotonic()
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
            time.sleep(SURE_SECONDS if looked_lost else LOOK_SECONDS)
            if looked_lost or self._run._settled() or time.monotonic() - asked >= pause:
                workers, asked = self.worker_status(patient=True), time.monotonic()

    def wait(self, timeout_seconds: float | None = None) -> SweepOverview:
        """Wait until nothing follows by itself.

        Raises:
            TimeoutError: that took longer than ``timeout_seconds``; the sweep goes on.
        """
        self._run.wait(timeout_seconds)
        return self.status()

    # -- steering -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Let the running trials save and leave; :meth:`resume` goes on with them."""
        self._run.stop("pause")

    def cancel(self) -> None:
        """End the workers now."""
        self._run.cancel()

    def resume(self, *, changes: Sequence[str] = (), file: Source | None = None) -> WorkerArrays:
        """Go on with new workers; see :func:`hpcaccel.sweeps.control_commands.resume`."""
        from hpcaccel.sweeps import control_commands

        return control_commands.resume(self.dir, changes=changes, file=file, slurm=self._slurm)

    def retry_failed(self) -> tuple[list[Again], WorkerArrays | None]:
        """Queue the failed trials once more; new workers start where none is left."""
        from hpcaccel.sweeps import control_commands, retry

        control_commands.refuse_spent(self.dir, self.spec)
        return self._with_workers(retry.retry_failed(self.dir))

    def extend(self, top: int, *, settings: Sequence[str] = ()) -> tuple[list[Again], WorkerArrays | None]:
        """Let the best ``top`` trials go on, with ``settings`` such as ``args.epochs=20``; workers as above."""
        from hpcaccel.sweeps import control_commands, retry

        control_commands.refuse_spent(self.dir, self.spec)
        return self._with_workers(retry.extend(self.dir, top, settings=settings))

    def _with_workers(self, queued: list[Again]) -> tuple[list[Again], WorkerArrays | None]:
        from hpcaccel.sweeps import control_commands

        if not self.worker_status().ended:
            return queued, None
        spec = self.spec
        count = min(spec.sweep.workers, -(-len(queued) // spec.sweep.pack))
        return queued, control_commands.start_workers(self.dir, spec, count=count, slurm=self._slurm)

    def throttle(self, most: int) -> None:
        """Let at most ``most`` workers run at a time."""
        from hpcaccel.sweeps import control_commands

        control_commands.throttle(self.dir, most, slurm=self._slurm)


def find_sweep(token: str, *, slurm: Slurm | None = None) -> Sweep:
    """The sweep that ``token`` names: an id, a unique beginning of one, a name (its latest sweep), a job id, or a path.

    Raises:
        RunNotFound: there is none.
        UserError: it is a run.
    """
    found = find_run(token, slurm=slurm, only_sweeps=True)
    if not isinstance(found, SweepRun):
        raise UserError(f"{found.run_id} ({found.name}) is no sweep. Look at it with `hpcaccel status {found.run_id}`")
    return Sweep(found.path, slurm=slurm)
