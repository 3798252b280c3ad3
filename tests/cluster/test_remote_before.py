"""``plan``, live checks and ``submit`` over SSH to a real Slurm, with the facts stored on this machine."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.core.durable_files import read_lines
from hpcaccel.core.run_dir import RunDir
from tests.remote.login_node import LoginNode, why_no_sshd

from .dev_cluster import Cluster

JOBS = """\
slurm: {{partition: gpu, time: 5, nodelist: {node}, mem: 200M}}
environment: {{python: {python}}}
runtime: {{stop: signals}}
jobs:
  second: {{entrypoint: {{script: second.py, args: {{place: '${{env:PLACE}}'}}}}, after: [first]}}
  first: {{entrypoint: {{command: [sleep, '2']}}}}
"""


@pytest.mark.chaos
def test_file_with_several_jobs_is_planned_and_submitted_over_ssh(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path
) -> None:
    if (reason := why_no_sshd()) is not None:
        pytest.skip(f"no login node: {reason}")
    (name,) = lease(1)
    env = {"SLURM_CONF": cluster.env["SLURM_CONF"], "PLACE": "/there"}
    node = LoginNode(tmp_path / "login", path=cluster.login_path, env=env)
    node.start()
    try:
        _the_way(node, name)
    finally:
        node.stop()


def _the_way(node: LoginNode, name: str) -> None:
    folder = node.project(files={"jobs.yaml": JOBS.format(node=name, python=sys.executable).encode()}).parent
    (folder / "second.py").write_text("import sys\nprint(*sys.argv[1:], flush=True)\n")
    node.hpcaccel("cluster", "add", "dev", "--host", "alps", "--set", "runs_dir=~/runs")
    on_dev = ["--cluster", "dev"]
    file = str(folder / "jobs.yaml")
    before = time.time()
    planned = json.loads(node.hpcaccel("plan", file, "--partition", "gpu,nope", "--json", *on_dev).stdout)
    assert [(one["job"], one["partition"]) for one in planned if one["start_time"]] == [
        ("first", "gpu"),
        ("second", "gpu"),
    ]
    assert all("is not on cluster 'dev'" in one["problem"] for one in planned if one["partition"] == "nope")
    live = json.loads(node.hpcaccel("validate", file, "--live", "--json", *on_dev).stdout)
    assert all(one["estimated_start"] > before - 3600 for one in live["jobs"])
    refused = node.hpcaccel("validate", file, "--live", "second.slurm.licenses=none-of-these:3", *on_dev, code=2)
    assert "icense" in refused.stderr, "the controller's own word"

    said = json.loads(node.hpcaccel("submit", file, "--json", *on_dev).stdout)["jobs"]
    first, second = (RunDir(job["path"]) for job in said)
    assert "completed" in node.hpcaccel("wait", "second").stdout
    assert second.rank_log(1, 0).read_text() == "--place /there\n"
    ends = {run.run_id: [line for line, _ in read_lines(run.ledger)] for run in (first, second)}
    assert ends[second.run_id][0]["time"] >= ends[first.run_id][-1]["time"], "one after the other"
