"""Several jobs in one file: shared settings, order and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcaccel.errors import SpecError
from hpcaccel.spec.loading.workflow import read_jobs

JOBS = """\
slurm: {partition: gpu, time: 60}
jobs:
  train:
    entrypoint: {command: [echo, train]}
    slurm: {nodes: 4}
    after: [prepare, afterany:an-earlier-run]
  prepare: {entrypoint: {script: prepare.py}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "prepare.py").touch()
    path = tmp_path / "jobs.yaml"
    path.write_text(JOBS)
    return path


def test_jobs_are_ordered_by_dependency_and_share_settings(file: Path) -> None:
    jobs = read_jobs(file, overrides=["slurm.qos=long", "train.slurm.nodes=8"])
    assert jobs is not None
    assert [job.name for job in jobs] == ["prepare", "train"]
    assert [(job.slurm.partition, job.slurm.qos, job.slurm.nodes) for job in jobs] == [
        ("gpu", "long", "1"),
        ("gpu", "long", "8"),
    ]
    assert jobs[0].entrypoint.script == str(file.parent / "prepare.py")
    assert jobs[1].after == ["afterok:prepare", "afterany:an-earlier-run"]


def test_file_of_a_single_job_is_not_a_workflow(file: Path) -> None:
    file.write_text("name: one\nentrypoint: {command: [echo]}\n")
    assert read_jobs(file) is None


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "prepare: {",
            "prepare: {after: [train], ",
            "jobs.yaml:2: jobs depend on each other in a cycle",
        ),
        ("nodes: 4", "nodez: 4", r"jobs.yaml:5: slurm.nodez is not a known key.*Did you mean 'nodes'"),
        (
            "slurm: {partition",
            "name: x\nslurm: {partition",
            "jobs.yaml:1: name cannot be set for all jobs of a file: each job is named by its key in jobs",
        ),
        ("[prepare,", "['after:prepare',", r"jobs.yaml:6: after.0 .*'after' must be one of afterok"),
        ("[prepare,", "[train,", "jobs depend on each other in a cycle: train → train"),
    ],
)
def test_invalid_workflow_is_reported_with_its_line(file: Path, old: str, new: str, words: str) -> None:
    file.write_text(JOBS.replace(old, new))
    with pytest.raises(SpecError, match=words):
        read_jobs(file)
