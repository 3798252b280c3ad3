"""``hpcaccel profile``: traces of some steps of a running training, which always goes on."""

from __future__ import annotations

import gzip
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from hpcaccel.core.profile_requests import (
    ProfileRequest,
    close_profile_request,
    leave_profile_request,
    open_profile_request,
    profiles_of,
)
from hpcaccel.core.run_dir import RunDir
from hpcaccel.errors import UserError
from hpcaccel.runtime.health.step_profiler import StepProfiler
from hpcaccel.view.profile_traces import profiles
from tests.cluster.scenario import PROGRAMS as CLUSTER_PROGRAMS
from tests.cluster.scenario import Scenario

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = pytest.mark.torch


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "20261128-100000-abcd")
    run.create()
    return run


def request(**values: Any) -> ProfileRequest:
    return ProfileRequest(**{"steps": 2, "ranks": [0], "attempt": 1, **values})


def events(path: str | Path) -> list[str]:
    with gzip.open(path) as file:
        return [str(event.get("name")) for event in json.load(file)["traceEvents"]]


def until_written() -> None:
    for thread in threading.enumerate():
        if thread.name == "hpcaccel-profile":
            thread.join()


def steps(profiler: StepProfiler, *numbers: int) -> None:
    """Do steps of a training, as its loop does."""
    import torch

    for step in numbers:
        torch.ones(4).sum()
        if profiler.is_active:
            profiler.at_step(step)
    until_written()


def test_next_steps_are_recorded_once(run: RunDir) -> None:
    profiler = StepProfiler(run, 1, rank=0)
    steps(profiler, 1)
    asked = leave_profile_request(run, request())
    assert leave_profile_request(run, request()).id == asked.id, "requested twice: once"
    profiler.poll()
    profiler.poll()
    steps(profiler, 2, 3, 4, 5, 6)
    (trace,) = profiles(run)
    assert (trace.state, trace.first_step, trace.last_step, trace.detail) == ("done", 3, 4, "")
    assert trace.path == str(run.attempt(1) / "profiles" / "step_3-rank0.json.gz")
    assert trace.bytes == Path(trace.path).stat().st_size
    named = events(trace.path)
    assert [name for name in named if name.startswith("training step")] == ["training step 3", "training step 4"]
    assert "aten::sum" in named
    assert open_profile_request(run) is not None
    profiler.poll()
    assert open_profile_request(run) is None, "rank 0 has closed it"
    assert not profiler.is_active


def test_other_requests_wait_and_those_of_ended_attempts_do_not(run: RunDir) -> None:
    first = leave_profile_request(run, request())
    with pytest.raises(UserError, match="a profile of 2 steps of rank 0 is already requested"):
        leave_profile_request(run, request(steps=3))
    later = leave_profile_request(run, request(attempt=2, steps=3))
    assert later.id != first.id
    profiler = StepProfiler(run, 1, rank=0)
    profiler.poll()
    assert not profiler.is_active, "a request is for one attempt"
    close_profile_request(run, first)
    assert open_profile_request(run) == later, "only its own"


def test_only_the_requested_ranks_record(run: RunDir) -> None:
    leave_profile_request(run, request(ranks=[1]))
    ranks = [StepProfiler(run, 1, rank=rank) for rank in (0, 1)]
    for one in ranks:
        one.poll()
        steps(one, 1, 2, 3)
        one.poll()
    ranks[0].poll()
    assert [(one.rank, one.state) for one in profiles(run)] == [(1, "done")]
    assert open_profile_request(run) is None


@pytest.mark.parametrize("when", ["start", "stop", "export_chrome_trace"])
def test_errors_of_the_profiler_end_the_recording_and_not_the_training(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    import torch
    from torch._C import _autograd as kineto

    def fail(*_: Any) -> None:
        raise RuntimeError("CUPTI is not available")

    leave_profile_request(run, request())
    profiler = StepProfiler(run, 1, rank=0)
    profiler.poll()
    with monkeypatch.context() as patch:
        patch.setattr(torch.profiler.profile, when, fail)
        steps(profiler, 1, 2, 3, 4)
    (trace,) = profiles(run)
    assert (trace.state, trace.path) == ("failed", None)
    assert "CUPTI is not available" in trace.detail
    assert not profiler.is_active
    if kineto._profiler_enabled():
        kineto._disable_profiler()


def test_program_that_uses_the_profiler_itself_is_left_alone(run: RunDir) -> None:
    import torch

    leave_profile_request(run, request())
    profiler = StepProfiler(run, 1, rank=0)
    profiler.poll()
    with torch.profiler.profile():
        steps(profiler, 1, 2)
    assert "is using torch's profiler itself" in profiles(run)[0].detail


def test_stop_ends_a_recording_without_a_trace(run: RunDir) -> None:
    leave_profile_request(run, request(steps=5))
    profiler = StepProfiler(run, 1, rank=0)
    profiler.poll()
    steps(profiler, 1, 2)
    profiler.abandon()
    assert "the run stopped before the last step" in profiles(run)[0].detail


def test_request_that_cannot_be_read_ends_nothing(run: RunDir) -> None:
    profiler = StepProfiler(run, 1, rank=0)
    for text in ("{", "[]", '{"steps": 2}', '{"steps": "x", "ranks": 3, "attempt": 1, "id": "a"}'):
        (run.control / "profile").write_text(text)
        profiler.poll()
        steps(profiler, 1)
    assert profiles_of(run, 1) == []


def submitted(tmp_path: Path, ranks: int, **sections: Any) -> Scenario:
    scenario = Scenario(None, tmp_path)
    scenario.env["HPCACCEL_HEARTBEAT_SECONDS"] = "0.2"
    scenario.submit({"slurm": {"nodes": 1, "gpus_per_node": 0, "ntasks_per_node": ranks, "mem": None}, **sections})
    return scenario


def test_command_prints_the_traces_of_a_stop_gate_and_the_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    words = ["--folder", str(tmp_path / "saved"), "--pause", "0.1", "--steps", "150"]
    scenario = submitted(tmp_path, 2, entrypoint={"script": str(PROGRAMS / "gate.py"), "args": words})
    scenario.wait_for_word("training")
    name = scenario.dir.run_id
    assert (
        "there is no rank 2: the run has ranks 0 to 1" in scenario.cli("profile", name, "--rank=2", check=False).stderr
    )
    answer = scenario.cli("profile", name, "--steps", "3", "--rank", "1", "--rank", "0")
    paths = answer.stdout.split()
    assert [path.rpartition("-")[2] for path in paths] == ["rank0.json.gz", "rank1.json.gz"]
    assert "rank 1 writes the trace" in answer.stderr or "rank 1: steps" in answer.stderr
    for path in paths:
        named = events(path)
        assert sum(name.startswith("training step") for name in named) == 3
        assert any(name.startswith("autograd::engine") for name in named)
    assert scenario.wait_until_over() == 0, scenario.story
    assert scenario.ends == [("completed", "end")], scenario.story
    assert "run is completed" in scenario.cli("profile", name, check=False).stderr.replace(f"run {name}", "run")


@pytest.mark.chaos
def test_accelerator_is_recorded_and_its_result_is_the_same(tmp_path: Path) -> None:
    sections: dict[str, Any] = {
        "entrypoint": {"script": str(CLUSTER_PROGRAMS / "train.py"), "args": ["--pause", "0.2", "--epochs", "2"]},
        "runtime": {"deterministic": True},
    }
    plain, recorded = tmp_path / "plain", tmp_path / "recorded"
    digests = []
    for folder in (plain, recorded):
        folder.mkdir()
        scenario = submitted(folder, 1, **sections)
        if folder == recorded:
            scenario.wait_for_step(2)
            path = scenario.cli("profile", scenario.dir.run_id).stdout.strip()
            assert sum(name.startswith("training step") for name in events(path)) == 5
        assert scenario.wait_until_over() == 0, scenario.story
        digests.append(scenario.digest)
    assert digests[0] == digests[1]


@pytest.mark.chaos
def test_program_without_the_runtime_is_refused(tmp_path: Path) -> None:
    scenario = submitted(tmp_path, 1, entrypoint={"command": ["bash", "-c", "sleep 60"]})
    scenario._wait(lambda: scenario.status()["state"] == "running", "the run starts")
    refused = scenario.cli("profile", scenario.dir.run_id, check=False)
    assert refused.returncode == 2
    assert "does not report its steps to hpcaccel" in refused.stderr
    scenario.cli("cancel", scenario.dir.run_id)
