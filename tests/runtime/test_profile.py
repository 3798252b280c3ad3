"""Profiling: torch's profiler configured by a handler, with one trace per rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcaccel.errors import RuntimeMisuse
from hpcaccel.runtime.handlers import ProfileKwargs
from hpcaccel.runtime.training.profile_context import ProfileContext, build_profiler
from tests.runtime.ranks import run_ranks


class Group:
    rank = 3
    meetings = 0

    def barrier(self) -> None:
        self.meetings += 1


def test_profile_yields_a_profiler_with_the_operations_that_ran() -> None:
    with ProfileContext(ProfileKwargs(activities=["cpu"], record_shapes=True), Group()) as profiler:  # type: ignore[arg-type]
        torch.ones(3, 3) @ torch.ones(3, 3)
    assert "aten::mm" in {event.key for event in profiler.key_averages()}


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")
def test_profile_schedule_reports_a_trace_for_each_cycle() -> None:
    seen: list[int] = []
    handler = ProfileKwargs(
        activities=["cpu"],
        schedule_option={"wait": 1, "warmup": 1, "active": 1, "repeat": 2},
        on_trace_ready=lambda profiler: seen.append(profiler.step_num),
    )
    with ProfileContext(handler, Group()) as profiler:  # type: ignore[arg-type]
        for _ in range(8):
            torch.ones(2).sum()
            profiler.step()
    assert seen == [3, 6]


def test_each_rank_writes_its_trace_and_waits_for_the_others(tmp_path: Path) -> None:
    group: Any = Group()
    with ProfileContext(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path / "a" / "b")), group):
        torch.ones(2).sum()
    trace = json.loads((tmp_path / "a" / "b" / "profile_3.json").read_text())
    assert any(event.get("name") == "aten::sum" for event in trace["traceEvents"])
    assert group.meetings == 1


def test_profile_neither_waits_nor_writes_after_an_exception(tmp_path: Path) -> None:
    group: Any = Group()

    def fails() -> None:
        with ProfileContext(ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path)), group):
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert (group.meetings, list(tmp_path.iterdir())) == (0, [])


def test_unknown_activity_error_lists_the_known_ones() -> None:
    with pytest.raises(RuntimeMisuse, match=r"unknown activity 'gpu' .*cpu, cuda"):
        build_profiler(ProfileKwargs(activities=["gpu"]))


def test_accelerator_profiles_two_ranks(tmp_path: Path) -> None:
    """The program also checks the other parts of a training step that need an Accelerator."""
    ended = run_ranks("step_names.py", [str(tmp_path)])
    assert ended.codes == [0, 0], "\n".join(ended.outputs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile_0.json", "profile_1.json"]
    assert "steps 2 times per optimizer step" in ended.outputs[0]
    assert "hpcaccel: 12 samples per step (2 × 2 ranks × 3 micro-batches)" in ended.outputs[0]
    assert ended.outputs[0].count("samples per step") == 1
    assert "hpcaccel:" not in ended.outputs[1]
