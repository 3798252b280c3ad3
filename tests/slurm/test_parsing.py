"""Tests of the parsers of Slurm's output, mostly as Slurm 22.05 and 26.11 printed it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.slurm import parsing, site_parsing
from hpcaccel.slurm.states import JobState, parse_time

RECORDED = Path(__file__).parents[1] / "data" / "slurm"


def recorded(version: str, name: str) -> str:
    return (RECORDED / version / name).read_text()


@pytest.mark.parametrize(("version", "job_id", "nodes"), [("22.05", "45", "n[1-2]"), ("26.11", "4", "n[3-4]")])
def test_running_job_is_parsed(version: str, job_id: str, nodes: str) -> None:
    job = parsing.pick_job(parsing.jobs(recorded(version, "scontrol-show-job-running.txt")), job_id)
    assert job is not None
    assert (job.job_id, job.name, job.state, job.address) == (job_id, "train", JobState.RUNNING, job_id)
    assert (job.nodes, job.partition, job.restarts, job.requeue) == (nodes, "gpu", 0, True)
    assert job.end_time is not None
    assert job.start_time is not None
    assert job.end_time - job.start_time == job.time_limit_seconds == 300
    assert (job.preempt_time, job.reason, job.comment, job.exit_code) == (None, "", "a b", "0:0")


def test_preempt_time_is_parsed() -> None:
    text = recorded("22.05", "scontrol-show-job-running.txt")
    text = text.replace("PreemptTime=None", "PreemptTime=2026-11-20T22:59:00")
    assert parsing.jobs(text)[0].preempt_time == parse_time("2026-11-20T22:59:00")


def test_job_pending_on_a_dependency_is_parsed() -> None:
    (job,) = parsing.jobs(recorded("22.05", "scontrol-show-job-dependency.txt"))
    assert (job.state, job.reason, job.nodes) == (JobState.PENDING, "Dependency", "")
    assert (job.start_time, job.end_time) == (None, None)


def test_pick_job_finds_array_task_by_address_or_job_id() -> None:
    found = parsing.jobs(recorded("22.05", "scontrol-show-job-array.txt"))
    running = parsing.pick_job(found, "46_0")
    waiting = parsing.pick_job(found, "46_3")
    by_number = parsing.pick_job(found, "48")
    assert running is not None
    assert running == by_number
    assert (running.job_id, running.address, running.state) == ("48", "46_0", JobState.RUNNING)
    assert waiting is not None
    assert (waiting.address, waiting.state, waiting.nodes) == ("46_3", JobState.PENDING, "")
    assert parsing.pick_job(found, "47") is None


def test_heterogeneous_job_is_described_by_its_first_component() -> None:
    found = parsing.jobs(recorded("22.05", "scontrol-show-job-het.txt"))
    job = parsing.pick_job(found, found[0].job_id)
    assert job is not None
    assert (job.state, job.nodes, job.partition, len(found)) == (JobState.RUNNING, "n1", "gpu", 2)
    queue = parsing.queue_entries(recorded("22.05", "squeue-het.txt"))
    assert {(name.removeprefix(job.job_id), one.partition) for name, one in queue.items()} == {
        ("", "gpu"),
        ("+1", "gpuc"),
    }
    entries = parsing.accounting_entries(recorded("22.05", "sacct-het.txt"))
    assert entries[job.job_id].state is JobState.CANCELLED


@pytest.mark.parametrize(
    ("first_waits_for", "second_waits_for", "told"),
    [
        ("None", "Resources", "Resources"),
        ("Resources", "PartitionConfig", "PartitionConfig"),
        ("Priority", "None", "Priority"),
    ],
)
def test_heterogeneous_job_has_most_specific_reason_of_its_components(
    first_waits_for: str, second_waits_for: str, told: str
) -> None:
    text = recorded("22.05", "scontrol-show-job-het.txt").replace("JobState=RUNNING", "JobState=PENDING")
    before, between, behind = text.split("Reason=None")
    found = parsing.jobs(f"{before}Reason={first_waits_for}{between}Reason={second_waits_for}{behind}")
    job = parsing.pick_job(found, found[0].job_id)
    assert job is not None
    assert job.reason == told


HOSTILE = [
    " JobState=COMPLETED",
    "x JobName=y JobState=CANCELLED Reason=z",
    "a\tJobState=FAILED",
    "Comment=no   JobState=COMPLETED EndTime=2000-01-01T00:00:00",
    "=",
    "x\u2028   JobState=FAILED",
    "x\x0c   JobState=FAILED\x85   JobState=FAILED\x1c",
    "Ünï ☃ | '\"",
]


@pytest.mark.parametrize("release", ["22.05", "26.11"])
@pytest.mark.parametrize("comment", ["a b", "a b ", " ", "a b  "])
def test_spaces_of_comment_are_kept(release: str, comment: str) -> None:
    """22.05 prints one more space after the comment, releases from 25.11 on do not."""
    honest = recorded(release, "scontrol-show-job-running.txt")
    printed = "Comment=a b \n" if release == "22.05" else "Comment=a b\n"
    assert printed in honest
    (job,) = parsing.jobs(honest.replace(printed, printed.replace("a b", comment)))
    assert job.comment == comment


@pytest.mark.parametrize("text", HOSTILE)
def test_names_and_comments_are_not_parsed_as_fields(text: str) -> None:
    honest = recorded("26.11", "scontrol-show-job-running.txt")
    hostile = honest.replace("JobName=train", f"JobName={text}").replace("Comment=a b", f"Comment={text}")
    (job,) = parsing.jobs(hostile)
    (expected,) = parsing.jobs(honest)
    assert (job.name, job.comment) == (text, text)
    assert job.state is JobState.RUNNING
    assert (job.reason, job.end_time, job.nodes) == (expected.reason, expected.end_time, expected.nodes)


def test_squeue_lines_are_parsed() -> None:
    entries = parsing.queue_entries(
        "46_1|PENDING|gpu|ann||2|2026-11-20T23:13:00|N/A|2026-11-20T22:58:21|5:00|Resources|sweep\n"
        "45|RUNNING|gpu|ann|n[1-2]|2|2026-11-20T22:58:21|2026-11-20T23:03:21|2026-11-20T22:58:21|5:00|None|a|b\n"
        "48_[2-3%2]|PENDING|gpu|ann||2|N/A|N/A|2026-11-20T22:58:21|5:00|JobHeldUser|held\n"
        "squeue: warning, something\n"
    )
    assert list(entries) == ["46_1", "45", "48_2", "48_3"]
    assert entries["46_1"].reason == "Resources"
    assert entries["45"].name == "a|b"
    assert (entries["45"].nodes, entries["45"].node_count, entries["45"].reason) == ("n[1-2]", 2, "")
    assert entries["48_3"].is_held


def sacct_line(job_id: str, state: str, submit: str, name: str = "train") -> str:
    return f"{job_id}|{state}|0:0|gpu|{submit}|{submit}|Unknown|14|n1|None|{name}\n"


def test_accounting_uses_newest_record_of_a_job() -> None:
    text = (
        sacct_line("1", "REQUEUED", "2026-11-20T22:57:17")
        + sacct_line("1", "RUNNING", "2026-11-20T22:58:07")
        + sacct_line("1", "CANCELLED by 1000", "2026-11-20T22:45:00")
        + sacct_line("5_[0-1%2]", "PENDING", "2026-11-20T22:58:07", name="with|bar")
    )
    entries = parsing.accounting_entries(text)
    assert list(entries) == ["1", "5_0", "5_1"]
    assert (entries["1"].state, entries["1"].records, entries["1"].end_time) == (JobState.RUNNING, 3, None)
    assert entries["5_1"].name == "with|bar"


def test_user_who_cancelled_a_job_is_parsed() -> None:
    entry = parsing.accounting_entries(sacct_line("7", "CANCELLED by 1000", "2026-11-20T22:57:17"))["7"]
    assert (entry.state, entry.cancelled_by) == (JobState.CANCELLED, "1000")


def test_lines_of_one_partition_with_several_node_types_are_merged() -> None:
    text = (
        "gpu*|up|4|8|20000|1-00:00:00|n/a|REQUEUE|1|gpu:a100:4(S:0-1)\n"
        "gpu*|up|2|4|10000|1-00:00:00|n/a|REQUEUE|1|gpu:v100:2,nvme:1\n"
        "cpu|down|1|64|512000|infinite|1:00:00|OFF|1|(null)\n"
    )
    gpu, cpu = site_parsing.partitions(text)
    assert (gpu.name, gpu.default, gpu.available, gpu.nodes) == ("gpu", True, True, 6)
    assert (gpu.cpus_per_node, gpu.memory_mb_per_node, gpu.gpus_per_node) == (4, 10000, 2)
    assert (gpu.gpu_types, gpu.time_limit_seconds, gpu.preempt_mode) == (("a100", "v100"), 86400, "REQUEUE")
    assert (cpu.default, cpu.available, cpu.gpus_per_node) == (False, False, 0)
    assert (cpu.time_limit_seconds, cpu.default_time_seconds) == (None, 3600)


def test_associations_are_parsed() -> None:
    first, second = site_parsing.associations("phys|phys||normal|normal,long\nphys|chem|gpu||debug\n|||| \n")
    assert (first.account, first.default, first.qos, first.default_qos) == ("phys", True, ("normal", "long"), "normal")
    assert (second.account, second.default, second.partition, second.default_qos) == ("chem", False, "gpu", None)


@pytest.mark.parametrize("version", ["22.05", "26.11"])
def test_configuration_values_are_parsed(version: str) -> None:
    values = site_parsing.config_values(recorded(version, "scontrol-show-config.txt"))
    assert values["KillWait"] == "10 sec"
    assert values["MaxArraySize"] == "1001"
    assert values["HealthCheckProgram"] == ""
