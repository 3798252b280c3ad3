"""Tests of the supervisor on the local backend, with real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest

from hpcaccel.checkpoint_files import MANIFEST, checkpoint_name
from hpcaccel.core.durable_files import write_json
from hpcaccel.core.process_identity import process_start
from hpcaccel.core.records import RunRecord, to_dict
from hpcaccel.node.failures import cause

from .conftest import LocalRun, outcome

Make = Callable[..., LocalRun]

HEAD = """
import os, signal, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["HPCACCEL_ATTEMPT"])
folder = os.environ["HPCACCEL_RUN_DIR"] + f"/attempts/{attempt}"
asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append("USR2"))
signal.signal(signal.SIGTERM, lambda *_: asked.append("TERM"))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGUSR2})
print("ready", flush=True)
"""

STOPS_WHEN_ASKED = (
    HEAD
    + f"""
if attempt == 1:
    end = time.monotonic() + 30
    while not asked and time.monotonic() < end:
        time.sleep(0.01)
    if rank == 0:
        {outcome(step=7, resume=True)}
    sys.exit(85)
"""
)


def test_program_that_exits_with_zero_is_completed(local_run: Make) -> None:
    run = local_run("print('hello')", ranks=2)
    assert run.run() == 0
    assert run.ends == [("completed", "end")]
    assert run.dir.rank_log(1, 1).read_text() == "hello\n"
    assert not run.dir.lease.exists()


def test_ranks_get_torchruns_environment(local_run: Make) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    run = local_run(f"import os, json; print(json.dumps([os.environ[n] for n in {names!r}]))", ranks=2)
    assert run.run() == 0
    values = [json.loads(run.dir.rank_log(1, rank).read_text()) for rank in (0, 1)]
    assert [value[:5] for value in values] == [["0", "2", "0", "2", "127.0.0.1"], ["1", "2", "1", "2", "127.0.0.1"]]
    assert values[0][5] == values[1][5]


def test_run_stopped_with_requeue_starts_again(local_run: Make) -> None:
    run = local_run(STOPS_WHEN_ASKED, ranks=2)
    run.start()
    for rank in (0, 1):
        run.wait_for("ready", rank=rank)
    run.ask("requeue")
    assert run.wait() == 0
    assert run.ends == [("stop", "requeue"), ("completed", "end")]
    assert [line["last_step"] for line in run.lines("end")] == [7, None]
    assert [line["restart_count"] for line in run.lines("start")] == [0, 1]
    assert [path.name for path in run.dir.control.iterdir()] == ["honoured-stop-1.json"]


def test_paused_run_continues_in_a_new_job(local_run: Make) -> None:
    run = local_run(STOPS_WHEN_ASKED)
    run.start()
    run.wait_for("ready")
    run.ask("pause")
    assert run.wait() == 85
    assert run.ends == [("stop", "pause")]
    run.start(job_id="local-00000002")
    assert run.wait() == 0
    assert run.ends[1:] == [("completed", "end")]


@pytest.mark.parametrize(("program", "code"), [("print('well')", 0), ("1 / 0", 1), ("raise SystemExit(2)", 2)])
def test_job_started_after_the_end_exits_with_the_code_of_the_run(local_run: Make, program: str, code: int) -> None:
    """Slurm starts a preempted job again, and jobs that depend on it need the exit code of the run."""
    run = local_run(program, restart_in_place=0, max_failures=1)
    assert [run.run(), run.run()] == [code, code]
    assert len(run.ends) == 1
    assert f"has already ended: exiting with code {code}" in run.log


def test_job_started_after_a_pause_exits_as_paused(local_run: Make) -> None:
    run = local_run(STOPS_WHEN_ASKED)
    run.start()
    run.wait_for("ready")
    run.ask("pause")
    assert run.wait() == 85
    assert run.run() == 85
    assert len(run.lines("start")) == 1


@pytest.mark.parametrize(("then", "reason", "code"), [("pause", "stop", 85), ("cancel", "cancelled", 130)])
def test_job_restarted_after_an_end_without_ranks_exits_with_its_code(
    local_run: Make, then: str, reason: str, code: int
) -> None:
    run = local_run("print('ran')")
    run.ask(then, reason=reason, name=f"{then}-1")
    assert [run.run(), run.run()] == [code, code]
    assert not run.lines("start")
    assert len(run.ends) == 1
    run.start(job_id="local-00000002")  # as `hpcaccel resume` does
    assert run.wait() == 0


def test_stop_signal_before_the_handlers_are_installed_is_not_lost(local_run: Make) -> None:
    slow_start = "import time\nprint('starting', flush=True)\ntime.sleep(1.5)\n" + STOPS_WHEN_ASKED
    run = local_run(slow_start)
    run.start()
    run.wait_for("starting")
    run.ask("requeue")
    assert run.wait() == 0
    assert run.ends == [("stop", "requeue"), ("completed", "end")]


def test_sigterm_cancels_the_run(local_run: Make) -> None:
    run = local_run(STOPS_WHEN_ASKED, ranks=2)
    run.start()
    run.wait_for("ready", rank=1)
    assert run.process is not None
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 130
    assert run.ends == [("cancelled", "end")]


def test_pending_cancel_request_ends_the_job_before_its_ranks_start(local_run: Make) -> None:
    run = local_run("print('ran')")
    run.ask("cancel", reason="cancelled", name="cancel-1")
    assert run.run() == 130
    assert run.ends == [("cancelled", "end")]
    assert not run.dir.attempt(1).exists()


def test_run_with_impossible_dependency_ends_before_its_ranks_start(local_run: Make) -> None:
    other = local_run("print('well')")
    write_json(other.dir.record, to_dict(RunRecord(run_id=other.dir.run_id, name="other", backend="local")))
    assert other.run() == 0
    run = local_run("print('ran')", launch={"after": [{"kind": "afternotok", "run": str(other.dir.path)}]})
    assert run.run() == 130
    (end,) = run.lines("end")
    assert (end["reason"], end["decision"], end["error_class"]) == ("cancelled", "end", "dependency")
    assert end["detail"] == f"afternotok: run {other.dir.run_id} succeeded"
    assert end["advice"] == cause("dependency").advice


def test_failed_attempt_is_restarted_in_place(local_run: Make) -> None:
    run = local_run(HEAD + "if attempt == 1 and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n", ranks=2)
    assert run.run() == 0
    assert run.ends == [("failed", "restart"), ("completed", "end")]
    assert [line["restart_count"] for line in run.lines("start")] == [0, 0]
    assert run.lines("end")[0]["error_class"] == "killed"


def test_two_failures_without_a_new_checkpoint_end_the_run(local_run: Make) -> None:
    run = local_run("raise ValueError('no such column: lr')", max_failures=10, restart_in_place=10)
    assert run.run() == 1
    assert run.ends == [("failed", "restart"), ("failed", "end")]
    last = run.lines("end")[-1]
    assert last["error_class"] == "exception"
    assert last["detail"].startswith("2 failures without a new checkpoint")
    assert "ValueError: no such column: lr" in last["detail"]


def test_failures_with_progress_are_allowed_up_to_max_failures(local_run: Make) -> None:
    commit = f"""
        import json, os, sys
        attempt = int(os.environ["HPCACCEL_ATTEMPT"])
        folder = os.environ["HPCACCEL_RUN_DIR"] + f"/checkpoints/{checkpoint_name(0)[:-1]}{{attempt}}"
        os.makedirs(folder)
        open(folder + "/{MANIFEST}", "w").write(json.dumps({{}}))
        sys.exit(1)
    """
    run = local_run(textwrap.dedent(commit), max_failures=3, restart_in_place=10)
    assert run.run() == 1
    assert run.ends == [("failed", "restart"), ("failed", "restart"), ("failed", "end")]
    assert "max_failures: 3" in run.lines("end")[-1]["detail"]


def test_two_time_limits_without_a_new_checkpoint_end_the_run(local_run: Make) -> None:
    program = STOPS_WHEN_ASKED.replace("if attempt == 1:", "if True:")
    run = local_run(program, launch={"time_limit_seconds": 2}, warning_seconds=1)
    assert run.run() == 1
    assert run.ends == [("time_limit", "requeue"), ("time_limit", "end")]
    assert "2 attempts ended by the time limit without a new checkpoint" in run.lines("end")[-1]["detail"]


def test_progress_between_failures_is_read_from_programs_own_metrics(local_run: Make) -> None:
    own = """
import json, os, sys
from pathlib import Path
own = Path(os.environ["HPCACCEL_RUN_DIR"], "own.json")
begun = json.loads(own.read_text()) if own.exists() else 0
with open(os.environ["HPCACCEL_METRICS"], "a") as metrics:
    for step in range(begun + 1, begun + 21):
        print(json.dumps({"step": step, "loss": 1.0}), file=metrics)
own.write_text(json.dumps(min(begun + 15, 45)))
sys.exit(1)
"""
    run = local_run(own, launch={"stop": "signals"}, restart_in_place=10, max_failures=10)
    assert run.run() == 1
    ends = run.lines("end")
    assert [line["first_logged"] for line in ends] == [1, 16, 31, 46, 46], run.log
    assert run.ends == [("failed", "restart")] * 4 + [("failed", "end")]
    assert "2 failures without a new checkpoint" in ends[-1]["detail"]


def test_progress_is_read_from_outcomes_if_metrics_have_no_steps(local_run: Make) -> None:
    program = (
        HEAD
        + """
import json
with open(os.environ["HPCACCEL_METRICS"], "a") as metrics:
    metrics.write('{"loss": 1.0}\\n' * 40)
while not asked:
    time.sleep(0.01)
step = 7 * min(attempt, 2)
outcome = {"version": 1, "reason": "time_limit", "step": step, "checkpoint": None, "resume": True}
with open(folder + "/outcome.json", "w") as file:
    json.dump(outcome, file)
sys.exit(85)
"""
    )
    run = local_run(program, launch={"time_limit_seconds": 2}, warning_seconds=1)
    assert run.run() == 1
    assert run.ends == [("time_limit", "requeue")] * 2 + [("time_limit", "end")]
    assert [line["last_step"] for line in run.lines("end")] == [7, 14, 14]


def test_user_mistake_is_not_retried(local_run: Make) -> None:
    run = local_run("import argparse; argparse.ArgumentParser().parse_args(['--nope'])")
    assert run.run() == 2
    assert run.ends == [("failed", "end")]


def test_ranks_that_do_not_exit_are_killed(local_run: Make) -> None:
    run = local_run(HEAD + "time.sleep(600)\n", stop_timeout_seconds=1)
    run.start()
    run.wait_for("ready")
    run.ask("pause")
    assert run.wait() == 85
    assert run.ends == [("stop", "pause")]
    assert run.lines("end")[0]["exit_code"] == 128 + signal.SIGKILL


def test_failed_rank_ends_the_other_ranks(local_run: Make) -> None:
    program = HEAD + "if rank == 1: sys.exit(3)\nwhile 'TERM' not in asked: time.sleep(0.01)\n"
    run = local_run(program, ranks=2, restart_in_place=0, requeue=False)
    assert run.run() == 1
    assert run.ends == [("failed", "end")]
    assert run.lines("end")[0]["exit_code"] == 3


def test_run_whose_batch_step_was_killed_continues_when_started_again(local_run: Make) -> None:
    run = local_run(STOPS_WHEN_ASKED.replace('"ready"', '"ready", os.getpid()'))
    run.start()
    run.wait_for("ready")
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    assert run.dir.lease.exists()
    rank = int(run.dir.rank_log(1, 0).read_text().split()[-1])
    run.start()
    assert run.wait() == 0
    assert process_start(rank) is None
    assert run.ends == [("lost", "requeue"), ("completed", "end")]


def test_second_supervisor_is_refused(local_run: Make) -> None:
    run = local_run(STOPS_WHEN_ASKED)
    run.start()
    run.wait_for("ready")
    first = run.process
    run.start(job_id="local-00000002")
    assert run.wait() == 2
    assert "is in use by job local-00000001" in run.log
    run.process = first
    run.ask("pause")
    assert run.wait() == 85


def test_job_replaced_by_a_newer_one_does_nothing(local_run: Make) -> None:
    run = local_run("print('ran')")
    run.dir.record.write_text(json.dumps({"job_ids": ["local-00000001", "local-00000002"]}))
    run.start(job_id="local-00000001")
    assert run.wait() == 85, "0 would be the end that others wait for"
    assert run.lines("start") == []
    run.start(job_id="local-00000002")
    assert run.wait() == 0
    assert run.ends == [("completed", "end")]


@pytest.mark.parametrize(("then", "code"), [("requeue", 0), ("pause", 85)])
def test_a_plain_program_is_stopped_by_sigterm(local_run: Make, then: str, code: int) -> None:
    command = ["bash", "-c", 'echo ready; [ "$HPCACCEL_ATTEMPT" = 1 ] && sleep 60; exit 0']
    run = local_run("", launch={"stop": "signals", "program": command})
    run.start()
    run.wait_for("ready")
    run.ask(then)
    assert run.wait() == code
    assert run.ends[0] == ("stop", then)


def test_failed_setup_command_of_a_node_is_reported(local_run: Make) -> None:
    run = local_run("print('ran')", launch={"setup_per_node": ["true", "exit 7"]})
    assert run.run() == 1
    end = run.lines("end")[0]
    assert (end["reason"], end["error_class"], end["exit_code"]) == ("failed", "setup", 7)
    assert "environment.setup_per_node: exit 7 failed with exit code 7" in end["detail"]


def test_callable_is_started_by_submitits_process(local_run: Make) -> None:
    fake = "import os, sys; print(sys.argv, os.environ['SUBMITIT_EXECUTOR'], os.environ['SUBMITIT_LOCAL_GLOBALID'])"
    run = local_run("", launch={"kind": "callable", "program": []})
    package = run.dir.path / "fake" / "submitit" / "core"
    package.mkdir(parents=True)
    for name, text in (("../__init__", ""), ("__init__", ""), ("_submit", fake)):
        (package / f"{name}.py").write_text(text)
    document: dict[str, Any] = json.loads(run.dir.spec.read_text())
    document["launch"]["pythonpath"] = [str(run.dir.path / "fake")]
    run.dir.spec.write_text(json.dumps(document))
    stale = run.dir.submitit / "1_0_result.pkl"
    stale.parent.mkdir()
    stale.write_bytes(b"old")
    assert run.run() == 0
    printed = run.dir.rank_log(1, 0).read_text()
    assert str(run.dir.submitit) in printed
    assert printed.endswith("local 0\n")
    assert not stale.exists()


SIGNALS = {"stop": "signals"}


def prune(run: LocalRun) -> None:
    run.ask("finish", reason="pruned", name="pruned-1")


def test_pruned_trial_of_a_program_stopped_by_signals_ends_by_sigterm(local_run: Make) -> None:
    run = local_run("import time\nprint('ready', flush=True)\ntime.sleep(60)", launch=SIGNALS)
    run.start()
    run.wait_for("ready")
    prune(run)
    assert run.wait() == 0
    assert run.ends == [("pruned", "end")]
    assert run.lines("end")[0]["exit_code"] == 128 + signal.SIGTERM
    run.start()
    assert run.wait() == 0  # the job starts again; the trial has already ended
    assert len(run.lines("start")) == 1


def test_pruned_trial_that_ignores_sigterm_is_killed(local_run: Make) -> None:
    deaf = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    run = local_run(
        deaf + "import time\nprint('ready', flush=True)\ntime.sleep(60)", launch=SIGNALS, stop_timeout_seconds=1
    )
    run.start()
    run.wait_for("ready")
    prune(run)
    assert run.wait() == 0
    assert run.ends == [("pruned", "end")]


def test_later_stop_request_does_not_requeue_a_pruned_trial(local_run: Make) -> None:
    run = local_run(HEAD + "time.sleep(600)\n", stop_timeout_seconds=2)
    run.start()
    run.wait_for("ready")
    prune(run)
    stop = run.dir.stop(1)
    while not stop.exists():
        time.sleep(0.02)
    run.ask("requeue", reason="preempted")
    assert run.wait() == 0
    assert run.ends == [("pruned", "end")]
    assert json.loads(stop.read_text())["then"] == "finish"


def test_trial_pruned_before_its_ranks_start_ends_without_an_attempt(local_run: Make) -> None:
    run = local_run("print('ran')")
    prune(run)
    assert run.run() == 0
    assert run.ends == [("pruned", "end")]
    assert not run.dir.attempt(1).exists()


def test_trial_stays_pruned_if_its_batch_step_is_killed_while_it_exits(local_run: Make) -> None:
    run = local_run(HEAD + "time.sleep(600)\n")
    run.start()
    run.wait_for("ready")
    prune(run)
    while not run.dir.stop(1).exists():
        time.sleep(0.02)
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    run.start()
    assert run.wait() == 0
    assert run.ends == [("pruned", "end")]


def test_shell_program_appends_its_metrics_on_rank_0(local_run: Make) -> None:
    run = local_run("", ranks=2, launch={"kind": "program", "program": ["sh", "-c", """
        echo '{"step": 1, "loss": 0.5}' >> "$HPCACCEL_METRICS"; echo "$HPCACCEL_METRICS"
    """]})  # fmt: skip
    assert run.run() == 0
    assert run.dir.foreign_metrics(1).read_text() == '{"step": 1, "loss": 0.5}\n'
    assert run.dir.rank_log(1, 1).read_text() == "/dev/null\n"
    assert run.lines("end")[0]["last_step"] == 1
