"""Plans of the launcher from a command line, without starting anything."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest

from hpcaccel.errors import UserError
from hpcaccel.launch.arguments import parse
from hpcaccel.launch.launch_config import LaunchConfig
from hpcaccel.launch.launch_plan import LaunchPlan, plan_launch

PYTHON = sys.executable
AGENT = [PYTHON, "-m", "hpcaccel.launch.elastic_agent"]
GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
ALONE = {"CUDA_VISIBLE_DEVICES": ""}
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2)",
    "SLURM_GPUS_ON_NODE": "4",
    "SLURMD_NODENAME": "n1",
}


def plan(line: str, env: dict[str, str] = ALONE, config: LaunchConfig | None = None) -> LaunchPlan:
    return plan_launch(parse(line.split()), config, env)


def torchrun(found: LaunchPlan) -> list[str]:
    """torchrun's own flags."""
    assert found.command[:3] == AGENT
    return found.command[4 : 4 + int(found.command[3]) - 1]


def refusal(line: str, env: dict[str, str] = ALONE, config: LaunchConfig | None = None) -> str:
    with pytest.raises(UserError) as caught:
        plan(line, env, config)
    return str(caught.value)


def config(**values: Any) -> LaunchConfig:
    return dataclasses.replace(LaunchConfig(), **values)
