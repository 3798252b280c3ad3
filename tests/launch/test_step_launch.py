"""Finding the step of the ranks, and the GPUs of an allocation, by Slurm's answers."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.launch.allocation import SlurmAllocation
from hpcaccel.launch.step_launch import run_step
from hpcaccel.slurm import Slurm

JOB = "JobId=7 JobName=x UserId=u(1) NumNodes=2 AllocTRES=cpu=8,mem=8G,node=2,billing=8,gres/gpu=6,gres/gpu:a100=6"


def answering(stdout: str) -> Callable[..., Any]:
    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, stdout, "")

    return run


def test_step_is_found_by_its_name() -> None:
    slurm = Slurm(answering("7.batch|batch\n7.0|other\n7.12|hpcaccel-launch-1\n"))
    assert slurm.step_named("7", "hpcaccel-launch-1") == "12"
    assert slurm.step_named("7", "hpcaccel-launch-2") is None


def test_record_of_a_job() -> None:
    assert Slurm(answering(JOB)).job_record("7")["AllocTRES"].endswith("gres/gpu:a100=6")
    assert Slurm(answering("")).job_record("7") == {}


def test_shell_of_salloc_asks_slurm_for_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a login node, Slurm sets no variable with the number of GPUs, if they were requested by --gres."""
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/bash\necho '{JOB}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    assert SlurmAllocation.of(variables) == SlurmAllocation("7", ["n1", "n2"], cpus=4, gpus=3)


@pytest.mark.parametrize(("line", "code"), [("exit 7", 7), ("kill -TERM $$", 143)])
def test_exit_code_of_srun(line: str, code: int) -> None:
    assert run_step(["bash", "-c", line], {"PATH": "/bin:/usr/bin"}, job_id="7", name="x") == code
