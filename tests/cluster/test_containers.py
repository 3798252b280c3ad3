"""Ranks in containers on a real Slurm, with a stand-in for Apptainer: preemption."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.containers.conftest import STAND_IN, make_apptainer, make_image, system_python_is_ours

from .dev_cluster import Cluster
from .scenario import Scenario

Lease = Callable[[int], list[str]]


@pytest.fixture
def scenario(cluster: Cluster, lease: Lease, tmp_path: Path) -> Scenario:
    if shutil.which("bwrap") is None or not system_python_is_ours():
        pytest.skip("needs bubblewrap, and a system Python of this version")
    assert STAND_IN.exists()
    return Scenario(cluster, tmp_path, nodes=lease(2))


def contained(folder: Path, **sections: Any) -> dict[str, Any]:
    """Sections of a spec with an image to import and data to stage."""
    make_image(folder)
    programs = make_apptainer(folder)
    (folder / "data").mkdir()
    (folder / "data/shard").write_text("staged")
    export = [
        f"export PATH={programs}:$PATH STAND_IN_LOG={folder}/pulled STAND_IN_LIBRARIES={folder}/libraries",
    ]
    return {
        "container": {"image": "docker://torch/without:hpcaccel", "runtime": "apptainer"},
        "environment": {"setup": export},
        "stage": {"sources": [str(folder / "data")], "directory": str(folder / "disk")},
        **sections,
    }


@pytest.mark.chaos
@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_preempted_run_in_a_container_loses_no_step(scenario: Scenario, launcher: str) -> None:
    one_rank_a_node = {"gpus_per_node": 1}
    scenario.train("--pause", "0.25", **contained(scenario.folder, launcher=launcher, slurm=one_rank_a_node))
    scenario.wait_for_step(8)
    assert [path.name for path in (scenario.folder / "disk").glob("*/data/shard")] == ["shard"]
    scenario.preempt()
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("preempted", "requeue"), ("completed", "end")], scenario.story
    assert scenario.status()["steps_lost"] == 0
    assert (scenario.folder / "pulled").read_text() == "pull docker://torch/without:hpcaccel\n", "once, not per node"
    assert not list((scenario.folder / "disk").iterdir()), "what was staged is removed"
