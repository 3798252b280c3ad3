"""Tests of how ranks are started: their environment, and srun's options for their logs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from hpcaccel.core.launch_spec import read_launch
from hpcaccel.node.launchers.srun_ranks import _output

from .conftest import LocalRun

Make = Callable[..., LocalRun]

SAYS = "import json, os; print(json.dumps(dict(os.environ)))"


def environment(run: LocalRun) -> dict[str, str]:
    assert run.run() == 0, run.log
    value: dict[str, str] = json.loads(run.dir.rank_log(1, 0).read_text())
    return value


def test_torchs_flight_recorder_writes_to_the_attempts_folder(local_run: Make) -> None:
    run = local_run(SAYS)
    assert environment(run)["TORCH_FR_DUMP_TEMP_FILE"] == f"{run.dir.attempt(1)}/flight_recorder_"


def test_users_own_path_of_the_flight_recorder_is_kept(local_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/elsewhere/trace_")
    assert environment(local_run(SAYS))["TORCH_FR_DUMP_TEMP_FILE"] == "/elsewhere/trace_"


@pytest.mark.parametrize(("share", "left"), [(True, {"SLURM_TRES_PER_TASK": "cpu=4"}), (False, None)])
def test_ranks_that_share_gpus_get_no_gpu_variables_of_slurm(
    local_run: Make, monkeypatch: pytest.MonkeyPatch, share: bool, left: dict[str, str] | None
) -> None:
    given = {
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_TRES_BIND": "gres/gpu:per_task:1",
        "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=1",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = environment(local_run(SAYS, launch={"share_gpus": share}))
    assert {name: seen[name] for name in given if name in seen} == (given if left is None else left)


@pytest.mark.parametrize(
    ("launch", "by_task"),
    [
        ({}, True),
        ({"launcher": "torchrun", "nodes": 1}, True),
        ({"launcher": "torchrun", "ranks_per_node": 1}, True),
        ({"launcher": "torchrun"}, False),  # task 1, of the second node, is not rank 1
    ],
)
def test_srun_writes_rank_logs_only_if_task_numbers_are_ranks(
    local_run: Make, launch: dict[str, Any], by_task: bool
) -> None:
    run = local_run("", launch={"backend": "slurm", "nodes": 2, "ranks_per_node": 4, **launch})
    options = _output(run.dir, read_launch(run.dir), 1)
    assert options == ([f"--output={run.dir.attempt(1)}/%t.log", "--open-mode=append"] if by_task else [])
