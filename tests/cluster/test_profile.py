"""The profiler of a training on a real Slurm: of ranks on two nodes, and from a laptop, over SSH."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from hpcaccel import Client
from tests.remote.login_node import LoginNode

from .dev_cluster import Cluster, wait_until
from .scenario import PROGRAMS, Scenario


def steps_of(trace: bytes) -> int:
    """Number of training steps in a trace."""
    events = json.loads(gzip.decompress(trace))["traceEvents"]
    return sum(str(event.get("name", "")).startswith("training step") for event in events)


@pytest.mark.chaos
@pytest.mark.torch
def test_ranks_of_both_nodes_record_their_next_steps(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path
) -> None:
    run = Scenario(cluster, tmp_path, nodes=lease(2))
    run.env["HPCACCEL_HEARTBEAT_SECONDS"] = "1"
    run.train("--epochs", "1000", "--pause", "0.1")
    run.wait_for_step(5)
    said = run.cli("profile", run.dir.run_id, "--steps", "3", "--rank", "0", "--rank", "3").stdout
    traces = sorted(run.dir.attempt(1).joinpath("profiles").glob("*.json.gz"))
    # A rank begins at its own next step: on a busy machine they differ.
    assert sorted(path.name.rpartition("-")[2] for path in traces) == ["rank0.json.gz", "rank3.json.gz"]
    assert all(str(path) in said for path in traces)
    assert [steps_of(path.read_bytes()) for path in traces] == [3, 3]
    run.wait_for_step(60)  # the training goes on
    run.cli("cancel", run.dir.run_id)


@pytest.mark.chaos
@pytest.mark.torch
def test_a_laptop_asks_for_a_trace_and_downloads_it(
    login: LoginNode, lease: Callable[[int], list[str]], tmp_path: Path
) -> None:
    (name,) = lease(1)
    spec = {
        "name": "profiled",
        "entrypoint": {"script": str(PROGRAMS / "train.py"), "args": ["--epochs", "1000", "--pause", "0.1"]},
        "environment": {"python": sys.executable},
        "slurm": {"partition": "gpu", "nodelist": name, "gpus_per_node": 1, "mem": "4G", "time": 10},
    }
    socket = tmp_path / "service"
    words = [sys.executable, "-m", "hpcaccel", "serve", "--socket", str(socket), "--no-browser"]
    service = subprocess.Popen(
        words, cwd=login.client, env=login.environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert service.stdout is not None
        service.stdout.readline()
        with Client(socket=socket) as client:
            run_id = client.submit(yaml.safe_dump(spec), cluster="alps").run_id

            def progresses() -> bool:
                return (client.run(run_id).step or 0) > 5

            def traced() -> bool:
                return any(one["name"] for one in client.profiles(run_id))

            wait_until(progresses, "step 6", timeout_seconds=300)
            client.profile(run_id, 3)
            wait_until(traced, "a trace", timeout_seconds=300)
            (found,) = client.profiles(run_id)
            trace = client.trace(run_id, found["name"])
            client.cancel(run_id)
    finally:
        service.terminate()
        service.communicate(timeout=60)
    assert steps_of(trace) == 3
