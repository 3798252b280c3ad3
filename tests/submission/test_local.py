"""Real runs on the local backend: the script, supervisor and ledger of Slurm runs, without a queue."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from hpcaccel.core.durable_files import read_lines
from hpcaccel.errors import UserError
from hpcaccel.submission import Run, RunArray, find_run
from hpcaccel.submission.jobs.local import local_process
from tests.submission.conftest import Project

Eventually = Callable[[Callable[[], object]], None]


def local(project: Project, *overrides: str) -> Run:
    run = project.start(*overrides)
    assert isinstance(run, Run)
    return run


def in_state(run: Run | RunArray, state: str) -> Callable[[], bool]:
    return lambda: run.status().state == state


def test_run_completes_and_writes_its_logs(project: Project) -> None:
    run = local(project)
    assert run.wait(60).state == "completed"
    assert run.log(1).read_text() == "rank 1 --lr 3e-4\n"
    assert run.result() is None


def test_failing_script_fails_the_run(project: Project) -> None:
    project.write("train.py", "import sys; sys.exit(3)")
    assert local(project).wait(60).state == "failed"


def test_run_outlives_the_submitting_process(project: Project) -> None:
    project.hold()
    code = "import hpcaccel; print(hpcaccel.submit('job.yaml', cluster='local').run_id)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    run = find_run(done.stdout.strip())
    assert not run.status().ended
    project.release()
    assert run.wait(60).state == "completed"


def test_run_does_not_inherit_variables_of_an_outer_job(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("SLURM_PROCID", "7")
    monkeypatch.setenv("HPCACCEL_ATTEMPT", "7")
    project.write("train.py", "import os; print(os.environ['RANK'], os.environ.get('SLURM_PROCID'))")
    run = local(project)
    run.wait(60)
    assert run.log(0).read_text() == "0 None\n"


def test_run_started_by_a_trial_does_not_inherit_worker_variables(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["EXPEDITE", "WORKER_JOB", "KILL_WAIT", "PROCTRACK", "WORKER_END", "NODES_CHECKED", "SLOT", "KILLED"]
    for name in names:
        monkeypatch.setenv(f"HPCACCEL_{name}", "1")
    project.write("train.py", "import os; print(sorted(n for n in os.environ if n.startswith('HPCACCEL_')))")
    run = local(project)
    assert run.wait(60).state == "completed"
    assert not [name for name in names if f"'HPCACCEL_{name}'" in run.log().read_text()]


def test_cancel_ends_a_running_run(project: Project, eventually: Eventually) -> None:
    project.hold()
    run = local(project)
    eventually(lambda: run.log().exists() and run.log().read_text())
    run.cancel()
    assert run.wait(60).state == "cancelled"
    process = local_process(run.dir)
    assert process is not None
    assert not process.is_alive


def test_cancel_ends_a_run_during_setup(project: Project) -> None:
    run = local(project, "environment.setup=[sleep 60]")
    began = time.monotonic()
    run.cancel()
    assert run.wait(60).state == "cancelled"
    assert time.monotonic() - began < 50


def test_paused_run_resumes_and_completes(project: Project, eventually: Eventually) -> None:
    project.hold()
    run = local(project)
    eventually(in_state(run, "running"))
    run.stop()
    assert run.wait(60).state == "paused"
    first = run.job_id
    project.release()
    run.resume()
    assert run.wait(60).state == "completed"
    assert run.record.job_ids == [first, run.job_id]
    assert run.status().attempts == 2


def test_run_with_a_killed_supervisor_is_lost_and_can_be_resumed(project: Project, eventually: Eventually) -> None:
    project.hold()
    run = local(project)
    eventually(in_state(run, "running"))
    process = local_process(run.dir)
    assert process is not None
    os.kill(process.pid, 9)
    eventually(in_state(run, "lost"))
    project.release()
    run.resume()
    assert run.wait(60).state == "completed"


def test_array_runs_its_tasks_one_after_another(project: Project) -> None:
    array = project.start(grid=["args.lr=1,2"])
    assert isinstance(array, RunArray)
    assert array.wait(60).state == "completed"
    assert [run.log().read_text() for run in array] == ["rank 0 --lr 1\n", "rank 0 --lr 2\n"]
    ends = [[line["time"] for line, _ in read_lines(run.dir.ledger)] for run in array]
    assert ends[0][-1] <= ends[1][0]


def test_cancelled_array_starts_no_further_task(project: Project, eventually: Eventually) -> None:
    project.hold()
    array = project.start(grid=["args.lr=1,2,3"])
    assert isinstance(array, RunArray)
    eventually(in_state(array[0], "running"))
    assert array[1].status().state == "pending"
    array.cancel()
    assert [task.state for task in array.wait(60).tasks] == ["cancelled"] * 3
    assert not array[2].log().exists()


def test_resume_of_an_array_runs_only_the_failed_task(project: Project) -> None:
    project.write("train.py", "import os, sys; sys.exit('2' in sys.argv and not os.path.exists('mended'))")
    array = project.start(grid=["args.lr=1,2"])
    assert isinstance(array, RunArray)
    assert [task.state for task in array.wait(60).tasks] == ["completed", "failed"]
    project.write("mended", "")
    array.resume()
    assert array.wait(60).state == "completed"
    assert len(array[0].record.job_ids) == 1


def test_wait_raises_timeout_error_and_the_run_continues(project: Project) -> None:
    project.hold()
    run = local(project)
    with pytest.raises(TimeoutError, match="it continues"):
        run.wait(0.1)
    assert not run.status().ended


def test_completed_run_cannot_be_cancelled(project: Project) -> None:
    run = local(project)
    run.wait(60)
    with pytest.raises(UserError, match="is completed"):
        run.cancel()
