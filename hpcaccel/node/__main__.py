"""The program ``node.pyz``. Its subcommands run the batch step and its child processes, the ranks' shims, and steps on
the nodes before and after the ranks."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hpcaccel.core.log import configure
from hpcaccel.core.run_dir import RunDir
from hpcaccel.core.sweep_dir import SweepDir, WorkerDir
from hpcaccel.errors import HpcaccelError

__all__ = ["main"]

EXPEDITE = "HPCACCEL_EXPEDITE"
"""Environment variable that the batch script sets if the job was submitted with ``--requeue=expedite``."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = list(sys.argv[1:] if argv is None else argv)
    expedited = EXPEDITE in os.environ and arguments[:1] in (["batch"], ["setup-failed"])
    try:
        code = _code(arguments)
    except Exception:
        if not expedited:
            raise
        traceback.print_exc()
        code = HpcaccelError.exit_code
    if expedited and code:
        # With a code other than 0 Slurm would requeue the job and hold it. The ledger records how the run ended.
        print(f"hpcaccel: exit code {code}, reported to Slurm as 0 (resilience.requeue: expedite)", flush=True)
        code = 0
    sys.exit(code)


def _code(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except HpcaccelError as error:
        print(f"hpcaccel: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        from hpcaccel.node.failures.disk_space import UNWRITABLE_ERRNOS

        if error.errno not in UNWRITABLE_ERRNOS:
            raise
        how = "`hpcaccel resume` or `hpcaccel sweep resume`"
        print(f"hpcaccel: {error}. If the job ends because of this, continue with {how}", file=sys.stderr)
        return HpcaccelError.exit_code


def _dispatch(arguments: list[str]) -> int:
    # Subcommands not listed here log to standard error, because some of them print JSON lines to standard output.
    configure(
        to_stderr=arguments[:1] not in (["batch"], ["supervise"], ["work"], ["trial"], ["setup-failed"], ["notices"])
    )
    for commands in (_batch_step, _ranks, _node_steps):
        if (code := commands(arguments)) is not None:
            return code
    usage = (
        "node.pyz [batch] supervise DIR | [batch] work DIR INDEX | setup-failed DIR CODE NAME | trial DESCRIPTOR | "
        "rank DIR | agent DIR | component DIR | preflight-rank DIR | preflight DIR | import-image DIR RUNTIME | "
        "stage DIR PLACE | unstage PLACE | forget-snapshots DIR | sample DIR ATTEMPT | notices DIR SINCE | "
        "overdue-notices DIR STATE DETAIL | watch-batch-host DIR JOB RESTARTS"
    )
    print(f"usage: {usage}; arguments given: {' '.join(arguments)!r}", file=sys.stderr)
    return 2


def _batch_step(arguments: list[str]) -> int | None:
    """Run a subcommand of the batch step, or of a process that it starts on its own node. Returns the exit code, or
    None if ``arguments`` is not such a subcommand."""
    match arguments:
        case ["batch", "supervise", directory]:
            from hpcaccel.node.batch import run_batch

            return run_batch(RunDir(directory), arguments[1:], give_up=lambda why: _give_up(RunDir(directory), why))
        case ["batch", "work", directory, index]:
            from hpcaccel.node.batch import run_batch

            worker = SweepDir(directory).worker(int(index))
            return run_batch(worker, arguments[1:], give_up=lambda why: _give_up_worker(worker, why))
        case ["supervise", directory]:
            from hpcaccel.node.supervisor import supervise

            return supervise(RunDir(directory))
        case ["work", directory, index]:
            from hpcaccel.node.sweep.sweep_worker import work

            return work(SweepDir(directory), int(index))
        case ["trial", report_to]:
            _supervise_trial(int(report_to))
        case ["setup-failed", directory, code, name] if RunDir(directory).is_worker:
            from hpcaccel.node.sweep import worker_account

            return worker_account.record_setup_failure(WorkerDir(directory), exit_code=int(code), name=name)
        case ["setup-failed", directory, code, name]:
            return _record_setup_failure(RunDir(directory), exit_code=int(code), name=name)
        case ["notices", directory, since]:
            from hpcaccel.node.notices.sender import send_notices

            return send_notices(_run_or_worker(directory), since=float(since))
        case ["overdue-notices", directory, state, detail]:
            from hpcaccel.node.notices.overdue import send_overdue_notices

            return send_overdue_notices(RunDir(directory), state=state, detail=detail)
    return None


def _run_or_worker(directory: str) -> RunDir:
    return WorkerDir(directory) if RunDir(directory).is_worker else RunDir(directory)


def _record_setup_failure(run: RunDir, *, exit_code: int, name: str) -> int:
    from hpcaccel.node.notices.sender import deliver_now
    from hpcaccel.node.supervisor import record_setup_failure

    began = time.time()
    code = record_setup_failure(run, exit_code=exit_code, name=name)
    deliver_now(run, since=began)
    return code


def _supervise_trial(report_to: int) -> NoReturn:
    from hpcaccel.node.sweep.trial_supervisor import wait_for_trials

    code = wait_for_trials(report_to=report_to)
    try:
        sys.stdout.flush()
    except OSError:
        pass  # the log's disk is full; the trial's end has been reported already
    os._exit(code)  # the next trial waits for the end of this process, and a normal exit takes longer


def _ranks(arguments: list[str]) -> None:
    """Run the subcommand of a shim, which execs a rank, torchrun, a component or a rank of the full preflight check.
    Returns only if ``arguments`` is not such a subcommand."""
    match arguments:
        case ["rank", directory]:
            from hpcaccel.node.rank import become_program

            become_program(RunDir(directory))
        case ["agent", directory]:
            from hpcaccel.node.torchrun_agent import become_agent

            become_agent(RunDir(directory))
        case ["component", directory]:
            from hpcaccel.node.launchers.het_components import become_component

            become_component(RunDir(directory))
        case ["preflight-rank", directory]:
            from hpcaccel.node.failures.preflight import become_check

            become_check(RunDir(directory))


def _node_steps(arguments: list[str]) -> int | None:
    """Run the subcommand of a step on the nodes: before or after the ranks, printing results as JSON lines, or beside
    them. Returns the exit code, or None if ``arguments`` is not such a subcommand."""
    match arguments:
        case ["import-image", directory, runtime]:
            from hpcaccel.node.environment.containers import import_for

            return import_for(RunDir(directory), runtime)
        case ["stage", directory, place]:
            from hpcaccel.core.launch_spec import read_launch
            from hpcaccel.node.environment.staging import stage_here

            return stage_here(read_launch(RunDir(directory)), Path(place))
        case ["forget-snapshots", directory]:
            from hpcaccel.checkpoint_files import snapshot_folder

            snapshot_folder.remove(Path(directory))
            return 0
        case ["unstage", place]:
            from hpcaccel.node.environment.staging import unstage_here

            return unstage_here(Path(place))
        case ["sample", directory, attempt]:
            from hpcaccel.node.samples.node_sampler import sample_here

            return sample_here(RunDir(directory), int(attempt))
        case ["watch-batch-host", directory, job_id, restarts]:
            from hpcaccel.node.allocation.batch_host_watch import watch_batch_host

            return watch_batch_host(RunDir(directory), job_id, int(restarts))
        case ["preflight", directory]:
            from hpcaccel.node.failures.preflight_checks import print_findings

            return print_findings(RunDir(directory).path)
    return None


def _give_up(run: RunDir, why: str) -> int:
    from hpcaccel.node.supervisor import record_killed

    return record_killed(run, why)


def _give_up_worker(worker: WorkerDir, why: str) -> int:
    from hpcaccel.node.sweep.worker_account import record_killed

    return record_killed(worker, why)


if __name__ == "__main__":
    main()
