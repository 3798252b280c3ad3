"""Local spec files for a remote cluster: checked against its facts, planned, rendered and submitted."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from hpcaccel.core.durable_files import read_json

from .login_node import LoginNode

FACTS = """\
{version: 1, name: alps, probed_at: 1700000000, slurm_version: 23.02.0,
 partitions: [{name: gpu, default: true, max_time_minutes: 60, nodes: 4}]}
"""
JOBS = """\
slurm: {partition: gpu, time: '10:00'}
jobs:
  train:
    entrypoint: {script: src/train.py, args: {data: '${env:SCRATCH}/data'}}
    slurm: {nodes: 2}
    after: [prepare]
  prepare: {entrypoint: {command: [./prepare.sh, ~/data]}}
"""


def project(node: LoginNode) -> None:
    """Write a file with two jobs, the facts of the cluster, and a variable that is set on the login node."""
    folder = node.project(files={"jobs.yaml": JOBS.encode(), "prepare.sh": b"#!/bin/sh\n"}).parent
    (folder / "src").mkdir()
    (folder / "src" / "train.py").write_text("import hpcaccel\n")
    (folder / "prepare.sh").chmod(0o755)
    facts = node.client / ".config" / "hpcaccel" / "clusters" / "alps.facts"
    facts.mkdir()
    (facts / "facts.yaml").write_text(FACTS)
    with (node.home / ".profile").open("a") as file:
        file.write("export SCRATCH=/scratch/there\n")


def clock(text: str) -> float:
    return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))


def test_checks_before_submission_query_slurm_on_the_cluster(node: LoginNode) -> None:
    project(node)
    words = ["--partition", "gpu,nope", "--nodes", "1,2", "--json", "--cluster", "alps"]
    found = json.loads(node.hpcaccel("plan", "project/jobs.yaml", *words, SCRATCH="/scratch/here").stdout)
    assert [(one["job"], one["partition"], one["nodes"], one["start_time"]) for one in found if one["start_time"]] == [
        (job, "gpu", nodes, clock(f"2026-11-21T1{nodes}:00:00")) for job in ("prepare", "train") for nodes in (1, 2)
    ]
    forbidden = [one["problem"] for one in found if one["partition"] == "nope"]
    assert len(forbidden) == 4
    assert all("is not on cluster 'alps'" in problem for problem in forbidden), "the facts of this machine went along"

    live = json.loads(node.hpcaccel("validate", "project/jobs.yaml", "--live", "--json", "--cluster", "alps").stdout)
    assert [(one["name"], one["estimated_start"]) for one in live["jobs"]] == [
        ("prepare", clock("2026-11-21T11:00:00")),
        ("train", clock("2026-11-21T12:00:00")),
    ]
    script = node.hpcaccel("render", "project/jobs.yaml", "--cluster", "alps").stdout
    assert [line for line in script.splitlines() if line.startswith("### job")] == ["### job prepare", "### job train"]
    assert f"{node.runs}/train/RUN_ID" in script
    assert str(node.client) not in script
    assert node.jobs() == []


def test_jobs_of_one_file_are_submitted_once_despite_a_kill(node: LoginNode) -> None:
    project(node)
    (Path(node.env["STAND_IN_QUEUE"]) / "delay").write_text("0.5")
    process = node.start_command("submit", "project/jobs.yaml", "--cluster", "alps", SCRATCH="/scratch/here")
    deadline = time.monotonic() + 120
    while not node.jobs() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()  # both sides are killed during the first job's sbatch
    process.communicate()
    for pid in node.programs():
        os.kill(pid, signal.SIGKILL)
    again = node.hpcaccel("submit", "project/jobs.yaml", "--cluster", "alps", "--json", SCRATCH="/scratch/here")
    assert "already submitted, but the reply was lost" in again.stderr
    jobs = json.loads(again.stdout)["jobs"]
    assert [job["name"] for job in jobs] == ["prepare", "train"]
    assert len(node.jobs()) == 2
    for job in jobs:
        assert "pending" in node.hpcaccel("status", job["name"]).stdout
    prepare, train = (_spec(job) for job in jobs)
    assert train["launch"]["after"] == [{"kind": "afterok", "run": jobs[0]["path"]}]
    assert train["spec"]["entrypoint"]["args"] == {"data": "/scratch/there/data"}
    assert train["launch"]["program"][1] == f"{jobs[1]['path']}/code/src/train.py"
    assert prepare["launch"]["program"] == [f"{jobs[0]['path']}/code/prepare.sh", f"{node.home}/data"]


def _spec(job: dict[str, str]) -> dict[str, Any]:
    found = read_json(Path(job["path"]) / "spec.json")
    assert found is not None
    return found


def test_checkpoint_list_and_sweep_plot_run_on_the_cluster(node: LoginNode) -> None:
    node.project()
    node.hpcaccel("submit", "project/job.yaml", "--cluster", "alps")
    run = next((node.runs / "toy").iterdir())
    assert f"no checkpoints in {run}/checkpoints" in node.hpcaccel("checkpoint", "list", "toy").stderr
    refused = node.hpcaccel("sweep", "plot", "toy", "-o", "toy.html", code=2)
    assert f"{run.name} (toy) is a run, not a sweep" in refused.stderr
    assert not (node.client / "toy.html").exists()
