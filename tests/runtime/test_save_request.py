"""``hpcaccel save``: all ranks save at one step and go on, with an Accelerator, a stop gate or a bridge."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from hpcaccel import checkpoint_files
from tests.cluster.dev_cluster import wait_until
from tests.cluster.scenario import PROGRAMS as CLUSTER_PROGRAMS
from tests.cluster.scenario import Scenario

PROGRAMS = Path(__file__).parent / "programs"
SLURM = {"nodes": 1, "gpus_per_node": 0, "ntasks_per_node": 2, "mem": None}

pytestmark = pytest.mark.torch


def submitted(tmp_path: Path, **sections: Any) -> Scenario:
    scenario = Scenario(None, tmp_path)
    scenario.env["HPCACCEL_HEARTBEAT_SECONDS"] = "0.2"
    scenario.submit({"slurm": SLURM, **sections})
    return scenario


def open_requests(scenario: Scenario) -> list[str]:
    return [path.name for path in scenario.dir.control.glob("save-*")]


def test_stop_gate_saves_at_one_step_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    words = ["--folder", str(tmp_path / "saved"), "--pause", "0.05", "--steps", "200"]
    scenario = submitted(tmp_path, entrypoint={"script": str(PROGRAMS / "gate.py"), "args": words})
    scenario.wait_for_word("training")
    scenario.cli("save", scenario.dir.run_id)
    said = scenario.wait_for_word("asked to save at")
    assert scenario.wait_for_word("asked to save at", rank=1) == said
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("completed", "end")], scenario.story
    assert [path.stem for path in (tmp_path / "saved").iterdir()] == [said.rpartition(" ")[2]]
    assert open_requests(scenario) == []
    assert "there is nothing to save" in scenario.cli("save", scenario.dir.run_id, check=False).stderr


def test_accelerator_saves_once_and_goes_on(tmp_path: Path) -> None:
    scenario = submitted(
        tmp_path,
        entrypoint={"script": str(CLUSTER_PROGRAMS / "train.py"), "args": ["--pause", "0.2", "--epochs", "2"]},
        checkpoint={"every_minutes": 60},
    )
    scenario.wait_for_step(2)
    scenario.cli("save", scenario.dir.run_id)
    first = scenario.wait_for_checkpoint()
    wait_until(lambda: open_requests(scenario) == [], "the request is marked")
    time.sleep(1)
    assert [found.step for found in checkpoint_files.committed(scenario.dir.checkpoints)] == [first]
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("completed", "end")], scenario.story


def test_program_that_saves_by_itself_is_refused(tmp_path: Path) -> None:
    scenario = submitted(tmp_path, entrypoint={"command": ["bash", "-c", "sleep 30"]})
    wait_until(lambda: scenario.status()["state"] == "running", "the run starts")
    refused = scenario.cli("save", scenario.dir.run_id, check=False)
    assert refused.returncode == 2
    assert "its program decides when to save" in refused.stderr
    scenario.cli("cancel", scenario.dir.run_id)
