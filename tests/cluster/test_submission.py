"""Submitting to a real Slurm: functions and their results, arrays, jobs from inside a job, refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.errors import ClusterError, RunFailed
from hpcaccel.submission import Run, RunArray, all_runs, find_run
from hpcaccel.submission.submit.api import submit

from .dev_cluster import Cluster, wait_until

Lease = Callable[[int], list[str]]

MODULE = """\
import os

def whoami(factor):
    return factor * int(os.environ["RANK"]), os.environ["WORLD_SIZE"], os.environ["SLURM_JOB_NUM_NODES"]

def fail():
    raise ValueError("unlucky")
"""


@pytest.fixture
def here(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the cluster in the environment."""
    for name, value in {**cluster.env, "XDG_STATE_HOME": str(tmp_path / "state")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def work(here: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import importlib

    (here / "cluster_work.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(here))
    yield importlib.import_module("cluster_work")
    del sys.modules["cluster_work"]


def spec(nodes: list[str], **sections: Any) -> dict[str, Any]:
    slurm = {"partition": "gpu", "nodes": 1, "ntasks_per_node": 1, "mem": "1G", "time": 5, "nodelist": ",".join(nodes)}
    return {"name": "submitted", "slurm": {**slurm, **sections.pop("slurm", {})}, **sections}


def test_submitted_function_returns_its_result(work: Any, lease: Lease) -> None:
    run = submit(work.whoami, 10, spec=spec(lease(2), slurm={"nodes": 2, "ntasks_per_node": 2}))
    assert isinstance(run, Run)
    assert run.result(120) == (0, "4", "2")
    assert [value for value, _, _ in run.job.results()] == [0, 10, 20, 30]


def test_error_of_a_submitted_function_is_raised(work: Any, lease: Lease) -> None:
    run = submit(work.fail, spec=spec(lease(1), resilience={"restart_in_place": 0, "requeue": False}))
    assert isinstance(run, Run)
    with pytest.raises(RunFailed, match="ValueError: unlucky"):
        run.result(120)


def test_array_of_functions_returns_all_results(work: Any, lease: Lease) -> None:
    array = submit(work.whoami, 1, spec=spec(lease(1)), grid=["runtime.seed=1,2,3"])
    assert isinstance(array, RunArray)
    assert array.results(120) == [(0, "1", "1")] * 3
    assert [job.job_id for job in array.jobs] == [f"{array.job_id}_{index}" for index in range(3)]


def test_resume_of_an_array_submits_only_its_failed_task(cluster: Cluster, here: Path, lease: Lease) -> None:
    (here / "odd.py").write_text("import os, sys\nsys.exit(sys.argv[2] == '2' and not os.path.exists('mended'))\n")
    sections: dict[str, Any] = {
        "entrypoint": {"script": "odd.py", "args": {"x": 0}},
        "environment": {"python": sys.executable},
        "runtime": {"stop": "signals"},
        "resilience": {"restart_in_place": 0, "requeue": False},
    }
    array = submit(_file(here, spec(lease(1), **sections)), grid=["args.x=1,2"])
    assert isinstance(array, RunArray)
    assert [task.state for task in array.wait(120).tasks] == ["completed", "failed"]
    (here / "mended").write_text("")
    first = array.job_id
    array.resume()
    assert array.wait(120).state == "completed"
    assert [run.record.job_ids for run in array] == [[f"{first}_0"], [f"{first}_1", f"{array.job_id}_1"]]
    assert "ArrayTaskId=0" not in cluster.run("scontrol", "--oneliner", "show", "job", array.job_id).stdout


def test_pending_run_is_stopped_resumed_and_cancelled(cluster: Cluster, here: Path, lease: Lease) -> None:
    run = submit(_file(here, spec(lease(1), entrypoint={"command": ["true"]}, slurm={"begin": "now+1hour"})))
    assert run.status().state == "pending"
    run.stop()
    assert cluster.job(run.job_id)["JobState"] == "CANCELLED"
    assert run.status().state == "paused"
    run.resume()
    assert run.status().state == "pending"
    run.cancel()
    wait_until(lambda: run.status().state == "cancelled", "cancelled")


def test_job_submitted_inside_a_job_has_its_own_resources(cluster: Cluster, here: Path, lease: Lease) -> None:
    nodes = lease(2)
    path = _file(here, spec(nodes[:1], name="inner", entrypoint={"command": ["env"]}))
    log = here / "outer.log"
    code = f"import hpcaccel; hpcaccel.submit({path!r})"
    outer = cluster.sbatch(
        "--partition=gpu", "--nodes=2", f"--nodelist={','.join(nodes)}", "--ntasks-per-node=2", "--gpus-per-node=2",
        "--mem=1G", "--time=5", f"--output={log}", f"--chdir={here}", f'--wrap={sys.executable} -c "{code}"',
    )  # fmt: skip
    cluster.wait_for(outer, ["COMPLETED"])
    run = find_run("inner")
    assert isinstance(run, Run)
    assert run.wait(120).state == "completed"
    environment = dict(line.split("=", 1) for line in run.log().read_text().splitlines() if "=" in line)
    assert (environment["SLURM_JOB_NUM_NODES"], environment["SLURM_NTASKS"]) == ("1", "1")
    assert "SLURM_JOB_GPUS" not in environment


def test_job_refused_by_slurm_leaves_no_run(here: Path) -> None:
    path = _file(here, spec([], entrypoint={"command": ["true"]}, slurm={"partition": "nope", "nodelist": None}))
    before = sorted(here.rglob("*"))
    with pytest.raises(ClusterError, match="nope"):
        submit(path)
    assert sorted(path for path in here.rglob("*") if here / "state" not in (path, *path.parents)) == before
    assert [path.name for path in (here / "state").rglob("*") if path.is_file()] == ["runs.jsonl"]
    assert all_runs() == []


def _file(here: Path, values: dict[str, Any]) -> str:
    import yaml

    path = here / "job.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)
