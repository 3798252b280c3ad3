"""The program ``node.pyz``: the batch step of a run or of a sweep's worker, a supervisor, a rank's shim."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from hpcaccel.core.run_dir import RunDir, SweepDir, WorkerDir
from hpcaccel.errors import HpcaccelError
from hpcaccel.node.retry_io import THE_DISK_SAYS_NO

__all__ = ["main"]

EXPEDITE = "HPCACCEL_EXPEDITE"
"""Variable: the job was submitted with --requeue=expedite; set by the batch script."""


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    expedited = EXPEDITE in os.environ and words[:1] in (["batch"], ["setup-failed"])
    try:
        code = _code(words)
    except Exception:
        if not expedited:
            raise
        traceback.print_exc()
        code = HpcaccelError.exit_code
    if expedited and code:
        # Any other code would have Slurm requeue the job and hold it. The ledger says how the run has ended.
        print(f"hpcaccel: exit code {code}, told to Slurm as 0 (resilience.requeue: expedite)", flush=True)
        code = 0
    sys.exit(code)


def _code(words: list[str]) -> int:
    try:
        return _dispatch(words)
    except HpcaccelError as error:
        print(f"hpcaccel: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:
        if error.errno not in THE_DISK_SAYS_NO:
            raise
        print(f"hpcaccel: {error}: this job ends here. `hpcaccel resume` goes on with the run", file=sys.stderr)
        return HpcaccelError.exit_code


def _dispatch(words: list[str]) -> int:
    match words:
        case ["batch", "supervise", directory]:
            from hpcaccel.node.batch import run_batch

            return run_batch(RunDir(directory), words[1:], give_up=lambda why: _give_up(RunDir(directory), why))
        case ["batch", "work", directory, index]:
            from hpcaccel.node.batch import run_batch

            worker = SweepDir(directory).worker(int(index))
            return run_batch(worker, words[1:], give_up=lambda why: _give_up_worker(worker, why))
        case ["supervise", directory]:
            from hpcaccel.node.supervisor import supervise

            return supervise(RunDir(directory))
        case ["work", directory, index]:
            from hpcaccel.node.sweep.sweep_worker import work

            return work(SweepDir(directory), int(index))
        case ["trial", report_to]:
            from hpcaccel.node.sweep.trial_supervisor import wait_for_a_trial

            code = wait_for_a_trial(report_to=int(report_to))
            try:
                sys.stdout.flush()
            except OSError:
                pass  # the log's disk is full: how the trial ended has been reported already
            os._exit(code)  # the next trial waits for the end of this process, and Python's takes its time
        case ["rank", directory]:
            from hpcaccel.node.rank import become_program

            become_program(RunDir(directory))
        case ["agent", directory]:
            from hpcaccel.node.launchers.torchrun import become_agent

            become_agent(RunDir(directory))
        case ["component", directory]:
            from hpcaccel.node.launchers.het_components import become_component

            become_component(RunDir(directory))
        case ["import-image", directory, runtime]:
            from hpcaccel.node.environment.container_import import import_for

            return import_for(RunDir(directory), runtime)
        case ["stage", directory, place]:
            from hpcaccel.node.environment.stage_data import stage_here
            from hpcaccel.node.launch_spec import read_launch

            return stage_here(read_launch(RunDir(directory)), Path(place))
        case ["unstage", place]:
            from hpcaccel.node.environment.stage_data import unstage_here

            return unstage_here(Path(place))
        case ["preflight", directory]:
            from hpcaccel.node.failures.preflight_checks import print_findings

            return print_findings(RunDir(directory).path)
        case ["preflight-rank", directory]:
            from hpcaccel.node.failures.preflight_ranks import become_check

            become_check(RunDir(directory))
        case ["setup-failed", directory, code, name] if RunDir(directory).is_worker:
            from hpcaccel.node.sweep import sweep_worker

            return sweep_worker.record_setup_failure(WorkerDir(directory), exit_code=int(code), name=name)
        case ["setup-failed", directory, code, name]:
            from hpcaccel.node.supervisor import record_setup_failure

            return record_setup_failure(RunDir(directory), exit_code=int(code), name=name)
    usage = "node.pyz [batch] supervise DIR | [batch] work DIR INDEX | rank DIR | setup-failed DIR CODE NAME"
    print(f"usage: {usage}", file=sys.stderr)
    return 2


def _give_up(run: RunDir, why: str) -> int:
    from hpcaccel.node.supervisor import record_killed

    return record_killed(run, why)


def _give_up_worker(worker: WorkerDir, why: str) -> int:
    from hpcaccel.node.sweep.sweep_worker import record_killed

    return record_killed(worker, why)


if __name__ == "__main__":
    main()
