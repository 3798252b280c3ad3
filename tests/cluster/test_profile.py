"""``hpcaccel profile`` on a real Slurm, of ranks on two nodes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from .dev_cluster import Cluster
from .scenario import Scenario


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
    for path in traces:
        with gzip.open(path, "rt") as file:
            events = json.load(file)["traceEvents"]
        assert sum(str(event.get("name", "")).startswith("training step") for event in events) == 3
    run.wait_for_step(60)  # the training goes on
    run.cli("cancel", run.dir.run_id)
