"""Runs on this machine: submit, logs, status, stop, resume, cancel."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

TALKS = """\
name: talks
entrypoint:
  command: [bash, -c, "echo rank $RANK of $WORLD_SIZE; echo to stderr >&2; exit ${CODE:-0}"]
slurm: {ntasks_per_node: 2, time: "10:00"}
resilience: {restart_in_place: 0, max_failures: 1}
"""

WAITS = """\
name: waits
entrypoint:
  command: [bash, -c, "trap 'echo leaving; exit 0' TERM; echo here; while true; do sleep 0.1; done"]
slurm: {ntasks_per_node: 1, time: "10:00"}
"""


def submitted(shell, text, *arguments):
    """Submit a spec; return what ``submit --json`` prints."""
    shell.write("job.yaml", text)
    result = shell("submit", "job.yaml", "--cluster", "local", "--json", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def status(shell, run):
    result = shell("status", run, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def until(shell, run, *states):
    """Wait until the run is in one of ``states`` and its rank has printed ``here``."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        now = status(shell, run)
        if now["state"] in states and "here" in shell("logs", run).stdout:
            return now
        time.sleep(0.2)
    raise AssertionError(f"the run is {now['state']}: {now['detail']}; {shell('logs', run, '--rank', 'batch').stdout}")


@pytest.fixture
def waiting(shell):
    """A run that continues until SIGTERM."""
    run = submitted(shell, WAITS)
    until(shell, run["run_id"], "running")
    yield run
    if status(shell, run["run_id"])["state"] in ("pending", "starting", "running", "stopping", "requeued"):
        shell("cancel", run["run_id"])


def test_submit_prints_the_job_the_directory_and_the_next_commands(shell):
    shell.write("job.yaml", TALKS)
    result = shell("submit", "job.yaml", "--cluster", "local")
    assert result.returncode == 0, result.stderr
    said = dict(line.strip().split(":", 1) for line in result.stdout.splitlines()[1:])
    run = said["run"].strip()

    assert said["job"].strip().startswith("local-")
    assert os.path.isdir(said["directory"].strip())
    assert said["follow it"].strip() == f"hpcaccel wait {run}"
    assert said["cancel it"].strip() == f"hpcaccel cancel {run}"
    assert shell("wait", run).returncode == 0


def test_submit_wait_exits_with_the_result_of_the_run(shell):
    shell.write("job.yaml", TALKS)
    good = shell("submit", "job.yaml", "--cluster", "local", "--wait")
    assert good.returncode == 0, good.stderr
    assert ": completed\n" in good.stdout
    assert "attempts: 1\n" in good.stdout

    bad = shell("submit", "job.yaml", "--cluster", "local", "--wait", "environment.env.CODE=3")
    assert bad.returncode == 1, bad.stdout
    assert ": failed\n" in bad.stdout


def test_submit_wait_json_prints_one_document(shell):
    shell.write("job.yaml", TALKS)
    result = shell("submit", "job.yaml", "--cluster", "local", "--wait", "--json")
    assert json.loads(result.stdout)["state"] == "completed"


@pytest.mark.parametrize("grid", [[], ["--grid", "args.x=1,2"]], ids=["single", "array"])
def test_dry_run_creates_no_files(shell, grid):
    shell.write("job.yaml", "name: dry\nentrypoint: {command: [echo], args: {x: 0}}\nslurm: {ntasks_per_node: 1}\n")
    before = shell.files()
    result = shell("submit", "job.yaml", "--cluster", "local", "--dry-run", *grid)
    assert result.returncode == 0, result.stderr
    assert "nothing was" in result.stdout
    assert ("args.x=2" in result.stdout) == bool(grid)
    assert shell.files() == before


def test_logs_default_to_rank_0_of_the_latest_run(shell):
    run = submitted(shell, TALKS, "--wait")
    assert run["state"] == "completed"
    assert shell("logs").stdout.splitlines() == ["rank 0 of 2", "to stderr"]
    assert sorted(shell("logs", "--rank", "all").stdout.splitlines()) == [
        "[0] rank 0 of 2",
        "[0] to stderr",
        "[1] rank 1 of 2",
        "[1] to stderr",
    ]
    assert shell("logs", "-f", "--rank", "1").stdout.splitlines() == ["rank 1 of 2", "to stderr"]


def test_logs_of_a_failed_run_name_the_rank_at_fault(shell):
    fails = TALKS.replace("echo rank $RANK of $WORLD_SIZE", "[ $RANK = 0 ] && sleep 60; echo wrong; exit 3")
    run = submitted(shell, fails)["run_id"]
    assert shell("wait", run).returncode == 1

    assert f"attempt 1 failed on rank 1; its log: `hpcaccel logs {run} --rank 1`" in shell("logs", run).stderr
    at_fault = shell("logs", run, "--rank", "1")
    assert (at_fault.stdout.splitlines()[0], at_fault.stderr) == ("wrong", "")
    assert shell("logs", run, "--rank", "all").stderr == ""


def test_logs_into_a_closed_pipe_prints_no_error(shell):
    """`hpcaccel logs | head -1`"""
    submitted(shell, TALKS.replace("echo rank $RANK of $WORLD_SIZE", "seq 100000"), "--wait")
    command = f"{sys.executable} -m hpcaccel logs | head -1; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command], cwd=shell.folder, env=shell.environment, capture_output=True, text=True, check=False
    )
    assert (result.stdout, result.stderr) == ("1\n", "")
    assert result.returncode == 141


def test_runs_are_listed_newest_first(shell):
    first = submitted(shell, TALKS, "--wait")["run_id"]
    second = submitted(shell, TALKS.replace("talks", "again"), "--wait")["run_id"]

    assert [run["run_id"] for run in json.loads(shell("list", "--json").stdout)] == [second, first]
    assert [run["run_id"] for run in json.loads(shell("list", "--json", "-n", "1").stdout)] == [second]
    table = shell("list", "-n", "1")
    assert second in table.stdout
    assert first not in table.stdout
    assert "--all" in table.stderr


def test_run_is_found_by_id_prefix_of_id_name_and_job(shell):
    run = submitted(shell, TALKS, "--wait")
    for name in (run["run_id"], run["run_id"][:-1], "talks", run["job_id"]):
        assert status(shell, name)["run_id"] == run["run_id"]


def test_a_stopped_run_is_paused_and_can_be_resumed(shell, waiting):
    run = waiting["run_id"]
    stopped = shell("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    assert f"hpcaccel resume {run}" in stopped.stdout

    paused = shell("wait", run)
    assert paused.returncode == 85, paused.stdout + paused.stderr
    assert status(shell, run)["state"] == "paused"

    resumed = shell("resume", run, "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["job_id"] != waiting["job_id"]
    assert until(shell, run, "running")["attempts"] == 2


def test_stop_with_requeue_starts_a_second_attempt(shell, waiting):
    run = waiting["run_id"]
    assert shell("stop", "--requeue", run).returncode == 0
    deadline = time.monotonic() + 60
    while status(shell, run)["attempts"] < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    now = until(shell, run, "running")
    assert now["attempts"] == 2
    assert now["history"][0]["end"]["decision"] == "requeue"


def test_cancelled_run_cannot_be_stopped_or_cancelled_again(shell, waiting, refused):
    run = waiting["run_id"]
    assert shell("cancel", run).returncode == 0
    assert shell("wait", run).returncode == 130
    assert status(shell, run)["state"] == "cancelled"
    assert "cancelled" in refused(shell("stop", run))
    assert "cancelled" in refused(shell("cancel", run))


def test_ctrl_c_on_wait_leaves_the_run_running(shell, waiting):
    run = waiting["run_id"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcaccel", "wait", run],
        cwd=shell.folder,
        env=shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert "attempt 1" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)

    assert process.returncode == 130
    assert f"hpcaccel wait {run}" in err
    assert "Traceback" not in err
    assert out == ""
    assert status(shell, run)["state"] == "running"


def test_stop_refuses_requeue_together_with_finish(shell, waiting, refused):
    assert "--finish" in refused(shell("stop", waiting["run_id"], "--requeue", "--finish"))


def test_shell_opens_in_the_directory_of_a_local_run(shell, waiting):
    run = waiting["run_id"]
    result = shell("shell", run, input="pwd; echo $HPCACCEL_RUN_DIR\n")
    assert result.stdout.split() == [waiting["path"], waiting["path"]]


def test_grid_runs_all_combinations(shell):
    shell.write("say.sh", 'echo "$@"\n')
    text = TALKS.replace('command: [bash, -c, "', "command: [bash, say.sh]\n  args: {x: 0, y: 0}\n#")
    run = submitted(shell, text, "--grid", "args.x=1,2", "--grid", "args.y=3,4", "--wait")

    assert run["state"] == "completed"
    assert [task["overrides"] for task in run["tasks"]] == [
        {"args.x": x, "args.y": y} for x in ("1", "2") for y in ("3", "4")
    ]
    assert shell("logs", f"{run['run_id']}_3").stdout == "--x 2 --y 4\n"
    table = shell("status", run["run_id"]).stdout
    assert "args.x=1 args.y=4" in table
    assert f"{run['run_id']}_0" in shell("logs", run["run_id"]).stderr
