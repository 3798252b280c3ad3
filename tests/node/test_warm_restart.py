"""Tests of restarts through warm parents, with the supervisor on the local backend and programs without torch."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.launch_spec import LaunchContainer, LaunchSpec, launch_of
from hpcaccel.core.process_identity import process_start
from hpcaccel.node.allocation import LocalAllocation
from hpcaccel.node.allocation.scheduler_view import SchedulerView
from hpcaccel.node.job import Job
from hpcaccel.node.ledger import Ledger
from hpcaccel.node.warm import eligible_runs

from .conftest import LocalRun, outcome
from .test_supervisor import HEAD, STOPS_WHEN_ASKED

Make = Callable[..., LocalRun]

SAYS_PARENT = HEAD + "print('pid', os.getpid(), 'parent', os.getppid(), flush=True)\n"


@pytest.fixture
def warm_run(local_run: Make) -> Make:
    def make(program: str, **options: Any) -> LocalRun:
        return local_run(program, warm_restart="auto", **options)

    return make


def said(run: LocalRun, attempt: int, rank: int) -> dict[str, int]:
    """The process IDs that a rank of ``SAYS_PARENT`` has printed."""
    words = run.dir.rank_log(attempt, rank).read_text().split()
    words = words[words.index("pid") :]
    return {words[0]: int(words[1]), words[2]: int(words[3])}


FAILURES = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "killed", "rank 1: Killed"),
    "exception": ("1 / 0", "exception", "rank 1: ZeroDivisionError: division by zero"),
    "exit code": (
        "print('out', flush=True); sys.exit(7)",
        "exit",
        "rank 1: the program exited with code 7: out",
    ),
}


@pytest.mark.parametrize(("how", "error", "detail"), FAILURES.values(), ids=FAILURES.keys())
def test_failed_rank_restarts_under_the_same_parents(warm_run: Make, how: str, error: str, detail: str) -> None:
    program = SAYS_PARENT + f"if attempt == 1 and rank == 1:\n    {how}\nif attempt == 1: time.sleep(600)\n"
    run = warm_run(program, ranks=2)
    assert run.run() == 0, run.log
    assert run.ends == [("failed", "restart"), ("completed", "end")]
    end = run.lines("end")[0]
    assert (end["error_class"], end["detail"]) == (error, detail)
    for rank in (0, 1):
        first, second = said(run, 1, rank), said(run, 2, rank)
        assert first["parent"] == second["parent"]
        assert first["pid"] != second["pid"]
        assert process_start(first["parent"]) is None


def test_environment_of_a_restarted_rank_is_that_of_a_new_process(warm_run: Make, local_run: Make) -> None:
    program = HEAD + "import json\nprint(json.dumps(dict(os.environ)))\nsys.exit(attempt == 1)\n"
    found = []
    for make in (warm_run, local_run):
        run = make(program)
        assert run.run() == 0, run.log
        text = run.dir.rank_log(2, 0).read_text().replace(str(run.dir.path), "RUN").replace(run.dir.run_id, "ID")
        found.append(json.loads(text.splitlines()[-1]))
        for name in ("MASTER_PORT", "HPCACCEL_BATCH", "INVOCATION_ID"):
            found[-1].pop(name, None)
    assert found[0] == found[1]


def test_stop_ends_the_parents(warm_run: Make) -> None:
    run = warm_run(STOPS_WHEN_ASKED, ranks=2)
    run.start()
    for rank in (0, 1):
        run.wait_for("ready", rank=rank)
    run.ask("requeue")
    assert run.wait() == 0
    assert run.ends == [("stop", "requeue"), ("completed", "end")]
    assert [line["last_step"] for line in run.lines("end")] == [7, None]


def test_restarted_ranks_can_be_stopped(warm_run: Make) -> None:
    program = HEAD + "if attempt == 1: sys.exit(1)\n" + STOPS_WHEN_ASKED.replace("attempt == 1", "attempt == 2")
    run = warm_run(program, ranks=2)
    run.start()
    for rank in (0, 1):
        run.wait_for("ready\nready", attempt=2, rank=rank)
    run.ask("pause")
    assert run.wait() == 85
    assert run.ends == [("failed", "restart"), ("stop", "pause")]


def test_last_failure_ends_the_run_with_its_parents(warm_run: Make) -> None:
    run = warm_run(SAYS_PARENT + "raise ValueError('no such column: lr')", max_failures=10, restart_in_place=10)
    assert run.run() == 1
    assert run.ends == [("failed", "restart"), ("failed", "end")]
    assert "ValueError: no such column: lr" in run.lines("end")[-1]["detail"]
    assert process_start(said(run, 2, 0)["parent"]) is None


def test_killed_parent_ends_the_attempt_and_new_parents_follow(warm_run: Make) -> None:
    run = warm_run(SAYS_PARENT + "if attempt == 1: time.sleep(600)\n", ranks=2)
    run.start()
    run.wait_for("parent", rank=0)
    run.wait_for("parent", rank=1)
    before = [said(run, 1, rank) for rank in (0, 1)]
    os.kill(before[1]["parent"], signal.SIGKILL)
    assert run.wait() == 0, run.log
    assert run.ends == [("failed", "restart"), ("completed", "end")]
    assert run.lines("end")[0]["error_class"] == "killed"
    assert all(process_start(pid) is None for one in before for pid in one.values())
    assert said(run, 2, 0)["parent"] != before[0]["parent"]


def test_ranks_end_with_a_killed_supervisor_and_start_anew(warm_run: Make) -> None:
    run = warm_run(SAYS_PARENT + "if attempt == 1: time.sleep(600)\n", ranks=2)
    run.start()
    run.wait_for("parent", rank=0)
    run.wait_for("parent", rank=1)
    before = [said(run, 1, rank) for rank in (0, 1)]
    with open(f"/proc/{before[0]['parent']}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGKILL)
    assert run.wait() == 0, run.log
    assert run.ends == [("lost", "restart"), ("completed", "end")]
    assert all(process_start(pid) is None for one in before for pid in one.values())


def test_program_with_a_slow_end_is_not_killed(warm_run: Make) -> None:
    program = HEAD + f"if rank == 0: {outcome(step=7, resume=False, reason='completed')}\nelse: time.sleep(3)\n"
    run = warm_run(program, ranks=2)
    assert run.run() == 0, run.log
    assert run.ends == [("completed", "end")]


def test_stopped_rank_is_killed_when_another_one_crashes(warm_run: Make) -> None:
    run = warm_run(SAYS_PARENT + "if attempt == 1: time.sleep(600)\n", ranks=2)
    run.start()
    run.wait_for("parent", rank=0)
    run.wait_for("parent", rank=1)
    pids = [said(run, 1, rank)["pid"] for rank in (0, 1)]
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGSEGV)
    assert run.wait() == 0, run.log
    assert run.lines("end")[0]["detail"].startswith("rank 1: Segmentation fault")


def test_run_that_was_out_of_memory_has_no_warm_parents_any_more(warm_run: Make) -> None:
    run = warm_run(SAYS_PARENT + "if attempt == 1: raise MemoryError\n")
    assert run.run() == 0, run.log
    assert run.lines("end")[0]["error_class"] == "host_out_of_memory"
    assert "not possible with the memory of a job that has run out of it before" in run.log
    first = said(run, 1, 0)["parent"]
    assert process_start(first) is None
    assert said(run, 2, 0)["parent"] != first


def test_command_has_no_warm_parent(warm_run: Make) -> None:
    run = warm_run("", launch={"program": ["bash", "-c", "echo $PPID; exit $((HPCACCEL_ATTEMPT == 1))"]})
    assert run.run() == 0, run.log
    assert "not possible with entrypoint.command" in run.log


def launch(**values: Any) -> LaunchSpec:
    given = {"kind": "program", "program": ["{python}", "-m", "x"], "workdir": "/", "backend": "slurm", "nodes": 100}
    document = {
        "version": 1,
        "spec": {"resilience": {"warm_restart": "auto"}},
        "launch": {**given, "ranks_per_node": 8, "stop": "signals", **values},
    }
    return launch_of(document, source=Path("spec.json"))


def test_more_ranks_than_open_files_have_no_warm_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, why in ((1024, ""), (899, "800 ranks and at most 899 open files (ulimit -Hn)")):
        monkeypatch.setattr(eligible_runs, "most_open_files", lambda limit=limit: limit)
        assert eligible_runs.why_not_warm(launch()) == why


@pytest.mark.parametrize(
    ("word", "why"), [("--mpi=pmix", "srun.extra: --mpi"), ("--mpi=none", ""), ("--mpi=pmi2", "srun.extra: --mpi")]
)
def test_step_with_mpi_has_no_warm_parents(word: str, why: str) -> None:
    assert eligible_runs.why_not_warm(launch(nodes=1, srun=[word])) == why


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"launcher": "torchrun"}, "launcher: torchrun"),
        ({"container": LaunchContainer(image="/x.sif", runtime="apptainer", mounts=[], workdir="/", gpus=False)},
         "container"),
        ({"bridge": "/runs/x/trainer_bridge"}, "runtime.bridge"),
        ({"program": ["{python}", "-O", "train.py"]}, "entrypoint.command"),
        ({"program": ["{python}", "train.py"]}, ""),
    ],
)  # fmt: skip
def test_other_starts_of_the_ranks_have_no_warm_parents(changes: dict[str, Any], why: str) -> None:
    assert eligible_runs.why_not_warm(dataclasses.replace(launch(nodes=1), **changes)) == why


def test_job_whose_signals_reach_process_groups_only_has_no_warm_parents(warm_run: Make) -> None:
    run = warm_run("")
    spec = dataclasses.replace(launch(nodes=1, ranks_per_node=1), backend="local")
    for proctrack, expected in {"proctrack/pgid": False, "proctrack/cgroup": True, "": True}.items():
        allocation = LocalAllocation(run.dir, spec)
        allocation.proctrack = proctrack
        job = Job(
            run=run.dir, launch=spec, allocation=allocation, ledger=Ledger.of(run.dir),
            scheduler=SchedulerView(allocation),
        )  # fmt: skip
        assert job.has_warm_parents(another_run=False) == expected
