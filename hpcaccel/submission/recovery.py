"""A submit or a resume that was cut off: finding the job that it handed in, and writing that down.

Between sbatch's answer and the run's record lies a moment in which a process can be killed (SIGKILL, a machine that
goes down). The note that it left (``idempotent_resume``) says which run it was; the job is found by its script, which
lies in the run's own directory, or by what it has written there itself: its lease, its ledger.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from hpcaccel.core.run_dir import RunDir, SweepDir, register
from hpcaccel.errors import HpcaccelError, SlurmCommandError
from hpcaccel.slurm.commands import Slurm
from hpcaccel.submission.backend import backend_named
from hpcaccel.submission.chain_jobs import cancel_waiting
from hpcaccel.submission.idempotent_resume import Interrupted, Turn, Underway, is_open
from hpcaccel.submission.recording import record_job, record_workers
from hpcaccel.submission.run_state import read_record
from hpcaccel.submission.submitit_pickles import leave_pickles

__all__ = ["owner", "perhaps_resumed", "recover", "recover_now", "take_up"]

ANSWER_SECONDS = 20.0
"""After that Slurm counts as silent for who only looks."""


def owner(run: RunDir) -> RunDir:
    """Whose script ``run`` is handed in by: of a task the array's folder, of a worker the sweep's."""
    if run.is_worker:
        return SweepDir(run.path.parent.parent)
    return RunDir(run.path.parent.parent) if run.is_task else run


def recover(run: RunDir, *, slurm: Slurm | None = None) -> None:
    """Wait until it is known what became of a hand-in that was cut off, and write down the job that it left, if any.

    Args:
        run: the run, the sweep or the parent folder of an array.

    Raises:
        ClusterError, SlurmCommandError: the queue does not answer, so that nobody can tell.
    """
    if is_open(run):
        with Turn(run, slurm=slurm) as turn:
            take_up(turn)


def recover_now(runs: Iterable[RunDir], *, slurm: Slurm | None = None) -> dict[Path, str]:
    """The same of several runs without waiting, for who only looks.

    A Slurm that does not answer is asked once.

    Returns:
        Of each run that nobody can tell about yet, by its path: why.
    """
    silent: SlurmCommandError | None = None
    found = {}
    for run in runs:
        if not is_open(run) or run.path in found:
            continue
        if silent is None:
            try:
                found[run.path] = _recover_now(run, slurm)
                continue
            except SlurmCommandError as error:
                silent = error
        found[run.path] = f"its submit was cut off, and whether there is a job of it cannot be told: {silent}"
    return {path: why for path, why in found.items() if why}


def _recover_now(run: RunDir, slurm: Slurm | None) -> str:
    """Why it cannot be told yet, or nothing where all is known; raises SlurmCommandError where Slurm is silent."""
    if os.stat(run.path).st_uid != os.geteuid():
        return "it is being handed in, or its submit was cut off: its user's `hpcaccel status` finds out"
    try:
        with Turn(run, slurm=slurm or Slurm(timeout_seconds=ANSWER_SECONDS), wait=False) as turn:
            take_up(turn)
    except Underway:
        return "it is being handed in"
    except SlurmCommandError:
        raise
    except HpcaccelError as error:
        return f"its submit was cut off, and whether there is a job of it cannot be told: {error}"
    except OSError as error:
        return f"its submit was cut off, and its job cannot be written down: {error}"
    return ""


def take_up(turn: Turn) -> bool:
    """Write down what a process that was killed could not; whether it had handed a job in.

    Raises:
        ClusterError, SlurmCommandError: the queue does not answer.
        Underway: the queue may show the job in a moment; only of a turn that does not wait.
    """
    earlier = turn.interrupted()
    if earlier is None:
        return False
    came_through = turn.is_written_down(earlier) or _write_down(turn, earlier)
    turn.done()
    return came_through


def perhaps_resumed(error: SlurmCommandError, run: RunDir) -> SlurmCommandError:
    """What is told of a resume that Slurm did not answer: its note stands, and so must all that it has changed."""
    words = (
        f"{error.stderr.strip() or 'no answer'}\nWhether Slurm has taken the job is not known: `hpcaccel status "
        f"{run.run_id}` finds out once Slurm answers, and another resume takes that job up, if there is one"
    )
    return SlurmCommandError(error.command, error.returncode, words)


def _write_down(turn: Turn, earlier: Interrupted) -> bool:
    run = turn.run
    record = read_record(run)
    if record.kind == "sweep":
        sweep = SweepDir(run.path)
        if not (workers := turn.workers_handed_in(earlier)):
            return False
        record_workers(sweep, workers, offsets=dict(zip(earlier.indices or [], earlier.offsets, strict=True)))
        first = workers[min(workers)].partition("_")[0]
    else:
        if not (jobs := turn.handed_in(earlier)):
            return False
        first = jobs[0]
        leave_pickles(run, first, earlier.indices)
        if jobs[1:]:
            cancel_waiting(turn.slurm, jobs[1:])  # a beginning of its chain, which is made anew
        backend = turn.holding(backend_named(record.backend, turn.slurm))
        record_job(run, first, indices=earlier.indices, offsets=earlier.offsets, backend=backend)
    register(run, name=record.name, job_id=first)
    return True
