"""``runtime.bridge: transformers``: a script that does not mention hpcaccel stops, saves and resumes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.scenario import Scenario

pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).parent / "programs" / "plain_transformers.py"


def test_script_without_a_changed_line_stops_and_continues_at_the_same_step(tmp_path: Path) -> None:
    scenario = Scenario(None, tmp_path)
    scenario.submit(
        {
            "entrypoint": {"script": str(PROGRAM), "args": ["{run_dir}/out"]},
            "runtime": {"bridge": "transformers"},
            "checkpoint": {"watch": {"preset": "transformers", "directory": "{run_dir}/out"}},
            "slurm": {"nodes": 1, "gpus_per_node": 0, "ntasks_per_node": 2, "mem": None},
        }
    )
    scenario.wait_for_step(3)
    scenario.cli("stop", "--requeue", scenario.dir.run_id)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("stop", "requeue"), ("completed", "end")], scenario.story
    first, second = scenario.lines("end")
    assert second["resumed_step"] == first["last_step"] == first["checkpoint_step"] > 0
    assert first["checkpoint"] == f"{scenario.dir.path}/out/checkpoint-{first['last_step']}"
    assert scenario.wait_for_word("trained to step", attempt=2) == "trained to step 60"
    assert scenario.status()["steps_lost"] == 0
    assert set(scenario.losses) == set(range(1, 61))
