"""What the command line or the configuration file turns off stays off, whatever the environment says."""

from __future__ import annotations

from typing import Any

import pytest

from .planning import GPUS, config, plan

pytestmark = pytest.mark.usefixtures("script_and_srun")

_SWITCHED_ON = {
    "ACCELERATE_USE_CPU": "1", "HPCACCEL_USE_CPU": "1", "ACCELERATE_DEBUG_MODE": "true", "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CPU_AFFINITY": "1", "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
}  # fmt: skip
_CPU = {"ACCELERATE_USE_CPU", "HPCACCEL_USE_CPU"}


@pytest.mark.parametrize(
    ("line", "values", "removed"),
    [
        ("", {"use_cpu": False}, _CPU),
        ("--cpu=false", {}, _CPU),
        ("--multi-gpu", {}, _CPU),
        ("--debug=false", {"debug": True}, {"ACCELERATE_DEBUG_MODE"}),
        ("", {"debug": False}, {"ACCELERATE_DEBUG_MODE"}),
        ("", {"enable_cpu_affinity": False}, {"ACCELERATE_CPU_AFFINITY"}),
        ("--use-parallelism-config=no", {}, {"ACCELERATE_USE_PARALLELISM_CONFIG"}),
        ("", {"distributed_type": "FSDP"}, {"ACCELERATE_USE_DEEPSPEED"}),
        ("--use-deepspeed", {}, {"ACCELERATE_USE_FSDP"}),
        (
            "",
            {"distributed_type": "MULTI_GPU", "num_processes": 2, "use_cpu": False},
            {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", *_CPU},
        ),
        ("", {}, set()),
    ],
)
def test_what_is_switched_off_overrides_the_environment(line: str, values: dict[str, Any], removed: set[str]) -> None:
    found = plan(f"{line} t.py", {**GPUS, **_SWITCHED_ON}, config(**values)).environ
    assert _SWITCHED_ON.keys() - found.keys() == removed
    assert all(found[name] in ("1", "true") for name in _SWITCHED_ON.keys() - removed)
