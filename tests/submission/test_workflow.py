"""Workflows: the submitted jobs of a file when a later job cannot be submitted."""

from __future__ import annotations

from typing import Any

import pytest

from hpcaccel.core.stop_requests import open_requests
from hpcaccel.errors import ClusterError, SlurmCommandError, SlurmUnreachable
from hpcaccel.spec.loading.workflow import read_jobs
from hpcaccel.submission import Run, all_runs
from hpcaccel.submission.submit.api import is_half_submitted, submit_jobs
from tests.submission.conftest import Project

JOBS = "jobs:\n" + "".join(
    f"  {name}: {{entrypoint: {{script: train.py}}, slurm: {{time: 10}}}}\n" for name in ("first", "second", "third")
)


@pytest.fixture(autouse=True)
def jobs_file(project: Project) -> None:
    project.write("jobs.yaml", JOBS)


def submit_all(project: Project) -> list[Run]:
    jobs = read_jobs(project.path / "jobs.yaml")
    assert jobs is not None
    return submit_jobs(jobs, cluster="slurm", slurm=project.slurm)


def at_the_third(project: Project, error: Exception, monkeypatch: pytest.MonkeyPatch, *, silent: bool) -> None:
    """Let the third sbatch fail and, if ``silent``, all later Slurm commands."""
    sbatch = project.slurm.sbatch

    def submit(*args: Any, **more: Any) -> str:
        if len(project.slurm.submissions) == 2:
            project.slurm.unreachable = "Unable to contact slurm controller" if silent else ""
            raise error
        return str(sbatch(*args, **more))

    monkeypatch.setattr(project.slurm, "sbatch", submit)


def test_same_command_continues_after_the_controller_was_unreachable(
    project: Project, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = SlurmUnreachable(["sbatch"], 1, "Unable to contact slurm controller")
    with monkeypatch.context() as patch:
        at_the_third(project, gone, patch, silent=True)
        with pytest.raises(
            SlurmCommandError, match=r"only 2 of 3 jobs were submitted .* When Slurm responds again, repeat the command"
        ) as caught:
            submit_all(project)
    assert not isinstance(caught.value, SlurmUnreachable)
    project.slurm.unreachable = ""
    submitted = [run.dir for run in all_runs()]
    assert all(open_requests(run) == [] for run in submitted)
    assert is_half_submitted(submitted, of=3)
    assert not is_half_submitted(submitted, of=2)
    assert [run.job_id for run in submit_all(project)] == ["100", "101", "102"]
    assert ["was already submitted" in one for one in told] == [True, True]
    assert [run.job_id for run in submit_all(project)] == ["103", "104", "105"], "given once more it is meant"


def test_refused_job_cancels_all_submitted_jobs_and_is_raised(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        at_the_third(project, ClusterError("Slurm refused the job"), patch, silent=True)
        with (
            pytest.warns(UserWarning, match="was not cancelled and may be running"),
            pytest.raises(ClusterError, match="refused"),
        ):
            submit_all(project)
    project.slurm.unreachable = ""
    submitted = [run.dir for run in all_runs()]
    assert [[one.then for _, one in open_requests(run)] for run in submitted] == [["cancel"], ["cancel"]]
    assert not is_half_submitted(submitted, of=3)
    assert [run.job_id for run in submit_all(project)] == ["102", "103", "104"]
