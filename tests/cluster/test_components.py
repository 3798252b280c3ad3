"""Heterogeneous jobs on a real Slurm: ranks on one node and a component on another, requeued together."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .dev_cluster import Cluster
from .scenario import Scenario

Lease = Callable[[int], list[str]]

SERVE = """
import os, time
gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "no")
print("serving on", os.environ["HPCACCEL_NODES_DATA"], "to", os.environ["HPCACCEL_NODES"], gpus, "GPUs", flush=True)
try:
    time.sleep(600)
except KeyboardInterrupt:
    print("the ranks have ended", flush=True)
"""


@pytest.fixture
def nodes(lease: Lease) -> list[str]:
    return lease(2)


@pytest.fixture
def scenario(cluster: Cluster, nodes: list[str], tmp_path: Path) -> Scenario:
    return Scenario(cluster, tmp_path, nodes=nodes[:1])


def beside(scenario: Scenario, node: str, program: str = SERVE) -> dict[str, Any]:
    script = scenario.folder / "serve.py"
    script.write_text(program)
    entrypoint = {"command": [sys.executable, str(script)]}
    return {"data": {"entrypoint": entrypoint, "slurm": {"nodelist": node, "mem": "300M", "cpus_per_task": 2}}}


def logs(scenario: Scenario, attempt: int) -> str:
    return (scenario.dir.attempt(attempt) / "data-0.log").read_text()


@pytest.mark.chaos
@pytest.mark.parametrize("partition", ["gpu", "gpu0"])
def test_preemption_of_the_component_node_loses_no_step(scenario: Scenario, nodes: list[str], partition: str) -> None:
    slurm = {"nodes": 1, "partition": partition}
    scenario.train("--epochs", "3", "--pause", "1", slurm=slurm, components=beside(scenario, nodes[1]))
    scenario.wait_for_step(5)
    scenario.preempt(nodes[1:])
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    first = scenario.lines("end")[0]
    assert first["checkpoint_step"] == first["last_step"] >= 5, scenario.story
    for attempt in (1, 2):
        assert f"serving on {nodes[1]} to {nodes[0]} no GPUs" in logs(scenario, attempt), scenario.story
    # The run is over when its last ledger line is written; components are ended right after that.
    scenario._wait(lambda: "the ranks have ended" in logs(scenario, 2), "the end of the component")
    if partition == "gpu":  # without grace time Slurm ends the rest of the job by itself
        assert "the ranks have ended" in logs(scenario, 1), scenario.story
    for attempt in (1, 2):
        names = {path.name for path in scenario.dir.attempt(attempt).glob("*.log")}
        assert names == {"0.log", "1.log", "data-0.log", "data.srun.log", "supervisor.log"}, scenario.story
        for rank in (0, 1):
            scenario.wait_for_word("ready", attempt=attempt, rank=rank)
    shown = scenario.cli("logs", scenario.dir.run_id, "--rank", "data").stdout
    assert f"[data-0] serving on {nodes[1]}" in shown


def test_plan_and_validate_include_the_nodes_of_components(scenario: Scenario, nodes: list[str]) -> None:
    scenario.env["XDG_CONFIG_HOME"] = str(scenario.folder / "config")
    scenario.cli("cluster", "add", "here")
    path = scenario.folder / "job.yaml"
    path.write_text(json.dumps(_job(beside(scenario, nodes[1]))))
    table = json.loads(scenario.cli("plan", str(path), "--json", "--cluster", "here").stdout)
    assert [(row["nodes"], row["gpus"], bool(row["start_time"])) for row in table] == [(2, 2, True)]
    data = beside(scenario, nodes[1])
    data["data"]["slurm"]["nodes"] = 40
    data["data"]["slurm"].pop("nodelist")
    path.write_text(json.dumps(_job(data)))
    refused = scenario.cli("validate", str(path), "--cluster", "here", check=False)
    assert refused.returncode == 2
    assert "components.data.slurm.nodes" in refused.stderr + refused.stdout


def _job(components: dict[str, Any]) -> dict[str, Any]:
    slurm = {"partition": "gpu", "nodes": 1, "gpus_per_node": 2, "mem": "1G", "time": 5}
    return {"name": "beside", "entrypoint": {"command": ["true"]}, "slurm": slurm, "components": components}


@pytest.mark.chaos
def test_failed_component_fails_the_attempt(scenario: Scenario, nodes: list[str]) -> None:
    fails = (
        f"import os, time\nif not os.path.exists({str(scenario.folder / 'again')!r}):\n"
        f"    open({str(scenario.folder / 'again')!r}, 'w').close(); time.sleep(10); raise SystemExit('no more data')\n"
    )
    scenario.train(
        "--epochs", "3", "--pause", "1", slurm={"nodes": 1}, components=beside(scenario, nodes[1], fails + SERVE)
    )
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("failed", "restart"), ("completed", "end")], scenario.story
    assert scenario.lines("end")[0]["detail"] == "component data exited with code 1: no more data", scenario.story


@pytest.mark.chaos
def test_cancelled_run_with_a_component_is_resumed(cluster: Cluster, scenario: Scenario, nodes: list[str]) -> None:
    scenario.train("--epochs", "3", "--pause", "1", slurm={"nodes": 1}, components=beside(scenario, nodes[1]))
    scenario.wait_for_step(5)
    scenario.cli("cancel", scenario.dir.run_id)
    assert scenario.wait_until_over() == 130, scenario.story
    scenario.cli("resume", scenario.dir.run_id)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("cancelled", "end"), ("completed", "end")], scenario.story
    assert scenario.lines("start")[1]["checkpoint_step"] == scenario.lines("end")[0]["last_step"], scenario.story
