"""``sharing: group`` on a real Slurm: three users, two of them of one group, and their own jobs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcaccel.core.run_dir import RunDir

from ..cli.conftest import ROOT
from ..cli.test_sharing import LOOP, User, python, team, users  # noqa: F401 - fixtures
from .dev_cluster import Cluster, wait_until


@pytest.mark.chaos
@pytest.mark.torch
def test_colleague_looks_stops_and_continues_in_a_job_of_the_own(
    cluster: Cluster,
    lease: Callable[[int], list[str]],
    users: dict[str, User],  # noqa: F811
    team: Path,  # noqa: F811
) -> None:
    alice, bob, eve = users.values()
    for user in users.values():
        user.more = {
            "PATH": cluster.login_path, "SLURM_CONF": cluster.env["SLURM_CONF"], "HPCACCEL_QUEUE_SECONDS": "0",
        }  # fmt: skip
    shutil.chown(team, group=bob.group)
    team.chmod(0o2770)
    project = alice.home / "project"
    project.mkdir()
    hold = team / "hold"
    hold.touch()
    (project / "train.py").write_text(LOOP.replace("HOLD", str(hold)))
    (project / "helper.py").write_text("FIRST = 1\n")
    site = ":".join(path for path in sys.path if path.endswith("site-packages"))
    values = {
        "name": "shared", "entrypoint": {"script": "train.py"}, "sharing": "group", "checkpoint": {"every_steps": 5},
        "slurm": {
            "partition": "gpu", "nodes": 1, "gpus_per_node": 1, "cpus_per_task": 1, "mem": "2G", "time": 10,
            "nodelist": lease(1)[0],
        },
        "environment": {"python": alice.python, "env": {"PYTHONPATH": f"{ROOT}:{site}"}},
    }  # fmt: skip
    (project / "job.yaml").write_text(json.dumps(values))
    for path in (project, *project.iterdir()):
        shutil.chown(path, alice.name, alice.name)
    made = json.loads(alice("submit", str(project / "job.yaml"), "--runs-dir", str(team / "runs"), "--json").stdout)
    run, name = RunDir(made["path"]), made["path"]
    assert cluster.job(made["job_id"])["UserId"].startswith(f"{alice.name}(")

    wait_until(lambda: any(run.checkpoints.glob("step_*/COMMITTED")), "the first checkpoint", timeout_seconds=400)
    assert json.loads(bob("status", name, "--json").stdout)["state"] == "running"
    assert "started at 0" in bob("logs", name).stdout
    bob("save", name)
    for command in ("status", "logs", "stop", "cancel", "resume"):
        assert eve(command, name, code=2).stdout == "", command
    assert "stop it first" in bob("resume", name, code=2).stderr
    bob("stop", name)
    assert alice("wait", name, code=None).returncode == 85

    hold.unlink()
    own = json.loads(bob("resume", name, "--json").stdout)
    assert own["run_id"] != run.run_id
    assert cluster.job(own["job_id"])["UserId"].startswith(f"{bob.name}(")
    bob("wait", own["run_id"])
    said = bob("logs", own["run_id"]).stdout
    assert "started at" in said
    assert "started at 0" not in said
    alice("resume", name)
    assert alice("wait", name, code=None).returncode == 0
