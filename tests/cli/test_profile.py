"""``hpcaccel profile --no-wait``: the request is left for the ranks, and the command ends."""

from __future__ import annotations

import json
from pathlib import Path

from hpcaccel.core.run_dir import RunDir
from tests.cluster.scenario import Scenario


def test_request_is_left_for_the_ranks(tmp_path: Path) -> None:
    scenario = Scenario(None, tmp_path)
    (tmp_path / "hold").touch()
    program = f"echo begins; while [ -e {tmp_path}/hold ]; do sleep 0.05; done"
    slurm = {"nodes": 1, "gpus_per_node": 0, "ntasks_per_node": 1, "mem": None}
    sections = {"slurm": slurm, "code": {"copy": False}, "runtime": {"stop": "cooperative"}}
    scenario.submit({"entrypoint": {"command": ["bash", "-c", program]}, **sections})
    scenario.wait_for_word("begins")
    said = scenario.cli("profile", scenario.dir.run_id, "--no-wait", "--steps=7").stdout
    assert said.strip().endswith(str(scenario.dir.attempt(1) / "profiles"))
    request = json.loads((RunDir(scenario.dir.path).control / "profile").read_text())
    assert (request["steps"], request["ranks"], request["attempt"]) == (7, [0], 1)
    again = json.loads(scenario.cli("profile", scenario.dir.run_id, "--no-wait", "--steps=7", "--json").stdout)
    assert again == {"run_id": scenario.dir.run_id, "attempt": 1, "traces": []}
    (tmp_path / "hold").unlink()
    scenario.wait_for_ends(1)
