"""Tests that every recorded output of Slurm is parsed by the function that parses it in production.

Outputs that were recorded with other columns are put into the order that we request, by name. The JSON of squeue and
sinfo was recorded at the same moment as the text, and shows whether the text was parsed correctly.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.slurm import JobState, Slurm, parsing, site_parsing
from hpcaccel.slurm.parsing import WAITING_FORMAT, parse_estimate, parse_waiting

RECORDED = Path(__file__).parents[1] / "data" / "slurm"
SQUEUE = "%i|%F|%K|%j|%P|%T|%r|%M|%l|%D|%N|%S|%Q|%k"
"""The columns of squeue.txt."""
OURS = ["22.05", "26.11"]


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Time zone of the recorded clusters."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def recorded(version: str, name: str) -> str:
    return (RECORDED / version / name).read_text()


def squeue(version: str, form: str = parsing.QUEUE_FORMAT) -> str:
    """Output of squeue with the columns of ``form``; columns that were not recorded are N/A."""
    lines = recorded(version, "squeue.txt").splitlines()
    rows = [dict(zip(SQUEUE.split("|"), line.split("|"), strict=True)) for line in lines]
    return "".join("|".join(row.get(code, "N/A") for code in form.split("|")) + "\n" for row in rows)


def sacct(version: str) -> str:
    """The same for sacct, whose first line names its columns."""
    head, *rows = (line.split("|") for line in recorded(version, "sacct.txt").splitlines())
    table = [dict(zip(head, row, strict=True)) for row in rows]
    return "".join("|".join(row.get(name, "") for name in parsing.SACCT_FORMAT.split(",")) + "\n" for row in table)


def sinfo(version: str) -> list[list[str]]:
    return [line.split("|") for line in recorded(version, "sinfo-N.txt").splitlines()]


def asked(version: str, name: str) -> Slurm:
    """A Slurm whose commands print this file."""
    return Slurm(lambda command, **_: subprocess.CompletedProcess(command, 0, recorded(version, name), ""))


def number(value: Any) -> int:
    """A number, plain as in 22.05 or in an object with the key ``number``."""
    return int(value["number"] if isinstance(value, dict) else value or 0)


def words(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


READERS: dict[str, Callable[[str], Any]] = {
    "sacct-het.txt": lambda version: parsing.accounting_entries(recorded(version, "sacct-het.txt")),
    "sacct.txt": lambda version: parsing.accounting_entries(sacct(version)),
    "sacctmgr-assoc.txt": lambda version: asked(version, "sacctmgr-assoc.txt").association_table("ann"),
    "sacctmgr-qos.txt": lambda version: asked(version, "sacctmgr-qos.txt").qos_table(),
    "sbatch-bad-partition.txt": lambda version: "invalid partition" in recorded(version, "sbatch-bad-partition.txt"),
    "sbatch-test-only.txt": lambda version: parse_estimate(recorded(version, "sbatch-test-only.txt")),
    "sbatch-too-long.txt": lambda version: asked(version, "sbatch-too-long.txt").sbatch(Path(__file__)),
    "sbatch-too-many-nodes.txt": lambda version: asked(version, "sbatch-too-many-nodes.txt").sbatch(Path(__file__)),
    "scontrol-show-config.txt": lambda version: asked(version, "scontrol-show-config.txt").config(),
    "scontrol-show-job-array.txt": lambda version: parsing.jobs(recorded(version, "scontrol-show-job-array.txt")),
    "scontrol-show-job-dependency.txt": lambda version: parsing.jobs(
        recorded(version, "scontrol-show-job-dependency.txt")
    ),
    "scontrol-show-job-het.txt": lambda version: parsing.jobs(recorded(version, "scontrol-show-job-het.txt")),
    "scontrol-show-job-running.txt": lambda version: parsing.jobs(recorded(version, "scontrol-show-job-running.txt")),
    "scontrol-show-job.txt": lambda version: parsing.jobs(recorded(version, "scontrol-show-job.txt")),
    "scontrol-show-node.txt": lambda version: asked(version, "scontrol-show-node.txt").node_records(),
    "scontrol-show-partition.txt": lambda version: asked(version, "scontrol-show-partition.txt").partition_records(),
    "sinfo-N.txt": sinfo,
    "sinfo.json": lambda version: json.loads(recorded(version, "sinfo.json")),
    "squeue-het.txt": lambda version: parsing.queue_entries(recorded(version, "squeue-het.txt")),
    "squeue.json": lambda version: json.loads(recorded(version, "squeue.json"))["jobs"],
    "squeue.txt": lambda version: parsing.queue_entries(squeue(version)),
    "version.txt": lambda version: asked(version, "version.txt").version(),
}


@pytest.mark.parametrize("path", sorted(RECORDED.glob("*/*")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_recorded_file_is_parsed(path: Path) -> None:
    assert READERS[path.name](path.parent.name)


def test_recorded_versions_are_known() -> None:
    assert [READERS["version.txt"](version) for version in OURS] == ["22.05.8", "26.11.0-0rc1"]
    assert {path.name for path in RECORDED.iterdir() if path.is_dir()} == {*OURS, "23.02", "24.05"}


@pytest.mark.parametrize("version", OURS)
def test_parsed_squeue_text_matches_squeue_json(version: str) -> None:
    entries = parsing.queue_entries(squeue(version))
    found = 0
    for job in json.loads(recorded(version, "squeue.json"))["jobs"]:
        state = JobState(words(job["job_state"])[0])
        if state.is_ended:
            continue  # squeue lists ended jobs only with --states=all
        array = number(job["array_job_id"])
        pending = parsing.queue_entries(f"{array}_[{job['array_task_string']}]" + "|x" * 11)
        own = [f"{array}_{number(job['array_task_id'])}"] if array else [str(job["job_id"])]
        for address in list(pending) if array and state.is_pending else own:
            entry = entries[address]
            reason = "" if job["state_reason"] == "None" else job["state_reason"]
            assert (entry.state, entry.reason, entry.name) == (state, reason, job["name"])
            assert (entry.partition, entry.nodes) == (job["partition"], job["nodes"])
            assert (entry.node_count, entry.start_time) == (
                number(job["node_count"]),
                number(job["start_time"]) or None,
            )
            assert entry.time_limit_seconds == number(job["time_limit"]) * 60
            found += 1
    assert found == len(entries) > 4


@pytest.mark.parametrize(("version", "waiting"), [("22.05", ["46_[1-5%2]", "47"]), ("26.11", ["5_[0-5%2]", "6"])])
def test_pending_jobs_are_parsed(version: str, waiting: list[str]) -> None:
    found = [one for one in parse_waiting(squeue(version, WAITING_FORMAT)) if one.reason]
    assert [one.job_id for one in found] == waiting
    assert [(one.reason, one.partitions, one.time_limit_seconds) for one in found] == [
        ("Resources", ("gpu",), 300),
        ("Dependency", ("gpu",), 300),
    ]
    assert (found[0].start_time is None, found[1].start_time) == (False, None)
    assert found[0].priority >= 1


def test_accounting_entries_are_parsed() -> None:
    old, new = (parsing.accounting_entries(sacct(version)) for version in OURS)
    assert {job: (old[job].state, old[job].records) for job in ("8", "11", "13", "34_0", "45", "46_3")} == {
        "8": (JobState.CANCELLED, 2),
        "11": (JobState.COMPLETED, 4),
        "13": (JobState.CANCELLED, 2),
        "34_0": (JobState.COMPLETED, 2),
        "45": (JobState.RUNNING, 1),
        "46_3": (JobState.PENDING, 1),
    }
    assert (old["32"].state, old["32"].exit_code, old["13"].cancelled_by) == (JobState.FAILED, "2:0", "0")
    assert (new["1"].state, new["1"].records, new["1"].nodes) == (JobState.RUNNING, 4, "n[1-2]")
    assert (new["2"].state, new["3"].cancelled_by, new["5_5"].state) == (JobState.COMPLETED, "0", JobState.PENDING)


@pytest.mark.parametrize("version", OURS)
def test_gpus_in_sinfo_text_match_sinfo_json(version: str) -> None:
    said = json.loads(recorded(version, "sinfo.json"))
    nodes = {one["name"]: one["gres"] for one in said.get("nodes", [])}
    for one in said.get("sinfo", []):
        nodes |= dict.fromkeys(one["nodes"]["nodes"], one["gres"]["total"])
    rows = sinfo(version)
    assert {row[0]: site_parsing.gres(row[3])[0] for row in rows} == {
        name: site_parsing.gres(text)[0] for name, text in nodes.items()
    }
    assert site_parsing.failed_nodes("".join(f"{row[0]}|{row[2]}\n" for row in rows)) == []


@pytest.mark.parametrize("version", OURS)
def test_start_estimate_is_parsed(version: str) -> None:
    estimate = parse_estimate(recorded(version, "sbatch-test-only.txt"))
    assert estimate is not None
    assert (estimate.nodes, estimate.partition, estimate.refusal) == ("n[1-3]", "gpu", "")
    assert time.strftime("%F %H:%M", time.gmtime(estimate.start_time)) == "2026-11-20 23:06"


@pytest.mark.parametrize(("version", "jobs"), [("22.05", ("51", "50")), ("26.11", ("9", "8"))])
def test_sbatch_accepts_jobs_that_can_never_start(version: str, jobs: tuple[str, str]) -> None:
    """With EnforcePartLimits=NO Slurm accepts jobs that are too long or too large; only our own checks detect them."""
    assert READERS["scontrol-show-config.txt"](version)["EnforcePartLimits"] == "NO"
    names = ("sbatch-too-long.txt", "sbatch-too-many-nodes.txt")
    assert tuple(READERS[name](version) for name in names) == jobs


def test_job_and_node_of_23_02_are_parsed() -> None:
    (job,) = parsing.jobs(recorded("23.02", "scontrol-show-job.txt"))
    assert (job.job_id, job.name, job.state, job.reason) == ("44977164", "simple.sh", JobState.COMPLETED, "")
    assert (job.partition, job.nodes, job.requeue, job.restarts) == ("cpu_zen4", "b-cn1703", False, 0)
    assert job.start_time is not None
    assert (job.time_limit_seconds, job.end_time) == (60, job.start_time + 2)
    (node,) = READERS["scontrol-show-node.txt"]("23.02")
    assert (node["State"], node["CPUEfctv"], node["Gres"]) == ("MIXED", "256", "(null)")


@pytest.mark.parametrize(("version", "array", "task"), [("22.05", "46", 3), ("26.11", "5", 0)])
def test_pending_array_task_is_parsed(version: str, array: str, task: int) -> None:
    found = parsing.pick_job(READERS["scontrol-show-job-array.txt"](version), f"{array}_{task}")
    assert found is not None
    assert (found.address, found.state, found.reason) == (f"{array}_{task}", JobState.PENDING, "Resources")
    assert found.partition == "gpu"
