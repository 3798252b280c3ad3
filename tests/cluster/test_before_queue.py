"""``plan``, live checks, ``explain``, and ``run`` inside an allocation, on a real Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from .dev_cluster import Cluster, wait_until
from .scenario import Scenario

Lease = Callable[[int], list[str]]

SAYS = """\
import os, signal, sys, time
names = ("RANK", "WORLD_SIZE", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "SLURMD_NODENAME")
print(*(os.environ[name] for name in names), flush=True)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(85))
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def run(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=lease(2))


def write(run: Scenario, *arguments: str, name: str = "early", **slurm: Any) -> str:
    (run.folder / "says.py").write_text(SAYS)
    values = {
        "name": name,
        "entrypoint": {"script": str(run.folder / "says.py"), "args": list(arguments)},
        "environment": {"python": sys.executable},
        "runtime": {"stop": "signals"},
        "slurm": {
            "partition": "gpu",
            "nodes": 2,
            "gpus_per_node": 2,
            "cpus_per_task": 1,
            "mem": "1G",
            "time": 30,
            **slurm,
        },
    }
    path = run.folder / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def test_plan_and_live_checks_show_the_expected_start_and_submit_nothing(cluster: Cluster, run: Scenario) -> None:
    spec = write(run, name="only_asked_about")
    found = json.loads(run.cli("plan", spec, "--partition", "gpu,urgent,nope", "--nodes", "1,2,500", "--json").stdout)
    good = {(one["partition"], one["nodes"]): one for one in found if not one["problem"]}
    assert set(good) == {("gpu", 1), ("gpu", 2), ("urgent", 1), ("urgent", 2)}
    assert all(abs(one["start_time"] - time.time()) < 86400 for one in good.values())
    assert (good["gpu", 2]["gpus"], good["gpu", 2]["gpu_hours"]) == (4, 2.0)
    assert len(found) == 9
    assert any("nope" in one["problem"] for one in found)
    table = run.cli("plan", spec, "--nodes", "1,2").stdout
    assert "GPU-HOURS" in table
    assert len(table.splitlines()) == 3
    assert "expects to start it" in run.cli("validate", spec, "--live").stdout
    refused = run.cli("validate", spec, "--live", "slurm.gpus_per_node=64", check=False)
    assert refused.returncode == 2
    assert "Slurm refused the job" in refused.stderr
    assert "expects to start it" in run.cli("submit", spec, "--live", "--dry-run").stderr
    assert not cluster.run("squeue", "--noheader", "--name=only_asked_about").stdout, "nothing was submitted"


def test_explain_shows_why_a_run_waits_and_the_jobs_before_it(cluster: Cluster, run: Scenario) -> None:
    nodes = ",".join(run.nodes)
    busy = ["--partition=gpu", "--nodes=2", f"--nodelist={nodes}", "--exclusive", "--time=20", "--output=/dev/null"]
    first = cluster.sbatch(*busy, "--wrap=sleep 600")
    cluster.wait_for(first, ["RUNNING"])
    second = cluster.sbatch(*busy, "--wrap=sleep 600")
    run.plain("1", slurm={"nodes": 2, "time": 5})

    def explained() -> dict[str, Any]:
        said: dict[str, Any] = json.loads(run.cli("explain", run.dir.run_id, "--json").stdout)
        return said

    wait_until(lambda: explained()["why"][0]["reason"] != "None", "a reason to wait")
    assert "Slurm gives no further details" not in explained()["why"][0]["words"], explained()
    wait_until(lambda: explained()["start_time"] is not None, "an estimate")
    assert second in [one["job_id"] for one in explained()["before"]]
    text = run.cli("explain", run.dir.run_id).stdout
    assert "expected start: " in text
    assert f"{second} of " in text
    cluster.run("scontrol", "uhold", run.job_id)
    wait_until(lambda: "scontrol release" in run.cli("explain", run.dir.run_id).stdout, "held")
    run.cli("cancel", run.dir.run_id)
    assert "is cancelled" in run.cli("explain", run.dir.run_id).stdout


def allocated(run: Scenario, *words: str, first: tuple[str, ...] = ()) -> list[str]:
    """Command line of ``hpcaccel run`` inside an allocation of the leased nodes."""
    salloc = ["salloc", "--quiet", "--partition=gpu", "--nodes=2", f"--nodelist={','.join(run.nodes)}", "--time=10"]
    resources = ["--ntasks-per-node=2", "--gpus-per-node=2", "--mem=1G"]
    return [*salloc, *resources, *first, sys.executable, "-m", "hpcaccel", "run", *words]


def test_run_uses_the_nodes_of_the_allocation(run: Scenario) -> None:
    spec = write(run, "0", nodes=1, partition="urgent")
    answer = subprocess.run(
        allocated(run, spec), env=run.env, cwd=run.folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert answer.returncode == 0, answer.stderr + answer.stdout
    status = json.loads(run.cli("status", "early", "--json").stdout)
    assert status["state"] == "completed"
    # the allocation's two nodes, not the spec's one; stdout has the output of rank 0
    job = status["job_id"]
    assert f"0 4 {job} 2 {run.nodes[0]}" in answer.stdout
    log = Path(status["path"]) / "attempts" / "1" / "3.log"
    assert log.read_text().split() == ["3", "4", job, "2", run.nodes[1]]


def test_ctrl_c_in_an_allocation_pauses_the_run(run: Scenario) -> None:
    spec = write(run, "600")
    child = subprocess.Popen(
        # salloc starts its command in its own process group, which gets a terminal's Ctrl-C
        allocated(run, spec, first=("bash", "-c", 'echo "group $$"; exec "$@"', "bash")),
        env=run.env, cwd=run.folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    lines = []
    for line in child.stdout:
        lines.append(line)
        if line.startswith("0 4 "):
            break
    assert lines[-1].startswith("0 4 "), lines
    group = next(line for line in lines if line.startswith("group "))
    os.killpg(int(group.split()[1]), signal.SIGINT)
    rest = child.communicate(timeout=300)[0]
    assert child.returncode == 85, "".join(lines) + rest
    assert json.loads(run.cli("status", "early", "--json").stdout)["state"] == "paused"


def test_run_without_an_allocation_is_refused_with_the_salloc_command(run: Scenario) -> None:
    refused = run.cli("run", write(run, "0"), check=False)
    assert refused.returncode == 2
    assert "salloc --nodes" in refused.stderr
