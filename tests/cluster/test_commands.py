"""The command line on a real Slurm, and the values of a spec that reach the ranks."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcaccel.core.run_dir import RunDir

from .dev_cluster import Cluster, program
from .scenario import Scenario

Lease = Callable[[int], list[str]]

HOSTILE = [
    "it's \"quoted\"", "$(touch pwned)", "`touch pwned`", "  two  spaces ", "# no comment", "é☃😀\u00a0", "-x", "--",
    "", "back\\slash\\n", "tab\there", "*", "~", "${HOME}", "%j", "{python}", "null", "0123", "x" * 10_000,
]  # fmt: skip

SAYS = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"


@pytest.fixture
def run(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(1))


def said_by_ranks(run: Scenario, count: int, **sections: Any) -> list[tuple[list[str], dict[str, str]]]:
    """Submit and wait; return the arguments and the environment of every rank."""
    script = run.folder / "says.py"
    script.write_text(SAYS)
    entrypoint = {"script": str(script), "args": sections.pop("args", [])}
    slurm = {"nodes": 1, "mem": "1G", **sections.pop("slurm", {})}
    run.submit({"entrypoint": entrypoint, "slurm": slurm, **sections})
    assert run.wait_until_over() == 0, run.story
    return [json.loads(run.dir.rank_log(1, rank).read_text()) for rank in range(count)]


@pytest.mark.parametrize("backend", ["slurm", "local"])
def test_hostile_values_reach_the_ranks_unchanged(cluster: Cluster, lease: Lease, tmp_path: Path, backend: str) -> None:
    folder = tmp_path / "50% of it's ü"
    folder.mkdir()
    slurm = backend == "slurm"
    run = Scenario(cluster if slurm else None, folder, nodes=lease(1) if slurm else None)
    env = {f"VALUE_{index}": value for index, value in enumerate(HOSTILE)}
    said = said_by_ranks(run, 2, args=HOSTILE, environment={"env": env}, slurm={"comment": "it's $(touch pwned) # é"})
    for arguments, seen in said:
        assert arguments == HOSTILE
        assert {name: seen.get(name) for name in env} == env
    assert not list(folder.rglob("pwned"))


def test_gpus_per_task_are_visible_to_all_ranks_of_a_node(run: Scenario) -> None:
    asked = {"ntasks_per_node": 2, "gpus_per_node": None, "gpus_per_task": 1, "cpus_per_task": 3}
    for rank, (_, env) in enumerate(said_by_ranks(run, 2, slurm=asked)):
        assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) == (str(rank), "0,1")
        assert (env["SLURM_CPUS_PER_TASK"], env["OMP_NUM_THREADS"]) == ("3", "3")


def test_a_secret_reaches_the_ranks_and_is_written_nowhere(run: Scenario) -> None:
    assert run.cluster is not None
    run.env["API_KEY"] = secret = "open 'sesame' $(id)"
    script = run.folder / "opens.py"
    script.write_text(
        "import hashlib, os, time\n"
        "print('opened', hashlib.sha256(os.environ['API_KEY'].encode()).hexdigest(), flush=True)\n"
        "time.sleep(120)\n"
    )
    environment = {"secrets": ["API_KEY"], "setup": ['echo "$NOT_SET_ANYWHERE"']}
    run.submit(
        {
            "entrypoint": {"script": str(script)},
            "environment": environment,
            "slurm": {"nodes": 1, "mem": "1G"},
            "runtime": {"stop": "signals"},
        }
    )
    said = run.wait_for_word("opened", rank=1)
    assert said == f"opened {hashlib.sha256(secret.encode()).hexdigest()}"
    batch = run.cluster.run("scontrol", "write", "batch_script", run.job_id, "-").stdout
    job = run.cluster.run("scontrol", "--details", "show", "job", run.job_id).stdout
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert "API_KEY" in batch
    assert not any("sesame" in text for text in (batch, job, processes))
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert run.dir.slurm_log in files
    assert not [path for path in files if b"sesame" in path.read_bytes()]


def test_failing_setup_line_is_named_and_no_rank_starts(run: Scenario) -> None:
    line = "cat /no/such/file # é"
    run.plain(environment={"setup": ["echo fine", line, "echo too late"]})
    assert run.wait_until_over() == 1
    status = run.status()
    assert (status["state"], status["history"][0]["end"]["error_class"]) == ("failed", "setup")
    assert f"environment.setup: {line} failed with exit code 1" in status["detail"]
    assert not list(run.dir.attempts.glob("*/*.log"))
    assert "No such file" in run.cli("logs", run.dir.run_id).stdout


def test_spec_written_by_init_can_be_submitted(run: Scenario) -> None:
    (run.folder / "train.py").write_text("print('trained')\n")
    run.cli("init", "train.py")
    slurm = yaml.safe_load((run.folder / "job.yaml").read_text())["slurm"]
    assert slurm["partition"] in ("gpu", "gpu0", "urgent")
    assert (slurm["account"], slurm["gpus_per_node"]) == ("root", 2)
    answer = run.cli("submit", "job.yaml", f"slurm.nodelist={run.nodes[0]}", "--wait", "--json")
    ended = json.loads(answer.stdout)
    assert (ended["state"], ended["backend"]) == ("completed", "slurm")
    assert RunDir(ended["path"]).rank_log(1, 1).read_text() == "trained\n"


def test_running_job_is_found_and_shell_and_wait_leave_it_running(
    cluster: Cluster, lease: Lease, tmp_path: Path
) -> None:
    run = Scenario(cluster, tmp_path, nodes=lease(2))
    run.plain("--wait", slurm={"nodes": 2, "mem": "1G"}, runtime={"stop": "signals"})
    for rank in (0, 1):
        run.wait_for_word("starting", rank=rank)
    for name in (run.dir.run_id, run.dir.run_id[:-1], "scenario", run.job_id, str(run.dir.path)):
        assert json.loads(run.cli("status", name, "--json").stdout)["state"] == "running"
    assert [one["run_id"] for one in json.loads(run.cli("list", "--json").stdout)] == [run.dir.run_id]
    assert run.cli("logs").stdout.startswith("starting")
    assert {line.split()[0] for line in run.cli("logs", "--rank", "all").stdout.splitlines()} == {"[0]", "[1]"}

    shell = [sys.executable, "-m", "hpcaccel", "shell", "scenario", "--node", "1"]
    commands = "echo $SLURMD_NODENAME $SLURM_JOB_ID $CUDA_VISIBLE_DEVICES; pwd; exit 3\n"
    inside = subprocess.run(
        shell, env=run.env, cwd=tmp_path, input=commands, capture_output=True, text=True, check=False, timeout=60
    )
    assert inside.stdout.splitlines() == [f"{run.nodes[1]} {run.job_id} 0", str(run.dir.path)]
    assert inside.returncode == 3

    wait = [sys.executable, "-m", "hpcaccel", "wait", "scenario"]
    with subprocess.Popen(wait, env=run.env, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as waiting:
        assert waiting.stderr is not None
        assert "attempt 1 started" in waiting.stderr.readline()
        waiting.send_signal(signal.SIGINT)
        assert f"hpcaccel wait {run.dir.run_id}" in waiting.stderr.read()
    assert waiting.returncode == 130
    assert run.status()["state"] == "running"
    run.cli("cancel", "scenario")
    assert run.wait_until_over() == 130


def test_status_of_a_pending_job_gives_its_reason(run: Scenario) -> None:
    assert run.cluster is not None
    run.plain(slurm={"begin": "now+1hour"})
    status = run.status()
    assert status["state"] == "pending"
    assert status["detail"].startswith("BeginTime: the job's earliest start time is in the future")
    run.cluster.run("scontrol", "uhold", run.job_id)
    assert "scontrol release" in run.status()["detail"]


def test_run_continues_after_a_requeue_and_signals_by_hand(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    """`scontrol requeue`, and SIGTERM and the warning's signal to the batch step, each sent by hand."""
    commands = (
        (["scontrol", "requeue"], "preempted"),
        (["scancel", "--batch", "--signal=TERM"], "stop"),
        (["scancel", "--batch", "--signal=USR2"], "stop"),
    )
    nodes = lease(1)
    runs = []
    for index in range(len(commands)):
        (tmp_path / str(index)).mkdir()
        runs.append(Scenario(cluster, tmp_path / str(index), nodes=nodes))
        slurm = {"gpus_per_node": None, "mem": "1G"}
        runs[-1].plain("--wait", "--until", "1", slurm=slurm, runtime={"stop": "signals"})
    for run, (command, _) in zip(runs, commands, strict=True):
        run.wait_for_word("starting")
        cluster.run(*command, run.job_id)
    for run, (_, reason) in zip(runs, commands, strict=True):
        assert run.wait_until_over() == 0, run.story
        assert run.ends == [(reason, "requeue"), ("completed", "end")], run.story


def test_run_is_requeued_after_a_node_failure(cluster: Cluster, lease: Lease, tmp_path: Path) -> None:
    run = Scenario(cluster, tmp_path, nodes=lease(2))
    run.plain("--wait", "--until", "1", slurm={"nodes": 2, "mem": "1G"}, runtime={"stop": "signals"})
    run.wait_for_word("starting", rank=1)
    program("fail", "--root", str(cluster.root), run.nodes[1])
    try:
        # avoids waiting for SlurmdTimeout
        cluster.run("scontrol", "update", f"nodename={run.nodes[1]}", "state=down", "reason=test")
        run.wait_for_ends(1)
    finally:
        program("restore", "--root", str(cluster.root), run.nodes[1])
    assert run.wait_until_over() == 0, run.story
    assert run.ends == [("lost", "requeue"), ("completed", "end")], run.story
    assert f"node failure: {run.nodes[1]}" in run.lines("end")[0]["detail"]


@pytest.mark.chaos
def test_plain_ddp_example_continues_from_its_own_checkpoint(run: Scenario) -> None:
    example = Path(__file__).parents[2] / "jobs" / "plain" / "ddp.yaml"
    changes = [f"slurm.nodelist={run.nodes[0]}", f"environment.python={sys.executable}", "env.PLAIN_STEPS=1000000"]
    answer = json.loads(run.cli("submit", str(example), *changes, "--json").stdout)
    run.dir = RunDir(answer["path"])
    run.wait_for_word("step 100")
    run.preempt()
    run.wait_for_ends(1)
    step = int(run.wait_for_word("rank 1 continues from step", attempt=2, rank=1).split()[-1])
    assert step >= 100
    assert run.ends == [("preempted", "requeue")], run.story
    run.cli("cancel", run.dir.run_id)
