"""A rendered script on a real Slurm: what sbatch accepts, what Slurm stores, and what the batch step gets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import ClusterError
from hpcaccel.render import render
from hpcaccel.slurm import JobState, Slurm
from hpcaccel.spec import JobSpec

from .dev_cluster import Cluster, wait_until

STUB = f"""#!{sys.executable} -I
import json, os, sys
path = next(word for word in sys.argv[2:] if word.startswith("/")) + "/record.json"
with open(path + ".new", "w") as file:
    json.dump({{"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}}, file)
os.rename(path + ".new", path)
print("the stub ran")
"""

HOSTILE = """it's a "test" # no \\\\ comment $(touch pwned) `id` ${HOME} %j ~ * é☃😀\t; JobState=COMPLETED  """


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    for name in os.environ:
        if name.startswith(("SLURM_", "SBATCH_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
    return Slurm()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    place = RunDir(tmp_path / "50% of it's # ü %j" / "run")
    place.create()
    return place


def spec_with(nodes: list[str], **sections: Any) -> JobSpec:
    slurm = {"partition": "gpu", "time": "2", "nodelist": ",".join(nodes), **sections.pop("slurm", {})}
    return JobSpec.model_validate({"name": "gpt", "entrypoint": {"command": ["true"]}, "slurm": slurm, **sections})


def submit(slurm: Slurm, run: RunDir, spec: JobSpec, **options: Any) -> str:
    python = run.path.parent / "my python"
    python.write_text(STUB)
    python.chmod(0o755)
    text = render(spec, run_dir=run, python=str(python), header={"spec": HOSTILE}, workdir=run.path, **options)
    run.script.write_text(text, encoding="utf-8")
    return slurm.sbatch(run.script)


def record(run: RunDir) -> dict[str, Any]:
    path = run.path / "record.json"
    wait_until(path.exists, f"{path}; {run.slurm_log.read_text() if run.slurm_log.exists() else 'no log'}")
    value: dict[str, Any] = json.loads(path.read_text())
    return value


def test_hostile_values_reach_slurm_and_the_batch_step(
    slurm: Slurm, run: RunDir, lease: Callable[[int], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = f"sesame {HOSTILE}"
    monkeypatch.setenv("API_KEY", secret)
    monkeypatch.setenv("NOT_LISTED", "x")
    monkeypatch.setenv("SBATCH_PARTITION", "urgent")
    long = HOSTILE * 100
    environment = {"env": {"VALUE": HOSTILE, "LONG": long}, "secrets": ["API_KEY"], "setup": [f"true # {HOSTILE}"]}
    spec = spec_with(lease(1), environment=environment, slurm={"comment": HOSTILE, "mail_user": "ann@example.org"})
    job_id = submit(slurm, run, spec)
    job = slurm.job(job_id)
    assert job is not None
    assert (job.name, job.comment, job.partition, job.requeue) == ("gpt", HOSTILE, "gpu", True)
    seen = record(run)
    assert seen["argv"] == [f"{run.path}/node.pyz", "batch", "supervise", str(run.path)]
    assert seen["cwd"] == str(run.path)
    env = seen["env"]
    assert (env["VALUE"], env["LONG"], env["API_KEY"]) == (HOSTILE, long, secret)
    assert env["MASTER_ADDR"] == spec.slurm.nodelist
    assert env["HOME"] == os.path.expanduser("~")
    assert "/usr/bin" in env["PATH"]
    assert not {"NOT_LISTED", "SLURM_EXPORT_ENV"} & set(env)
    wait_until(lambda: slurm.queue([job_id]) == {}, "the end of the job")
    assert "the stub ran" in run.slurm_log.read_text()
    assert "sesame" not in run.script.read_text() + run.slurm_log.read_text()
    ended = slurm.queue([job_id], include_ended=True)[job_id]
    assert ended.state is JobState.COMPLETED


def test_each_task_of_an_array_has_its_own_log(slurm: Slurm, run: RunDir, lease: Callable[[int], list[str]]) -> None:
    for index in range(2):
        run.task(index).create()
    job_id = submit(slurm, run, spec_with(lease(1)), array_size=2)
    assert set(slurm.queue([job_id], include_ended=True)) == {f"{job_id}_0", f"{job_id}_1"}
    for index in range(2):
        task = slurm.job(f"{job_id}_{index}")
        assert task is not None
        assert task.address == f"{job_id}_{index}"
        assert record(run.task(index))["argv"][-1] == str(run.task(index).path)
    wait_until(lambda: slurm.queue([job_id]) == {}, "the end of the array")
    assert all("the stub ran" in run.task(index).slurm_log.read_text() for index in range(2))
    wait_until(lambda: len(slurm.accounting([job_id])) == 2, "the array in the accounting")
    assert {entry.state for entry in slurm.accounting([job_id]).values()} == {JobState.COMPLETED}


def test_failing_setup_line_fails_the_job_and_is_named(
    slurm: Slurm, run: RunDir, lease: Callable[[int], list[str]]
) -> None:
    line = "ls /no/such/place # it's"
    job_id = submit(slurm, run, spec_with(lease(1), environment={"setup": [line]}))
    name = f"environment.setup: {line}"
    assert record(run)["argv"] == [f"{run.path}/node.pyz", "setup-failed", str(run.path), "2", name]
    wait_until(lambda: slurm.queue([job_id]) == {}, "the end of the job")
    assert f"{name} failed with exit code 2" in run.slurm_log.read_text()
    assert slurm.queue([job_id], include_ended=True)[job_id].state is JobState.FAILED


@pytest.mark.parametrize(
    ("slurm_section", "words"),
    [
        ({"partition": "gpuu"}, "Did you mean 'gpu'"),
        ({"comment": "x" * 10_000}, "too long"),
        ({"gpus_per_node": 64}, "node configuration is not available"),
    ],
)
def test_refusal_by_slurm_is_an_error_with_its_message(
    slurm: Slurm, run: RunDir, slurm_section: dict[str, Any], words: str
) -> None:
    with pytest.raises(ClusterError, match=f"(?i){words}"):
        submit(slurm, run, spec_with([], slurm={"nodelist": None, **slurm_section}))


def test_queries_return_the_configuration_of_the_real_slurm(slurm: Slurm) -> None:
    found = {partition.name: partition for partition in slurm.partitions()}
    assert {"gpu", "gpu0", "urgent"} <= set(found)
    assert (found["gpu"].default, found["gpu"].gpus_per_node, found["gpu"].preempt_mode) == (True, 2, "REQUEUE")
    assert slurm.associations("root")
    assert slurm.version()[0].isdigit()
    assert slurm.config()["PreemptType"] == "preempt/partition_prio"
    assert slurm.job("4000000") is None
    assert slurm.queue(["4000000"]) == {}
    assert slurm.accounting(["4000000"]) == {}
    slurm.cancel("4000000")
    assert slurm.signal_step("4000000", 0, "TERM") is False
