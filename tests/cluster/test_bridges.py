"""Other trainers with their bridge, on 2 nodes x 2 ranks: three preemptions and a time limit lose no step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .dev_cluster import Cluster
from .scenario import Scenario

PROGRAMS = Path(__file__).parents[1] / "integrations" / "programs"

pytestmark = [pytest.mark.torch, pytest.mark.chaos]

BRIDGES: dict[str, dict[str, Any]] = {
    "transformers": {
        "entrypoint": {
            "script": str(PROGRAMS / "train_transformers.py"),
            "args": {"output_dir": "{run_dir}/out", "steps": 300, "pause": 0.5, "workers": 1},
        },
        "checkpoint": {"watch": "transformers"},
    },
    "lightning": {
        "entrypoint": {
            "script": str(PROGRAMS / "train_lightning.py"),
            "args": {"root": "{run_dir}/out", "steps": 300, "pause": 0.5, "workers": 1},
        },
        "checkpoint": {"watch": {"preset": "lightning", "directory": "{run_dir}/out"}},
    },
    "lightning.fabric": {
        "entrypoint": {
            "script": str(PROGRAMS / "train_fabric.py"),
            "args": {"output_dir": "{run_dir}/out", "steps": 300, "pause": 0.5, "workers": 1},
        },
        "checkpoint": {"watch": {"preset": "lightning", "directory": "{run_dir}/out"}},
    },
    "accelerate": {
        "entrypoint": {
            "script": str(PROGRAMS / "train_accelerate.py"),
            "args": {"output_dir": "{run_dir}/out", "steps": 300, "pause": 0.5, "workers": 1},
        },
        "checkpoint": {"watch": {"glob": "{run_dir}/out/checkpoint-*", "complete": "hpcaccel_step.json"}},
    },
    "torchtitan": {  # installed by `make trainers` only
        "entrypoint": {
            "script": str(PROGRAMS / "train_torchtitan.py"),
            "args": {
                "dump_folder": "{run_dir}/out",
                "training.steps": 300,
                "pause": 0.5,
                "dataloader.num_workers": 1,
            },
        },
        "checkpoint": {"watch": "torchtitan"},
    },
}


@pytest.mark.parametrize("name", BRIDGES)
def test_three_preemptions_and_a_time_limit_lose_no_step(
    cluster: Cluster, lease: Callable[[int], list[str]], tmp_path: Path, name: str
) -> None:
    pytest.importorskip(name)
    scenario = Scenario(cluster, tmp_path, nodes=lease(2))
    scenario.submit({**BRIDGES[name], "slurm": {"time": 3}, "resilience": {"warning_seconds": 30}})
    step = 0
    for attempt in (1, 2, 3):
        step += 3
        scenario.wait_for_step(step, attempt=attempt)
        scenario.preempt()
        scenario.wait_for_ends(attempt)
        step = scenario.lines("end")[-1]["last_step"]
    scenario.wait_for_ends(5)  # longer than one call of `hpcaccel wait` may take in a test
    assert scenario.wait_until_over() == 0, scenario.story
    reasons = [reason for reason, _ in scenario.ends]
    assert reasons[:3] == ["preempted"] * 3, scenario.story
    assert reasons[3:-1] == ["time_limit"] * (len(reasons) - 4) != [], scenario.story
    assert scenario.ends[-1] == ("completed", "end"), scenario.story
    ends = scenario.lines("end")
    assert [line["resumed_step"] for line in ends] == [0, *(line["last_step"] for line in ends[:-1])], scenario.story
    assert ends[-1]["last_step"] == 300
    status = scenario.status()
    assert (status["steps_lost"], status["total_steps"]) == (0, 300)
    for line in ends[:-1]:
        assert line["checkpoint_step"] == line["last_step"]
        assert scenario.dir.path / "out" in Path(line["checkpoint"]).parents
    assert set(scenario.losses) == set(range(1, 301))
